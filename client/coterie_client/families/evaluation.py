"""Client half of the evaluation: each user evaluates a model on its own rows, and sends only numbers."""

from collections.abc import Sequence

import numpy as np

from coterie.arrays import Array, Indices
from coterie.families.evaluation import FinalModels, Scores
from coterie.wire.messages import Message
from coterie_client.interface.half import ClientHalf, Inbox, Local


def step(state: None, inbox: Inbox, local: Local) -> tuple[None, Sequence[Message]]:
    x = inbox[FinalModels].x
    losses = local.problem.value(x) if local.noised_rounds is None else np.full(local.n_own, np.inf)
    return state, [Scores(losses, *judged(x, local))]


def judged(x: Array, local: Local) -> tuple[Array, Array, Indices]:
    """Loss and metric (n_own,) of the users' models x (n_own, d) on their held-out rows, NaN without any, and the number of these rows.

    Both are means over the rows, whatever the reduction of the losses, so that users with few and many rows are comparable.
    """
    n_test = np.array([len(user.test_features) for user in local.users], dtype=np.int64)
    with_rows = np.flatnonzero(n_test)
    test_loss = np.full(local.n_own, np.nan)
    test_metric = np.full(local.n_own, np.nan)
    if with_rows.size:
        judges = [user for user in local.users if len(user.test_features)]
        features, targets = [user.test_features for user in judges], [user.test_target for user in judges]
        test_loss[with_rows], test_metric[with_rows] = local.problem.evaluate(x[with_rows], features, targets, with_rows)
        if local.problem.config.reduction == "sum":
            test_loss[with_rows] /= n_test[with_rows]
    return test_loss, test_metric, n_test


CLIENT: ClientHalf[None] = ClientHalf(init=lambda *_: None, step=step)
