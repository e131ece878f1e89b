"""Server half of `prepare`: standardisation by sums in member order, then the users' facts. Not a stage of rounds, two exchanges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from coterie.errors import ConfigError, RunError
from coterie.methods.prepare import AskFacts, AskMoments, AskSizes, Constants, UserFacts, UserMoments, UserSizes
from coterie.model import TensorInfo
from coterie_server.method import Facts, Federation, Members

MAX_D = 100_000_000  # dimensions of a model


async def prepare(
    federation: Federation,
    members: Members,
    *,
    standardize: bool,
    features: Sequence[str] = (),
    wants_minimisers: bool = True,
    wants_sizes: bool = False,
) -> Facts:
    """Agrees on the constants of standardisation if asked to, and learns n_rows, d, L_i and mu_i.

    `wants_minimisers`: a user whose loss alone has no unique minimiser ends the run, before the first stage. `wants_sizes`: n_test too.
    Raises ConfigError for a constant feature, RunError when users disagree on the number of features.
    """
    if not standardize:
        return await _asked_facts(federation, members, wants_minimisers=wants_minimisers, wants_sizes=wants_sizes)
    sums = (await federation.exchange(AskMoments()))[UserMoments]
    count = int(sums.n_rows.sum())
    mean = sums.sums.sum(axis=0) / count
    variance = sums.sums_of_squares.sum(axis=0) / count - mean**2
    # Below rounding level of the sums a variance is that of a constant.
    constant = np.flatnonzero(variance <= 1e-12 * (1.0 + mean**2))
    if constant.size:
        name = repr(features[constant[0]]) if features else f"{constant[0] + 1} of {mean.size}"
        raise ConfigError(f"feature {name} is the same in all {count} training rows, want one that varies (or standardize: false)")
    scale = np.sqrt(variance)
    await federation.exchange(Constants(mean, scale))
    # In an exchange of its own: L_i and mu_i are those of the standardised rows, which a host has once it has handled the constants.
    facts = await _asked_facts(federation, members, wants_minimisers=wants_minimisers, wants_sizes=wants_sizes)
    return replace(facts, mean=mean, scale=scale)


async def prepare_network(federation: Federation, members: Members, tensors: Sequence[TensorInfo]) -> Facts:
    """Learns how many rows each user has; d is the number of the network's parameters."""
    sizes = _checked((await federation.exchange(AskSizes()))[UserSizes], len(members))
    none = np.full(len(members), np.nan)
    return Facts(sizes.n_rows, none, none, sum(tensor.size for tensor in tensors), n_test=sizes.n_test)


def _checked(sizes: UserSizes, n_users: int) -> UserSizes:
    if sizes.n_rows.size != n_users or (sizes.n_rows < 1).any() or (sizes.n_test < 0).any():
        raise RunError(f"{sizes.n_rows.size} of {n_users} users told about their rows, wanted at least one training row of each")
    return sizes


async def _asked_facts(federation: Federation, members: Members, *, wants_minimisers: bool, wants_sizes: bool) -> Facts:
    asked = AskFacts(np.array([int(wants_minimisers)]))
    replies = await federation.exchange(asked, *([AskSizes()] if wants_sizes else []))
    facts = _facts(replies[UserFacts], members)
    return replace(facts, n_test=_checked(replies[UserSizes], len(members)).n_test) if wants_sizes else facts


def _facts(told: UserFacts, members: Members) -> Facts:
    if told.d.size != len(members):
        raise RunError(f"{told.d.size} of {len(members)} users told about their losses, wanted all")
    wrong = (told.d < 1) | (told.d > MAX_D) | (told.n_rows < 1) | (told.smoothness <= 0) | (told.strong_convexity < 0)
    if wrong.any():
        i = int(np.argmax(wrong))
        facts = f"d = {told.d[i]}, {told.n_rows[i]} rows, L = {told.smoothness[i]:g}, mu = {told.strong_convexity[i]:g}"
        raise RunError(f"user {members.names[i]!r} told {facts}, wanted positive numbers, d at most {MAX_D}, and mu at least 0")
    if len(set(told.d.tolist())) != 1:
        other = int(np.flatnonzero(told.d != told.d[0])[0])
        names = members.names
        raise RunError(f"user {names[other]!r} has models of dimension {told.d[other]}, user {names[0]!r} of {told.d[0]}: want the same")
    return Facts(told.n_rows, told.smoothness, told.strong_convexity, int(told.d[0]))
