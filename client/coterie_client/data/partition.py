"""Deals labelled rows to users: by classes, by Dirichlet proportions, by natural users, or by a rule from outside.

The result depends only on labels and seed, and is computed for all users at once. `classes` deals classes like cards, so that all are used
equally often: the shards of McMahan et al. (2017), with distinct classes per user as in Collins et al. (2021). `dirichlet` follows Hsu, Qi
and Brown (2019), with proportions drawn per class. A user's test rows have the class proportions of its training rows; no test row is used
twice.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array, Indices, distinct
from coterie.draws.streams import Stream, normal, stream
from coterie.errors import ConfigError, default_finding
from coterie.experiment.partition import Partition
from coterie.findings import Finding
from coterie.text.names import natural_key
from coterie_client.data.pool import Pool, Share, chosen_classes
from coterie_client.data.split import held_out_rows

MAX_DRAWS = 100  # of Dirichlet proportions, until all users have enough rows
_LEAST_SHARE = 2  # rows of a class per user, if there are enough for all
_NONE = np.empty(0, dtype=np.int64)


@default_finding(Finding("D5", place="data.partition.by"))
def deal(pool: Pool, partition: Partition | None, test_fraction: float, seed: int) -> list[Share]:
    """All users' shares of the pool, in natural order. Raises ConfigError when the labels do not allow the partition."""
    if partition is None:
        partition = Partition(by="user")
    seed = seed if partition.seed is None else partition.seed
    if partition.by == "user":
        return _by_user(pool, partition, test_fraction, seed)
    if partition.is_own:
        return _by_rule(pool, partition, test_fraction, seed)
    labels = _classes(pool, partition)
    assert partition.users is not None  # noqa: S101 - its own validator
    decks = [_deck(pool, label, "rows", seed) for label in labels]
    n_rows = sum(map(len, decks))
    if partition.users > n_rows:
        raise ConfigError(f"partition.users is {partition.users}, but {pool.where} has {n_rows} rows for them: want at least one for each")
    counts = _counts_by_classes(pool, partition, labels, decks, seed) if partition.by == "classes" else _dirichlet(partition, decks, seed)
    hands = _hands(decks, counts)
    test_hands = None
    if pool.test is not None:
        test_decks = [_deck(pool.test, label, "test rows", seed) for label in labels]
        test_hands = _hands(test_decks, _test_counts(pool.test, labels, counts, test_decks))
    names = [f"u{number}" for number in range(partition.users)]
    return [
        _share(pool, partition, name, hands[place], None if test_hands is None else test_hands[place], test_fraction, seed)
        for place, name in enumerate(names)
    ]


def _share(pool: Pool, partition: Partition, name: str, rows: Indices, test_rows: Indices | None, test_fraction: float, seed: int) -> Share:
    """A user's share, cut to the sizes in the partition. Without `test_rows` of the source, some of the user's own rows are held out."""
    source = pool if test_rows is None else pool.test
    assert source is not None  # noqa: S101 - test rows came from there
    if test_rows is None:
        is_test = held_out_rows(name, pool.target[rows], test_fraction, seed)
        rows, test_rows = rows[~is_test], rows[is_test]
    rows = _cut(pool, rows, partition.rows_per_user, seed, "partition cut", name)
    test_rows = _cut(source, test_rows, partition.test_rows_per_user, seed, "partition cut of test rows", name)
    return Share(name, pool.clusters.get(name), rows, test_rows)


def _by_rule(pool: Pool, partition: Partition, test_fraction: float, seed: int) -> list[Share]:
    from coterie_client.data.sources import dealt  # noqa: PLC0415 - few experiments have one

    chosen = chosen_classes(pool, partition)
    rows = np.arange(len(pool.target)) if chosen is None else np.flatnonzero(np.isin(pool.target, chosen))
    users = None if pool.users is None else {name: mine[np.isin(mine, rows)] for name, mine in pool.users.items()}
    kept = dealt(partition, rows, pool.target[rows], users, seed)
    kept = {name: kept[name] for name in sorted(kept, key=natural_key)}
    tests = None if pool.test is None else _test_rows_by_class(pool, pool.test, kept, seed)
    return [_share(pool, partition, name, rows, None if tests is None else tests[name], test_fraction, seed) for name, rows in kept.items()]


