"""Client half of `prepare`: sums for standardisation, and facts about the users' losses. The agreed constants are its state.

Sums are of one user, not of a host: those of a user with one or two rows determine its features (see `coterie.methods.prepare`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coterie.arrays import Array
from coterie.messages import Message
from coterie.methods.prepare import AskFacts, AskMoments, AskSizes, Constants, UserFacts, UserMoments, UserSizes
from coterie_client.data import moments
from coterie_client.method import Inbox, Local


@dataclass(frozen=True)
class State:
    """Mean and scale (p,) of the features, once agreed on; None before."""

    mean: Array | None = None
    scale: Array | None = None


class _Prepare:
    def init(self, options: Mapping[str, Any], local: Local, previous: State | None) -> State:  # noqa: ARG002
        return previous or State()

    def step(self, state: State, inbox: Inbox, local: Local) -> tuple[State, Sequence[Message]]:
        replies: list[Message] = []
        if AskMoments in inbox:
            found = moments(local.users)
            replies.append(UserMoments(found.n_rows, found.sums, found.sums_of_squares))
        if Constants in inbox:
            constants = inbox[Constants]
            state = State(constants.mean, constants.scale)
        if AskSizes in inbox:
            n_test = np.array([len(user.test_features) for user in local.users], dtype=np.int64)
            replies.append(UserSizes(np.array([len(user.features) for user in local.users], dtype=np.int64), n_test))
        if AskFacts in inbox:
            problem = local.problem
            if inbox[AskFacts].wants_minimisers[0]:
                problem.check()
            d = np.full(problem.n_users, problem.d, dtype=np.int64)
            replies.append(UserFacts(problem.n_rows, d, problem.smoothness(), problem.strong_convexity()))
        return state, replies


CLIENT = _Prepare()
