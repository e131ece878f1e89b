"""Means that bear users who lie: what stands in for a mean of users' answers with `federation.robust`.

Let k users have answered, of whom at most f lie. Each counts as one, since its number of rows is what it says.

- median: of each number. trimmed_mean: of each number, the mean without the f smallest and the f largest. Yin, Chen, Ramchandran and
  Bartlett (2018).
- geometric_median: the point with the smallest sum of distances to the answers, by Weiszfeld's steps from the median of each number. Steps
  are smoothed as by Pillutla, Kakade and Harchaoui (2022).
- krum: the answer whose k - f - 2 nearest other ones are nearest to it, by the sum of squared distances; multi_krum: the mean of the k - f
  answers for which this sum is smallest. Of equal sums that of the earlier member counts as smaller. Blanchard, El Mhamdi, Guerraoui and
  Stainer (2017).
- norm_clip: the mean, where the floor(2 (f/k) (k - f)) longest changes are shortened to the longest of the others. Allouah and others
  (2024), "The Vital Role of Gradient Clipping in Byzantine-Resilient Distributed Learning".

Answers with a NaN, an infinity or a number beyond `_MOST` are no models: they are left out, and count among the f.

Bits depend on the answers and on the order of members, and not on how many of them a message holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array, Indices
from coterie.errors import RunError
from coterie.experiment.robust import Robust
from coterie.families.partial import Single, Updated
from coterie.text.quoting import quoted
from coterie_server.families import own_rule
from coterie_server.families.averages import in_order, owners

LEFT = "left out by the rule"  # (n,) in a state: in how many rounds a user's answer was left out or shortened

_MOST = 1e140  # of a number of an answer: squared distances are finite
_BLOCK = 1 << 18  # numbers at once
_SHOWN = 5  # users of a sentence
_STEPS, _CLOSE, _SMOOTH = 100, 1e-7, 1e-6  # of Weiszfeld's method; lengths are parts of the median distance
_HARDLY = 0.1  # of an equal share: an answer with less hardly counts

Rows = Sequence[NDArray[np.floating[Any]]]  # (., size) each, of users in member order
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Centre:
    """What stands in for a mean."""

    values: Array  # (size,)
    left: Flags  # (k,) whose answers do not count, hardly count, or were shortened; of trimmed_mean: at most of their numbers


@np.errstate(over="ignore", invalid="ignore")  # those who lie may send any numbers
def centre_of(robust: Robust, rows: Rows, before: NDArray[Any] | None = None) -> Centre:
    """The centre of k answers by a rule, in float64. norm_clip shortens how far they are from `before` (size,).

    RunError where no answer can be a model.
    """
    k = sum(map(len, rows))
    are_models = [_largest(array) <= _MOST for array in rows]  # False for NaN
    is_model = np.concatenate(are_models)
    n_models = int(is_model.sum())
    if not n_models:
        raise RunError(f"robust: of {k} answers none has finite numbers up to {_MOST:g} alone, want at least one to average")
    f = robust.bears(k)
    if n_models < k:
        rows = [array[kept] for array, kept in zip(rows, are_models, strict=True) if kept.any()]
        f = min(max(0, f - (k - n_models)), robust.bears(n_models))
    start = np.zeros(rows[0].shape[1]) if before is None else before
    if robust.is_own:
        centre = Centre(*own_rule.centre_by(robust.rule, np.concatenate(rows, dtype=np.float64), f, start.astype(np.float64)))
    else:
        centre = _RULES[robust.rule](rows, f, start)
    left = ~is_model
    left[is_model] = centre.left
    return Centre(centre.values, left)


def check(robust: Robust | None) -> None:
    """ConfigError for a rule of others that does not keep what it promises."""
    if robust is not None and robust.is_own:
        own_rule.check(robust.rule)


def _largest(array: NDArray[np.floating[Any]]) -> Array:
    """(k,) the largest absolute number of each row, NaN where there is one."""
    found = np.maximum(array.max(axis=1, initial=0.0), -array.min(axis=1, initial=0.0))
    return np.asarray(found, dtype=np.float64)


def _blocks(rows: Rows) -> Iterator[tuple[slice, Array]]:
    """(k, width) the same numbers of all answers, block by block."""
    size, width = rows[0].shape[1], max(1, _BLOCK // max(1, sum(map(len, rows))))
    for start in range(0, size, width):
        block = slice(start, min(start + width, size))
        yield block, np.concatenate([array[:, block] for array in rows]).astype(np.float64)


def _median(rows: Rows, f: int, before: NDArray[Any]) -> Centre:  # noqa: ARG001 - all rules have these arguments
    values = np.zeros(rows[0].shape[1])
    for block, part in _blocks(rows):
        values[block] = np.median(part, axis=0)
    return Centre(values, np.zeros(sum(map(len, rows)), dtype=np.bool_))


def _trimmed_mean(rows: Rows, f: int, before: NDArray[Any]) -> Centre:  # noqa: ARG001
    values, k = np.zeros(rows[0].shape[1]), sum(map(len, rows))
    outside = np.zeros(k)
    for block, part in _blocks(rows):
        kept = np.sort(part, axis=0)[f : k - f]
        values[block] = kept.mean(axis=0)
        outside += ((part < kept[0]) | (part > kept[-1])).sum(axis=1)
    return Centre(values, outside > values.size / 2)


def _geometric_median(rows: Rows, f: int, before: NDArray[Any]) -> Centre:
    point = _median(rows, f, before).values
    k = sum(map(len, rows))
    shares = np.full(k, 1 / k)
    for _ in range(_STEPS):
        distances = _distances(rows, point)
        scale = float(np.median(distances))
        if not scale:  # half of the answers are there
            shares = (distances == 0).astype(np.float64)
            break
        shares = 1 / np.maximum(distances, _SMOOTH * scale)
        shares /= shares.sum()
        after = in_order(rows, shares)
        moved, point = _distances([point[None]], after)[0], after
        if moved <= _CLOSE * scale:
            break
    return Centre(point, shares / shares.sum() * k < _HARDLY)


def _krum(rows: Rows, f: int, before: NDArray[Any]) -> Centre:  # noqa: ARG001
    return _nearest(rows, f, 1)


def _multi_krum(rows: Rows, f: int, before: NDArray[Any]) -> Centre:  # noqa: ARG001
    return _nearest(rows, f, sum(map(len, rows)) - f)


def _nearest(rows: Rows, f: int, n_kept: int) -> Centre:
    """The mean of so many answers that are nearest to others; of all where there are fewer than three."""
    k = sum(map(len, rows))
    if k < 3:
        return Centre(in_order(rows, np.full(k, 1 / k)), np.zeros(k, dtype=np.bool_))
    squared = np.zeros((k, k))
    for _, part in _blocks(rows):
        for i in range(k - 1):
            away = part[i + 1 :] - part[i]
            squared[i, i + 1 :] += (away * away).sum(axis=1)
    squared += squared.T
    np.fill_diagonal(squared, np.inf)
    scores = np.sort(squared, axis=1)[:, : max(1, k - f - 2)].sum(axis=1)
    is_kept = np.zeros(k, dtype=np.bool_)
    is_kept[np.argsort(scores, kind="stable")[:n_kept]] = True
    return Centre(in_order(rows, is_kept / n_kept), ~is_kept)


def _norm_clip(rows: Rows, f: int, before: NDArray[Any]) -> Centre:
    lengths = _distances(rows, before)
    k = lengths.size
    n_shortened = 2 * f * (k - f) // k
    limit = np.sort(lengths)[k - n_shortened - 1]
    is_long = lengths > limit
    shares = np.where(is_long, limit / np.where(is_long, lengths, 1.0), 1.0) / k
    return Centre(in_order(rows, shares) + (1 - shares.sum()) * before, is_long)


def _distances(rows: Rows, point: NDArray[Any]) -> Array:
    """(k,) of the answers from a point."""
    squared = np.zeros(sum(map(len, rows)))
    for block, part in _blocks(rows):
        away = part - point[block]
        squared += (away * away).sum(axis=1)
    found: Array = np.sqrt(squared)
    return found


_RULES: Mapping[str, Callable[[Rows, int, NDArray[Any]], Centre]] = {
    "median": _median,
    "trimmed_mean": _trimmed_mean,
    "geometric_median": _geometric_median,
    "krum": _krum,
    "multi_krum": _multi_krum,
    "norm_clip": _norm_clip,
}


@dataclass(frozen=True)
class Mean:
    """The mean of users' shared tensors, or the centre by a rule."""

    weights: Single
    counts: Indices
    left: Indices  #: the users whose tensors a rule has left out or shortened