def _by_user(pool: Pool, partition: Partition, test_fraction: float, seed: int) -> list[Share]:
    if pool.users is None:
        raise ConfigError(f"partition.by is 'user', but the rows of {pool.where} have no users: want classes or dirichlet")
    chosen = chosen_classes(pool, partition)
    is_chosen = np.ones(len(pool.target), dtype=np.bool_) if chosen is None else np.isin(pool.target, chosen)
    least = partition.min_rows or 1
    kept: dict[str, Indices] = {}
    for name, rows in pool.users.items():
        if len(rows) >= least:
            mine = rows[is_chosen[rows]]
            if partition.classes_per_user is not None:
                _check_whole(pool, mine)
                present = distinct(pool.target[mine])
                order = stream(seed, "partition classes", name).order(len(present))
                mine = mine[np.isin(pool.target[mine], present[order[: partition.classes_per_user]])]
            if len(mine) >= least:
                kept[name] = mine
    kept = {name: kept[name] for name in sorted(kept, key=natural_key)}
    if not kept:
        most = max(map(len, pool.users.values()), default=0)
        said = f"no user of {pool.where} has {least} rows of the partition's classes, want some that do: the most is {most} of all classes"
        raise ConfigError(said)
    if partition.max_users is not None and len(kept) > partition.max_users:
        lots = {name: int(stream(seed, "partition users", name).words.random_raw()) for name in kept}
        drawn = set(sorted(kept, key=lambda name: (lots[name], name))[: partition.max_users])
        kept = {name: rows for name, rows in kept.items() if name in drawn}
    if partition.sizes is not None:
        kept = _thinned(pool, partition.sizes.lognormal, kept, least, seed)
    tests = _natural_test_rows(pool, partition, kept, seed)
    return [_share(pool, partition, name, rows, None if tests is None else tests[name], test_fraction, seed) for name, rows in kept.items()]


def _thinned(pool: Pool, sigma: float, kept: dict[str, Indices], least: int, seed: int) -> dict[str, Indices]:
    """Natural users with log-normal numbers of rows: proportional to the drawn sizes, with the same mean if users have enough rows."""
    sizes = {name: math.exp(sigma * float(normal(stream(seed, "partition sizes", name), 1)[0])) for name in kept}
    scale = sum(map(len, kept.values())) / sum(sizes.values())
    thinned = {}
    for name, rows in kept.items():
        n_rows = max(least, math.floor(scale * sizes[name] + 0.5))
        thinned[name] = _cut(pool, rows, n_rows, seed, "partition thinned", name)
    return thinned


def _natural_test_rows(pool: Pool, partition: Partition, kept: dict[str, Indices], seed: int) -> dict[str, Indices] | None:
    """The source's test rows by user: the user's own, or, without users in the test rows, some with the user's class proportions."""
    test = pool.test
    if test is None:
        return None
    if test.users is not None:
        mine = {name: test.users.get(name, _NONE) for name in kept}
        if partition.classes is None and partition.classes_per_user is None:
            return mine
        return {name: rows[np.isin(test.target[rows], distinct(pool.target[kept[name]]))] for name, rows in mine.items()}
    return _test_rows_by_class(pool, test, kept, seed)


def _test_rows_by_class(pool: Pool, test: Pool, kept: dict[str, Indices], seed: int) -> dict[str, Indices]:
    everything = np.concatenate(list(kept.values()))
    _check_whole(pool, everything)
    labels = distinct(pool.target[everything])
    counts = np.array([[(pool.target[rows] == label).sum() for label in labels] for rows in kept.values()])
    decks = [_deck(test, label, "test rows", seed) for label in labels]
    return dict(zip(kept, _hands(decks, _test_counts(test, labels, counts, decks)), strict=True))


def _classes(pool: Pool, partition: Partition) -> Array:
    """(C,) the labels to deal: the chosen ones, or all from 0 to the largest. Each must have a row."""
    everything = np.arange(len(pool.target))
    _check_whole(pool, everything)
    chosen = chosen_classes(pool, partition)
    if chosen is not None:
        return np.sort(chosen)
    if not len(pool.target):
        raise ConfigError(f"{pool.where} has 0 rows, want at least one")
    n_classes = int(pool.target.max()) + 1
    if n_classes > 2 * len(pool.target) + 1000:
        said = f"{pool.where} has the label {n_classes - 1} among {len(pool.target)} rows, want labels from 0 on, or partition.classes"
        raise ConfigError(said)
    counts = np.bincount(pool.target.astype(np.int64), minlength=n_classes)
    for label in np.flatnonzero(counts == 0):
        found = f"class {label} has 0 rows in {pool.where}, whose labels go up to {n_classes - 1}"
        raise ConfigError(f"{found}: want a row of each, or partition.classes with those to use")
    if pool.test is not None:
        _check_whole(pool.test, np.arange(len(pool.test.target)))
        for row in np.flatnonzero(pool.test.target >= n_classes):
            raise ConfigError(
                f"{pool.test.where} row {row + 1} has the label {pool.test.target[row]:g}, want 0 to {n_classes - 1} as training rows have"
            )
    return np.arange(n_classes, dtype=np.float64)


