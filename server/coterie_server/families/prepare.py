"""Server half of `prepare`: common constants, from sums in member order or an earlier run; then facts of users. One to four exchanges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array, Indices
from coterie.errors import ConfigError, RunError
from coterie.experiment.method import Fact
from coterie.experiment.model import TensorInfo
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
from coterie_server.interface.half import Facts, Federation, Members, Replies

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
    wants: AbstractSet[Fact] = frozenset(),
) -> Facts:
    """Finds the common constants, and learns n_rows, d, and the facts that it `wants`.

    `fill`: missing cells get the mean of the others. `given`: "mean", "scale" and "fill" of an earlier run whose models this one starts
    from; with them, no sums are asked for. `may_be_constant` (p,): features whose scale is 1 where they do not vary. `wants_minimisers`: a
    user whose loss alone has no unique minimiser ends the run, before the first stage. `wants_sizes`: n_test too.
    Raises ConfigError for a feature that nobody has, or that is constant, RunError when users disagree on the number of features.
    """
    agreed = _Agreed()
    mean, scale = (given or {}).get("fill" if fill else "mean"), (given or {}).get("scale")
    if (standardize or fill) and mean is not None and (scale is not None or not standardize):
        agreed = _Agreed(mean, scale if standardize else None, None)
        await federation.exchange(AgreedMean(mean, np.array([0])))
        if agreed.scale is not None:
            await federation.exchange(AgreedScale(agreed.scale))
    elif standardize or fill:
        agreed = await _agreed(federation, features, np.array(may_be_constant, dtype=np.bool_), standardize=standardize, fill=fill)
    # In an exchange of its own: L_i and mu_i are those of the final rows, which a host has only after the constants.
    asked: list[Message] = [AskFacts(np.array([int(wants_minimisers)])), *([AskSizes()] if wants_sizes else [])]
    asked += [AskSmoothness()] if "smoothness" in wants else []
    asked += [AskConvexity()] if "strong_convexity" in wants else []
    replies = await federation.exchange(*asked)
    facts = _facts(replies, members, wants)
    if wants_sizes:
        facts = replace(facts, n_test=_checked(replies[UserSizes], len(members)).n_test)
    mean, filled = agreed.mean if standardize else None, agreed.mean if fill else None
    return replace(facts, mean=mean, scale=agreed.scale, fill=filled, n_fewest=agreed.n_fewest)


class _Agreed(NamedTuple):
    """Constants of the features (p,), and for each user (n,) the fewest cells, above 0, in any sum that it has sent."""

    mean: Array | None = None
    scale: Array | None = None
    n_fewest: Indices | None = None


async def _agreed(
    federation: Federation, features: Sequence[str], may_be_constant: NDArray[np.bool_], *, standardize: bool, fill: bool
) -> _Agreed:
    """The mean of each feature, and then the root of the mean squared deviation from it, both without missing cells.

    Two passes, since a mean of squares minus the square of a mean is inexact for a feature that varies little. Sums are in member order.
    """
    replies = await federation.exchange(AskSums(np.array([int(fill)])))
    told = replies[UserSums]
    n_present = replies[UserCounts].n_present if fill else np.repeat(told.n_rows[:, None], told.sums.shape[1], axis=1)
    if n_present.shape != told.sums.shape or (n_present < 0).any():
        shapes = f"sums of shape {told.sums.shape} and counts of shape {n_present.shape}"
        raise RunError(f"users told {shapes}, wanted the same and no count below 0")
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
    """(p,) sums of (n, p), pairwise over users in member order, which keeps rounding errors small."""
    return np.asarray(np.ascontiguousarray(rows.T).sum(axis=1))


def _named(features: Sequence[str], place: int, p: int) -> str:
    return f"feature {features[place]!r}" if features else f"feature {place + 1} of {p}"


async def prepare_network(federation: Federation, members: Members, tensors: Sequence[TensorInfo]) -> Facts:
    """Learns how many rows each user has; d is the number of the network's parameters."""
    sizes = _checked((await federation.exchange(AskSizes()))[UserSizes], len(members))
    return Facts(sizes.n_rows, sum(tensor.size for tensor in tensors), n_test=sizes.n_test)


def _checked(sizes: UserSizes, n_users: int) -> UserSizes:
    if sizes.n_rows.size != n_users or (sizes.n_rows < 1).any() or (sizes.n_test < 0).any():
        raise RunError(f"{sizes.n_rows.size} of {n_users} users told about their rows, wanted at least one training row of each")
    return sizes


def _facts(replies: Replies, members: Members, wants: AbstractSet[Fact]) -> Facts:
    told = replies[UserFacts]
    _check(members, (told.d < 1) | (told.d > MAX_D), "d", told.d, f"from 1 to {MAX_D}")
    _check(members, told.n_rows < 1, "n_rows", told.n_rows, "at least 1")
    if len(set(told.d.tolist())) != 1:
        other = int(np.flatnonzero(told.d != told.d[0])[0])
        names = members.names
        raise RunError(f"user {names[other]!r} has models of dimension {told.d[other]}, user {names[0]!r} of {told.d[0]}: want the same")
    smoothness = replies[UserSmoothness].smoothness if "smoothness" in wants else None
    convexity = replies[UserConvexity].strong_convexity if "strong_convexity" in wants else None
    if smoothness is not None:
        _check(members, smoothness <= 0, "L", smoothness, "above 0")
    if convexity is not None:
        _check(members, convexity < 0, "mu", convexity, "at least 0")
    return Facts(told.n_rows, int(told.d[0]), smoothness, convexity)


def _check(members: Members, wrong: NDArray[np.bool_], what: str, told: NDArray[Any], wanted: str) -> None:
    """RunError unless all users have told a right number. It names the first with a wrong one."""
    if told.shape != (len(members),):
        raise RunError(f"{told.size} of {len(members)} users told {what}, wanted all")
    if wrong.any():
        i = int(np.argmax(wrong))
        raise RunError(f"user {members.names[i]!r} told {what} = {told[i]:g}, wanted a number {wanted}")
