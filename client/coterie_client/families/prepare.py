"""Client half of `prepare`: sums for the common constants, and facts about the users' losses. The agreed constants are its state.

Sums are per user, not per host. Those of a user with one or two rows determine its features (see `coterie.families.prepare`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from coterie.arrays import Array
from coterie.families.prepare import (
    AgreedMean,
    AgreedScale,
    AskConvexity,
    AskFacts,
    AskSizes,
    AskSmoothness,
    AskSums,
    UserConvexity,
    UserCounts,
    UserDeviations,
    UserFacts,
    UserSizes,
    UserSmoothness,
    UserSums,
)
from coterie.wire.messages import Message
from coterie_client.data import deviations, totals
from coterie_client.interface.half import ClientHalf, Inbox, Local


@dataclass(frozen=True)
class State:
    """Mean and scale (p,) of the features, None before they are agreed on. Without standardisation there is no scale."""

    mean: Array | None = None
    scale: Array | None = None


def step(state: State, inbox: Inbox, local: Local) -> tuple[State, Sequence[Message]]:
    replies: list[Message] = []
    if AskSums in inbox:
        found = totals(local.users)
        replies.append(UserSums(found.n_rows, found.sums))
        if inbox[AskSums].wants_counts[0]:
            replies.append(UserCounts(found.n_present))
    if AgreedMean in inbox:
        agreed = inbox[AgreedMean]
        state = State(agreed.mean)
        if agreed.wants_deviations[0]:
            replies.append(UserDeviations(deviations(local.users, agreed.mean)))
    if AgreedScale in inbox:
        state = replace(state, scale=inbox[AgreedScale].scale)
    if AskSizes in inbox:
        n_test = np.array([len(user.test_features) for user in local.users], dtype=np.int64)
        replies.append(UserSizes(np.array([len(user.features) for user in local.users], dtype=np.int64), n_test))
    if AskFacts in inbox:
        problem = local.problem
        if inbox[AskFacts].wants_minimisers[0]:
            problem.check()
        d = np.full(problem.n_users, problem.d, dtype=np.int64)
        replies.append(UserFacts(problem.n_rows, d))
    if AskSmoothness in inbox:
        replies.append(UserSmoothness(local.problem.smoothness()))
    if AskConvexity in inbox:
        replies.append(UserConvexity(local.problem.strong_convexity()))
    return state, replies


CLIENT: ClientHalf[State] = ClientHalf(init=lambda _, __, previous: previous or State(), step=step, changes_rows=True)
