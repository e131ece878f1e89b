"""How users' scores of their models become figures, for all methods that train networks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coterie.arrays import Array, Indices
from coterie.errors import ProtocolError, RunError
from coterie.families.partial import AS_IS, MODES, Scores
from coterie_server.families.known_clusters import spread_of
from coterie_server.interface.half import Replies
from coterie_server.interface.merge import check_senders


@np.errstate(over="ignore", invalid="ignore")  # losses of diverged models may be infinite, and their spread NaN
def judged(
    replies: Replies, modes: Indices, n_test: Indices, whose: str, what: str, names: Sequence[str]
) -> tuple[dict[str, float], dict[str, Array]]:
    """Means and spreads over the users with held-out rows, and the scores by user; both empty where nobody has any.

    `n_test` (n,) and the names are of all users; `whose` models they are and `what` the metric is are parts of the figures' names.
    """
    n_users = n_test.size
    scores, everyone = replies[Scores], replies.awaited(np.arange(n_users))
    said = everyone if scores.users is None else scores.users
    check_senders(Scores.kind, said, everyone)
    if scores.loss.shape[1] != modes.size:
        raise ProtocolError(f"{Scores.kind} came with {scores.loss.shape[1]} modes, wanted {modes.size}")
    judged = n_test[said] > 0
    if not judged.any():
        return {}, {}
    figures: dict[str, float] = {}
    by_user: dict[str, Array] = {}
    for place, mode in enumerate(modes.tolist()):
        loss, metric = scores.loss[judged, place], scores.metric[judged, place]  # may be infinite
        if np.isnan(metric).any():
            name = names[said[judged][np.isnan(metric)][0]]
            raise RunError(f"user {name!r} judged its model to be nan, wanted a number: a smaller learning rate may help")
        mean_loss, mean_metric = float(loss.mean()), float(metric.mean())
        if mode == AS_IS:
            figures |= {"heldout_loss": mean_loss, "heldout_metric": mean_metric}
        name = f"{whose}{MODES[mode]}_{what}"
        figures[name] = mean_metric
        figures |= {f"{name}_{which}": value for which, value in spread_of(metric).items()}
        by_user[name] = np.full(n_users, np.nan)
        by_user[name][said[judged]] = metric
    return figures, by_user