def mean_of_tensors(robust: Robust | None, updates: Sequence[Updated], shares: Array, before: Single) -> Mean:
    """The mean of tensors in messages that name their users, by shares (k,); a rule takes the median of counts. Of the type of `before`."""
    users, rows, counts = owners(updates), [update.weights for update in updates], [update.counts for update in updates]
    if robust is None:
        return Mean(in_order(rows, shares).astype(before.dtype), np.rint(in_order(counts, shares)).astype(np.int64), users[:0])
    centre = centre_of(robust, rows, before)
    middle = np.rint(np.median(np.concatenate(counts), axis=0)).astype(np.int64)
    return Mean(centre.values.astype(before.dtype), middle, users[centre.left])


def nobody_left(robust: Robust | None, n_users: int) -> dict[str, Indices]:
    """What a state has beside its tensors before the first round."""
    return {} if robust is None else {LEFT: np.zeros(n_users, dtype=np.int64)}


def counted(beside: Mapping[str, NDArray[Any]], left: Indices) -> Mapping[str, NDArray[Any]]:
    """The same, after a round in which these users were left out."""
    if LEFT not in beside:
        return beside
    counts = beside[LEFT].copy()
    counts[left] += 1
    return {**beside, LEFT: counts}


def figures(robust: Robust | None, before: Mapping[str, NDArray[Any]], after: Mapping[str, NDArray[Any]]) -> dict[str, float]:
    """The figure of a round: how many users' answers were left out, or shortened."""
    if robust is None or LEFT not in after:
        return {}
    return {_does(robust).replace(" ", "_"): float((after[LEFT] > before[LEFT]).sum())}


