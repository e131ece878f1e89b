"""Counts that coins decide: all coins of a few iterations are enumerated, so means and standard deviations are exact."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from coterie.families.schedule import CLUSTER, GLOBAL, LOCAL
from coterie.methods import async_l2gd
from coterie.wire.precision import Precision
from coterie_server.families import coin_counts
from coterie_server.families.coin_counts import NO_REUSE, REUSE_ALL, REUSE_WITHIN
from coterie_server.interface.half import Facts, Members, Setting, StageHalf
from coterie_server.methods.async_l2gd import half as room
from coterie_server.record.rundb import BETWEEN, WITHIN

P0, P = 0.3, (0.4, 0.7)
N = 3


def operations(everyone: tuple[int, ...], own: tuple[int, ...]) -> np.ndarray:
    return np.where(np.array(everyone) == 1, GLOBAL, np.where(np.array(own) == 1, CLUSTER, LOCAL)).astype(np.int8)


def probability(flips: tuple[int, ...], p: float) -> float:
    return float(np.prod([p if flip else 1 - p for flip in flips]))


def over_all_coins(reuse: int) -> np.ndarray:
    """(2, 3) mean and standard deviation of the global rounds that need a new bar, and of the first cluster's moves up and down."""
    sums = np.zeros((2, 3))
    for everyone, one, two in itertools.product(itertools.product((0, 1), repeat=N), repeat=3):
        ops = [operations(everyone, one), operations(everyone, two)]
        needs_bar = coin_counts.needed(ops, is_reusable=reuse == REUSE_ALL)
        moves = coin_counts.moves(ops[0], needs_bar, reuse)
        found = np.array([needs_bar.sum(), moves.up, moves.down])
        sums += probability(everyone, P0) * probability(one, P[0]) * probability(two, P[1]) * np.array([found, found**2])
    return np.array([sums[0], np.sqrt(sums[1] - sums[0] ** 2)])


@pytest.mark.parametrize("reuse", [NO_REUSE, REUSE_WITHIN, REUSE_ALL])
def test_means_and_deviations_are_those_of_all_coins(reuse: int) -> None:
    between = coin_counts.needed_over_coins(P0, P[0] * P[1], N, is_reusable=reuse == REUSE_ALL)
    mean, spread = coin_counts.moves_over_coins(P0, P[0], P[1], reuse, N)
    found = [[between[0], mean.up, mean.down], [between[1], spread.up, spread.down]]
    np.testing.assert_allclose(found, over_all_coins(reuse), rtol=1e-9)


def coordinator(reuse: str, alpha: dict[str, float]) -> StageHalf[Any]:
    members = Members(("a", "b", "c"), ("one", "one", "two"))
    facts = Facts(np.full(3, 5), 2, np.ones(3), np.full(3, 0.1))
    setting = Setting(1, "stage", members, Precision.of("float64"), facts, hosts_of_cluster=np.array([2, 1]))
    config = async_l2gd.Config(iterations=10, gamma=1.0, alpha=alpha, p0=P0, p={"one": P[0], "two": P[1]}, reuse=reuse)
    return room.build(config, setting)


@pytest.mark.parametrize(("reuse", "second", "kind"), [("never", 0.5, NO_REUSE), ("auto", 0.2, REUSE_WITHIN), ("auto", 0.5, REUSE_ALL)])
def test_the_rates_on_paper_are_those_of_the_chain_in_the_long_run(reuse: str, second: float, kind: int) -> None:
    half, n = coordinator(reuse, {"one": 0.5, "two": second}), 1 << 20
    expected = half.expected_vectors([{"iteration": float(n)}])
    between, _ = coin_counts.needed_over_coins(P0, P[0] * P[1], n, is_reusable=kind == REUSE_ALL)
    one, _ = coin_counts.moves_over_coins(P0, P[0], P[1], kind, n)
    two, _ = coin_counts.moves_over_coins(P0, P[1], P[0], kind, n)
    assert expected["between-average", "up", BETWEEN] == pytest.approx(2 * between, rel=1e-5)
    assert expected["within-average", "up"] == pytest.approx(2 * one.up + two.up, rel=1e-5)
    assert expected["within-average", "down"] == pytest.approx(2 * one.down + two.down, rel=1e-5)
    assert expected["trace", "up", WITHIN] == 3


def test_a_stage_that_was_stopped_has_no_exact_counts() -> None:
    half = coordinator("auto", {"one": 0.5, "two": 0.5})
    assert half.drawn_vectors([{"iteration": 9.0}]) == {}
    assert half.drawn_vectors([{"iteration": 10.0}])
    assert half.spread_of_vectors([{"iteration": 9.0}])["within-average", "up"] > 0
