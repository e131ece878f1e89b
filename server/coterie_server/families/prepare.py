"""Server half of `prepare`: common constants by sums in member order, or of an earlier run; then facts of users. One to four exchanges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array, Indices
from coterie.errors import ConfigError, RunError
from coterie.experiment.model import TensorInfo
from coterie.families.prepare import (
    AgreedMean,
    AgreedScale,
    AskFacts,
    AskSizes,
    AskSums,
    UserCounts,
    UserDeviations,
    UserFacts,
    UserSizes,
    UserSums,
)
from coterie_server.interface.half import Facts, Federation, Members

MAX_D = 100_000_000  # dimensions of a model


# A feature whose scale is at most this times its mean is constant but for rounding. Sums in pairs of m equal values c, by the users and
# then over them, are wrong by at most 2 (19 + log2(m/128)) eps m c, so their mean by less than 128 eps c for m up to 2^40.
_ROUNDING = 128 * float(np.finfo(np.float64).eps)


async def prepare(
    federation: Federation,
    members: Members,
    *,
    standardize: bool,
    fill: bool = False,
    given: Mapping[str, Array] | None = None,
    features: Sequence[str] = (),
    may_be_constant: Sequence[bool] = (),
    wants_minimisers: bool = True,
    wants_sizes: bool = False,
) -> Facts:
    """Agrees on the constants that are asked for, and learns n_rows, d, L_i and mu_i.

    `fill`: missing cells get the mean of those that are there. `given`: "mean", "scale" and "fill" of an earlier run, whose models this one
    starts from. Where they are there, nobody is asked for sums. `may_be_constant` (p,): features whose scale is 1 where they do not vary.
    `wants_minimisers`: a user whose loss alone has no unique minimiser ends the run, before the first stage. `wants_sizes`: n_test too.
    Raises ConfigError for a feature that nobody has, or that is constant, RunError when users disagree on the number of features.
    """
    agreed = _NOTHING
    mean, scale = (given or {}).get("fill" if fill else "mean"), (given or {}).get("scale")
    if (standardize or fill) and mean is not None and (scale is not None or not standardize):
        agreed = _Agreed(mean, scale if standardize else None, None)
        await federation.exchange(AgreedMean(mean, np.array([0])))
        if agreed.scale is not None:
            await federation.exchange(AgreedScale(agreed.scale))
    elif standardize or fill:
        agreed = await _agreed(federation, features, np.array(may_be_constant, dtype=np.bool_), standardize=standardize, fill=fill)
    # In an exchange of its own: L_i and mu_i are those of the final rows, which a host has once it has handled the constants.
    facts = await _asked_facts(federation, members, wants_minimisers=wants_minimisers, wants_sizes=wants_sizes)
    mean, filled = agreed.mean if standardize else None, agreed.mean if fill else None
    return replace(facts, mean=mean, scale=agreed.scale, fill=filled, n_fewest=agreed.n_fewest)


class _Agreed(NamedTuple):
    """Constants of the features (p,), and of each user (n,) the fewest cells, above 0, that a sum of it is about."""

    mean: Array | None
    scale: Array | None
    n_fewest: Indices | None


_NOTHING = _Agreed(None, None, None)


async def _agreed(
    federation: Federation, features: Sequence[str], may_be_constant: NDArray[np.bool_], *, standardize: bool, fill: bool
) -> _Agreed:
    """The mean of each feature, and then the root of the mean squared deviation from it. A missing cell has no part in either.

    Two passes, since a mean of squares less the square of a mean loses what varies little beside its mean. Sums are in member order.
    """
    replies = await federation.exchange(AskSums(np.array([int(fill)])))
    told = replies[UserSums]
    n_present = replies[UserCounts].n_present if fill else np.repeat(told.n_rows[:, None], told.sums.shape[1], axis=1)
    if n_present.shape != told.sums.shape or (n_present < 0).any():
        raise RunError(
            f"users told sums of shape {told.sums.shape} and counts of shape {n_present.shape}, wanted the same and no count below 0"
        )
    count = n_present.sum(axis=0)
    if not count.all():
        raise ConfigError(f"{_named(features, int(np.argmin(count)), count.size)} has no value in any training row, want at least one")
    mean = _sum_over_users(told.sums) / count
    n_fewest = np.where(n_present > 0, n_present, np.iinfo(np.int64).max).min(axis=1, initial=np.iinfo(np.int64).max)
    replies = await federation.exchange(AgreedMean(mean, np.array([int(standardize)])))
    if not standardize:
        return _Agreed(mean, None, n_fewest)
    norms = replies[UserDeviations].norms
    top = norms.max(axis=0, initial=0.0)
    shares = norms / np.where(top > 0.0, top, 1.0)
    scale = top * np.sqrt(_sum_over_users(shares * shares) / count)
    is_constant = scale <= _ROUNDING * np.abs(mean)
    if may_be_constant.size:
        scale, is_constant = np.where(is_constant & may_be_constant, 1.0, scale), is_constant & ~may_be_constant
    if is_constant.any():
        place = int(np.argmax(is_constant))
        name = _named(features, place, mean.size)
        raise ConfigError(f"{name} is the same in all {count[place]} training rows, want one that varies (or standardize: false)")
    await federation.exchange(AgreedScale(scale))
    return _Agreed(mean, scale, n_fewest)


def _sum_over_users(rows: Array) -> Array:
    """(p,) sums of (n, p) in pairs of users in member order, whose errors of rounding are small."""
    found: Array = np.ascontiguousarray(rows.T).sum(axis=1)
    return found


def _named(features: Sequence[str], place: int, p: int) -> str:
    return f"feature {features[place]!r}" if features else f"feature {place + 1} of {p}"


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