def _check_whole(pool: Pool, rows: Indices) -> None:
    labels = pool.target[rows]
    for place in np.flatnonzero(~((labels >= 0) & (labels == np.floor(labels)) & np.isfinite(labels))):
        raise ConfigError(f"{pool.where} row {rows[place] + 1} has the label {labels[place]:g}, want a whole number from 0")


def _deck(pool: Pool, label: float, what: str, seed: int) -> Indices:
    """The rows with this label, shuffled."""
    rows = np.flatnonzero(pool.target == label)
    return rows[stream(seed, f"partition {what}", int(label)).order(len(rows))]


def _hands(decks: Sequence[Indices], counts: NDArray[np.int64]) -> list[Indices]:
    """Each user's rows, ascending. `counts` (n_users, C) says how many of each class; users are served in turn."""
    ends = np.cumsum(counts, axis=0)
    hands = []
    for mine, end in zip(counts, ends, strict=True):
        dealt = [deck[last - n : last] for deck, n, last in zip(decks, mine, end, strict=True) if n]
        hands.append(np.sort(np.concatenate([_NONE, *dealt])))
    return hands


def _counts_by_classes(pool: Pool, partition: Partition, labels: Array, decks: Sequence[Indices], seed: int) -> NDArray[np.int64]:
    """(n_users, C) number of rows by user and class."""
    assert partition.users is not None  # noqa: S101 - the partition's own validator
    assert partition.classes_per_user is not None  # noqa: S101
    n_users, n_classes, per_user = partition.users, len(labels), partition.classes_per_user
    if per_user > n_classes:
        raise ConfigError(f"partition.classes_per_user is {per_user}, want at most the {n_classes} classes of {pool.where}")
    holds = classes_of_users(n_users, per_user, n_classes, stream(seed, "partition classes"))
    n_holders = holds.sum(axis=0)
    for label, deck, wanted in zip(labels, decks, n_holders, strict=True):
        if wanted > len(deck):
            found = f"class {label:g} has {len(deck)} rows in {pool.where} for the {wanted} users that are to have it"
            raise ConfigError(f"{found}, want at least one for each: fewer users or classes_per_user")
    if partition.sizes is None and partition.equal_rows:
        share = min(len(deck) // int(wanted) for deck, wanted in zip(decks, n_holders, strict=True) if wanted)
        return holds * share
    sizes = _sizes(partition, n_users, seed)
    counts = np.zeros((n_users, n_classes), dtype=np.int64)
    for place, (deck, wanted) in enumerate(zip(decks, n_holders, strict=True)):
        if wanted:
            holders = np.flatnonzero(holds[:, place])
            least = min(_LEAST_SHARE, len(deck) // int(wanted))
            counts[holders, place] = least + apportion(len(deck) - least * int(wanted), sizes[holders])
    return counts


def classes_of_users(n_users: int, per_user: int, n_classes: int, draws: Stream) -> NDArray[np.int64]:
    """(n_users, n_classes) of 0 and 1: each user draws `per_user` classes, and the numbers of users per class differ by at most one.

    A user takes the classes with the most copies left, ties in random order. The numbers left never differ by more than one, so there are
    always `per_user` distinct classes.
    """
    base, extra = divmod(n_users * per_user, n_classes)
    left = np.full(n_classes, base, dtype=np.int64)
    left[draws.order(n_classes)[:extra]] += 1
    holds = np.zeros((n_users, n_classes), dtype=np.int64)
    for user in range(n_users):
        order = draws.order(n_classes)
        taken = order[np.argsort(-left[order], kind="stable")[:per_user]]
        left[taken] -= 1
        holds[user, taken] = 1
    return holds


def _dirichlet(partition: Partition, decks: Sequence[Indices], seed: int) -> NDArray[np.int64]:
    """(n_users, C) number of rows by user and class, drawn again until each user has `min_rows`."""
    assert partition.users is not None  # noqa: S101 - the partition's own validator
    assert partition.alpha is not None  # noqa: S101
    least = 2 if partition.min_rows is None else partition.min_rows
    sizes = _sizes(partition, partition.users, seed)
    fewest = np.zeros(1, dtype=np.int64)
    for attempt in range(MAX_DRAWS):
        counts = np.zeros((partition.users, len(decks)), dtype=np.int64)
        for place, deck in enumerate(decks):
            logs = log_gamma(partition.alpha, partition.users, stream(seed, "partition dirichlet", attempt, place))
            counts[:, place] = _divided(len(deck), sizes * np.exp(logs - logs.max()))
        fewest = counts.sum(axis=1)
        if fewest.min() >= least:
            return counts
    user = int(fewest.argmin())
    raise ConfigError(
        f"user 'u{user}' has {fewest[user]} rows after {MAX_DRAWS} draws with alpha {partition.alpha:g}, want at least {least} for each of "
        f"{partition.users} users: a larger alpha, fewer users or a smaller min_rows"
    )


def _divided(total: int, weights: Array) -> NDArray[np.int64]:
    """`total` split into whole pieces by rounding the cumulative shares of the weights."""
    ends = np.floor(total * (np.cumsum(weights) / weights.sum()) + 0.5).astype(np.int64)
    ends[-1] = total
    pieces: NDArray[np.int64] = np.diff(np.minimum(ends, total), prepend=0)
    return pieces


def log_gamma(alpha: float, n: int, draws: Stream) -> Array:
    """(n,) logarithms of Gamma(alpha, 1) numbers, by Marsaglia and Tsang (2000). The numbers themselves underflow for small alpha."""
    d = (alpha if alpha >= 1 else alpha + 1) - 1 / 3
    c = 1 / math.sqrt(9 * d)
    logs = np.full(n, np.nan)
    while len(open_places := np.flatnonzero(np.isnan(logs))):
        x, u = normal(draws, len(open_places)), 1 - draws.uniform(len(open_places))
        base = 1 + c * x
        is_positive = base > 0
        log_cubed = 3 * np.log(np.where(is_positive, base, 1.0))
        is_taken = is_positive & (np.log(u) < x * x / 2 + d - d * np.exp(log_cubed) + d * log_cubed)
        logs[open_places[is_taken]] = math.log(d) + log_cubed[is_taken]
    if alpha < 1:
        logs += np.log(1 - draws.uniform(n)) / alpha
    return logs


def _sizes(partition: Partition, n_users: int, seed: int) -> Array:
    if partition.sizes is None:
        return np.ones(n_users)
    return np.exp(partition.sizes.lognormal * normal(stream(seed, "partition sizes"), n_users))


def _test_counts(test: Pool, labels: Array, counts: NDArray[np.int64], decks: Sequence[Indices]) -> NDArray[np.int64]:
    """(n_users, C) number of test rows. Their ratio to training rows is equal in all classes: the largest for which no class runs out."""
    totals = counts.sum(axis=0)
    for label, deck, total in zip(labels, decks, totals, strict=True):
        if total and not len(deck):
            raise ConfigError(f"class {label:g} has 0 test rows in {test.where}, want at least one for the users that train on it")
    ratio = min((Fraction(len(deck), int(total)) for deck, total in zip(decks, totals, strict=True) if total), default=Fraction(0))
    ends = np.cumsum(counts, axis=0) * ratio.numerator // ratio.denominator
    return np.diff(ends, axis=0, prepend=0)


def apportion(total: int, weights: Array) -> NDArray[np.int64]:
    """(n,) whole numbers that sum to `total`, in proportion to the weights, by largest remainders."""
    shares = total * (weights / weights.sum())
    whole: NDArray[np.int64] = np.floor(shares).astype(np.int64)
    order = np.argsort(whole - shares, kind="stable")
    whole[order[: total - int(whole.sum())]] += 1
    return whole


def _cut(pool: Pool, rows: Indices, most: int | None, seed: int, purpose: str, name: str) -> Indices:
    """At most `most` of a user's rows, drawn with the same label proportions from the user's stream of this purpose."""
    if most is None or len(rows) <= most:
        return rows
    order = stream(seed, purpose, name).order(len(rows))
    target = pool.target[rows[order]]
    _, firsts, of_row, counts = np.unique(target, return_index=True, return_inverse=True, return_counts=True)
    drawn = np.argsort(firsts)  # labels in random order, so that ties favour none
    kept = [order[of_row == label][:n] for label, n in zip(drawn, apportion(most, counts[drawn].astype(np.float64)), strict=True)]
    chosen: Indices = rows[np.sort(np.concatenate(kept))]
    return chosen
