"""The coins of the loopless methods, and which iterations need a new global average."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.draws.coins import DrawnCoin, RecordedCoin, first
from coterie.families.schedule import CLUSTER, GLOBAL, LOCAL, Schedule, schedule_of


def test_a_coin_shows_the_same_wherever_one_begins_to_look() -> None:
    whole = DrawnCoin(3, "a coin", 0.3).flips(0, 10_000)
    coin = DrawnCoin(3, "a coin", 0.3)
    for start, stop in ((9000, 10_000), (0, 1), (4090, 4100), (4096, 8192), (100, 9999), (50, 50)):
        np.testing.assert_array_equal(coin.flips(start, stop), whole[start:stop])


def test_a_coin_shows_1_as_often_as_it_should_and_others_are_others() -> None:
    flips = DrawnCoin(3, "a coin", 0.3).flips(0, 40_000)
    assert abs(flips.mean() - 0.3) < 3 * (0.21 / 40_000) ** 0.5
    for other in (DrawnCoin(4, "a coin", 0.3), DrawnCoin(3, "another coin", 0.3)):
        assert abs(np.corrcoef(flips, other.flips(0, 40_000))[0, 1]) < 0.02
    assert not DrawnCoin(3, "a coin", 0.0).flips(0, 1000).any()


def test_a_recorded_coin_ends_with_its_record() -> None:
    np.testing.assert_array_equal(RecordedCoin([0, 1, 1]).flips(1, 3), [True, True])
    with pytest.raises(IndexError, match="recorded for 3 iterations, wanted 4"):
        RecordedCoin([0, 1, 1]).flips(2, 4)


def test_the_first_1_of_some_flips() -> None:
    assert first(np.array([False, False, True]), 10) == 12
    assert first(np.array([False, False]), 10) == 12
    assert first(np.zeros(0, dtype=bool), 10) == 10


def test_a_global_round_comes_before_the_clusters_own_coins() -> None:
    schedule = schedule_of(0, 0.5, (0.5, 0.5), (0, 1), ((0, (0, 1)), (1, (1, 0)), (0, (1, 1))))
    assert schedule.operations(0, 0, 3).tolist() == [LOCAL, GLOBAL, CLUSTER]
    assert schedule.operations(1, 0, 3).tolist() == [CLUSTER, GLOBAL, CLUSTER]


def test_a_cluster_alone_has_the_operations_that_it_has_among_others() -> None:
    together = schedule_of(5, 0.1, (0.2, 0.3, 0.4), (0, 1, 2), None)
    for number, p in enumerate((0.2, 0.3, 0.4)):
        alone = schedule_of(5, 0.1, (p,), (number,), None)
        np.testing.assert_array_equal(alone.operations(number, 0, 5000), together.operations(number, 0, 5000))


def needed(schedule: Schedule, n: int, *, is_reusable: bool) -> list[int]:
    """The global rounds that need a new average, one after the other."""
    found, at, is_stale = [], 0, True
    while True:
        at, is_stale = schedule.next_global(at, n, is_stale=is_stale, is_reusable=is_reusable)
        if at == n:
            return found
        found.append(at)
        at, is_stale = at + 1, False


@pytest.mark.parametrize("seed", range(5))
def test_a_global_round_is_needless_where_all_clusters_have_only_averaged_since_the_last(seed: int) -> None:
    """By the definition, iteration by iteration."""
    draws = np.random.default_rng(seed)
    xi_0, xi = draws.random(400) < 0.3, draws.random((400, 2)) < 0.8
    recorded = tuple((int(everyone), tuple(int(flip) for flip in own)) for everyone, own in zip(xi_0, xi, strict=True))
    schedule = schedule_of(0, 0.3, (0.8, 0.8), (0, 1), recorded)
    wanted, is_known = [], False
    for iteration in range(400):
        if xi_0[iteration]:
            if not is_known:
                wanted.append(iteration)
            is_known = True
        elif not xi[iteration].all():
            is_known = False
    assert needed(schedule, 400, is_reusable=True) == wanted
    assert needed(schedule, 400, is_reusable=False) == np.flatnonzero(xi_0).tolist()
    assert len(wanted) < xi_0.sum()


def test_where_one_stops_in_between_changes_no_round() -> None:
    schedule = schedule_of(7, 0.2, (0.9, 0.95), (0, 1), None)
    whole = needed(schedule, 3000, is_reusable=True)
    found, at, is_stale = [], 0, True
    while at < 3000:
        start = at + 1 if found and found[-1] == at else at
        stop = min(at + 7, 3000)
        at, is_stale = schedule.next_global(start, stop, is_stale=is_stale, is_reusable=True)
        if at < stop:
            found.append(at)
            is_stale = False
    assert found == whole