def _does(robust: Robust) -> str:
    return "shortened" if robust.rule == "norm_clip" else "left out"


def said(robust: Robust | None, sizes: Sequence[int], of: str) -> list[str]:
    """A sentence on how many users who lie a rule bears in averages of so many users, in words `of` what: "a round", "a cluster"."""
    if robust is None:
        return []
    n, bears = (" to ".join(f"{k}" for k in sorted(set(listed))) for listed in (sizes, map(robust.bears, sizes)))
    return [
        f"robust: of the {n} users of {of} {robust.rule} bears {bears} who lie; each user counts as one, whatever number of rows it says"
    ]


def doubts(robust: Robust | None, n_users: int, of: str) -> list[str]:
    """A warning where averages are of too few users."""
    if robust is None or (bears := robust.bears(n_users)) >= (wanted := max(1, robust.most(n_users))):
        return []
    return [f"robust: of the {n_users} users of {of} {robust.rule} bears {bears} who lie, want {wanted}: more users in each average"]


def found(robust: Robust | None, names: Sequence[str], counts: Indices | None) -> tuple[str, ...]:
    """A sentence on whose answers a rule has left out or shortened, and in how many rounds: `counts` (n,) of users with these names."""
    if robust is None or counts is None:
        return ()
    does = f"robust: {robust.rule} has {_does(robust)}"
    n_users = int((counts > 0).sum())
    if not n_users:
        return (f"{does} nobody's answers",)
    most = np.argsort(-counts, kind="stable")[: min(n_users, _SHOWN)].tolist()
    listed = ", ".join(f"{quoted(names[i])} in {counts[i]}" for i in most)
    return (f"{does} answers of {n_users} of {counts.size} users, by rounds: {listed}{', ...' if n_users > _SHOWN else ''}",)
