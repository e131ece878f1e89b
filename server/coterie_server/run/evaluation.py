"""The evaluation of a stage: its final models go to the users, and their scores come back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from coterie.families.evaluation import FinalModels, Scores
from coterie_server.families.known_clusters import spread_of
from coterie_server.interface.half import Federation, Outcome
from coterie_server.interface.wanted import Wanted


async def evaluated(outcome: Outcome, federation: Federation, metric_name: str, *, with_losses: bool) -> Outcome:
    """Delivers the final models and collects the users' scores: by user, and means and spread over users with held-out rows.

    `with_losses`: whether users judge the models on their training rows too.
    """
    assert outcome.models is not None  # noqa: S101 - the caller has checked
    replies = await federation.exchange(FinalModels(outcome.models), wanted=[Wanted(Scores)])
    scores, n_users = replies[Scores], len(outcome.models)
    figures = {**({"sum_of_losses": float(scores.objective.sum())} if with_losses else {}), **replies.left_out(n_users)}
    judged = scores.n_test > 0
    if not judged.any():
        return replace(outcome, figures={**outcome.figures, **figures})
    metric = scores.test_metric[judged]
    figures |= {"heldout_loss": float(scores.test_loss[judged].mean()), "heldout_metric": float(metric.mean())}
    figures |= {f"heldout_metric_{which}": value for which, value in spread_of(metric).items()}
    values = np.full(n_users, np.nan)
    values[replies.awaited(np.arange(n_users))[judged]] = metric
    by_user = {**outcome.by_user, f"heldout_{metric_name}": values}
    return replace(outcome, figures={**outcome.figures, **figures}, by_user=by_user)
