"""Partitions against brute force and against the fixtures' known partitions and distances (CVXPY)."""

import json
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie_server.maths.clusters import (
    adjusted_rand,
    canonical,
    incidence,
    overlap,
    partition,
    persistent,
    same_partition,
    within_distance,
)

FIXTURES = Path(__file__).parents[1] / "fixtures"
FIXTURE = {n: json.loads((FIXTURES / f"convex_clustering_{n}.json").read_text()) for n in (6, 60)}
SON = [(n, entry) for n in FIXTURE for entry in FIXTURE[n]["son"]]
LABELS = st.lists(st.integers(0, 4), min_size=1, max_size=12)


def brute_force(x, joined, radius):
    n, far = len(x), np.abs(x).max(axis=0) / 2
    pairs = list(zip(*np.triu_indices(n, 1), strict=True))
    labels = list(range(n))
    for _ in range(n):
        for p, (i, j) in enumerate(pairs):
            apart = np.abs(x[i] - x[j])
            if (joined[p] and (apart <= far).all()) or (apart <= radius).all():
                labels[i] = labels[j] = min(labels[i], labels[j])
    return np.unique(labels, return_inverse=True)[1].tolist()


@pytest.mark.parametrize(("n", "entry"), SON, ids=lambda v: v if isinstance(v, int) else f"LAM={v['LAM']}")
def test_the_models_of_a_cvxpy_solution_give_its_partition(n, entry):
    found = partition(np.array(entry["x"]))
    assert found.max() + 1 == entry["K"]
    assert same_partition(found, np.array(entry["partition"]))


@settings(max_examples=60)
@given(st.integers(1, 9), st.integers(0, 2**32 - 1), st.floats(0, 0.5))
def test_joined_and_near_pairs_connect_as_by_brute_force(n, seed, tolerance):
    random = np.random.default_rng(seed)
    x = random.integers(-3, 4, (n, 2)).astype(float)
    joined = random.random(n * (n - 1) // 2) < 0.15
    labels = partition(x, joined, tolerance)
    assert labels.tolist() == brute_force(x, joined, tolerance * np.abs(x).max(axis=0))
    assert labels.dtype == np.int64


def test_clusters_are_numbered_by_their_first_member():
    x = np.array([[9.0], [1.0], [9.0], [5.0], [1.0]])
    assert partition(x).tolist() == [0, 1, 0, 2, 1]
    assert canonical(np.array([7, -2, 7, 3, -2])).tolist() == [0, 1, 0, 2, 1]


def test_a_zero_of_z_joins_users_whose_models_are_apart():
    x = 3 + np.arange(4.0)[:, None]
    joined = np.zeros(6, bool)
    joined[4] = True  # pairs 01 02 03 12 13 23
    assert partition(x, joined).tolist() == [0, 1, 2, 1]


def test_a_zero_of_z_joins_nobody_whose_models_are_plainly_different_in_any_unit():
    x = np.array([[1.0, 3e-9], [1.0, 3e-9], [1.0, -3e-9]])
    assert partition(x, np.ones(3, bool)).tolist() == [0, 0, 1]
    assert partition(1e6 * x, np.ones(3, bool)).tolist() == [0, 0, 1]


def test_a_consensus_up_to_rounding_is_one_cluster():
    x = np.ones((50, 3)) + 1e-15 * np.random.default_rng(0).standard_normal((50, 3))
    assert partition(x).max() == 0
    assert partition(np.zeros((5, 2))).max() == 0


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(-14, 14), min_size=3, max_size=3))
def test_clusters_do_not_depend_on_the_units_of_features(seed, exponents):
    random = np.random.default_rng(seed)
    x = random.normal(size=(3, 3))[random.integers(0, 3, 20)] * (1 + random.choice([1e-7, 3e-4]) * random.normal(size=(20, 3)))
    assert partition(x * 2.0 ** np.array(exponents)).tolist() == partition(x).tolist()


def test_a_small_coefficient_tells_users_apart():
    x = np.array([[1.0, 3e-9], [1.0, -3e-9], [1.0, 3e-9]])
    assert partition(x).tolist() == [0, 1, 0]


def test_a_coefficient_without_effect_tells_nobody_apart():
    x = np.column_stack([np.ones(30), 1e-17 * np.random.default_rng(0).standard_normal(30), np.zeros(30)])
    assert partition(x).max() == 0


def test_who_is_marked_as_apart_is_joined_by_zeros_alone():
    x, apart = np.ones((4, 2)), np.array([False, True, False, True])
    assert partition(x, apart=apart).tolist() == [0, 1, 0, 2]
    joined = np.zeros(6, bool)
    joined[0] = True
    assert partition(x, joined, apart=apart).tolist() == [0, 0, 0, 1]
    assert partition(x, apart=np.ones(4, bool)).tolist() == [0, 1, 2, 3]


def test_a_scale_of_ones_own_replaces_the_sizes():
    x = np.array([[1e6], [1e6 + 1], [1e6 + 50]])
    assert partition(x).tolist() == [0, 0, 0]
    assert partition(x, scale=50.0, tolerance=0.1).tolist() == [0, 0, 1]


def test_nobody_and_a_single_user_have_partitions():
    assert partition(np.zeros((0, 3))).shape == (0,)
    assert partition(np.zeros((1, 3)), np.zeros(0, bool)).tolist() == [0]


def test_a_mask_of_another_length_is_refused():
    with pytest.raises(ValueError, match=r"shape \(5,\), not \(6,\)"):
        partition(np.zeros((4, 1)), np.zeros(5, bool))
    with pytest.raises(ValueError, match="at least 0"):
        partition(np.zeros((4, 1)), tolerance=-1.0)


def test_two_thousand_users_are_partitioned_fast_and_in_little_memory():
    n, d = 2000, 50
    random = np.random.default_rng(1)
    truth = random.integers(0, 30, n)
    x = random.standard_normal((30, d))[truth] + 1e-9 * random.standard_normal((n, d))
    tracemalloc.start()
    began = time.perf_counter()
    labels = partition(x, np.zeros(n * (n - 1) // 2, bool))
    elapsed, peak = time.perf_counter() - began, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert same_partition(labels, truth)
    assert elapsed < 10
    assert peak < n * n * 8  # not even one n*n array of floats


def test_a_pair_counts_its_zeros_in_a_row_over_its_own_updates():
    counts = np.zeros(3, np.int64)
    for zero, updated in [([1, 1, 1], [1, 1, 0]), ([1, 0, 1], [1, 1, 0]), ([0, 1, 1], [0, 1, 1])]:
        before = counts.copy()
        after = persistent(counts, np.array(zero, bool), np.array(updated, bool))
        np.testing.assert_array_equal(counts, before)
        counts = after
    assert counts.tolist() == [2, 1, 1]
    assert persistent(counts, np.array([True, False, True])).tolist() == [3, 0, 2]


@pytest.mark.parametrize("n", [6, 60])
@pytest.mark.parametrize("kind", ["son", "sq"])
def test_the_mean_distance_within_clusters_is_that_of_figure_2(n, kind):
    for entry in FIXTURE[n][kind]:
        found = within_distance(np.array(entry["x"]), np.array(FIXTURE[n]["label"]))
        assert found == pytest.approx(entry["within"], abs=1e-9)


def test_the_overlap_of_clusters_is_the_farthest_user_over_the_closest_means():
    x = np.array([[1.0], [3.0], [8.0], [10.0], [16.0]])  # means 2, 9 and 16: users are 1 away, means 7
    labels = np.array([0, 0, 1, 1, 2])
    assert overlap(x, labels) == pytest.approx(1 / 7)
    assert overlap(1e-9 * x, labels) == pytest.approx(1 / 7), "units do not matter"
    assert overlap(np.hstack([x, np.full((5, 1), 1e6)]), labels) == pytest.approx(1 / 7), "nor does a coefficient that all share"
    assert overlap(x[[0, 0, 2, 2, 4]], labels) == 0.0
    assert overlap(x, np.arange(5)) is None, "nobody shares a cluster"
    assert overlap(x, np.zeros(5, int)) is None, "no two clusters"


def test_every_pair_weighs_the_same_in_the_mean_distance():
    x = np.array([[0.0], [3.0], [6.0], [100.0], [101.0]])
    assert within_distance(x, np.array([0, 0, 0, 1, 1])) == pytest.approx((3 + 6 + 3 + 1) / 4)
    assert within_distance(x, np.arange(5)) == 0.0


@given(LABELS, st.permutations(range(5)))
def test_renaming_clusters_changes_neither_sameness_nor_the_rand_index(labels, names):
    a = np.array(labels)
    b = np.array(names)[a]
    assert same_partition(a, b)
    assert adjusted_rand(a, b) == 1.0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=2, max_size=12))
def test_the_rand_index_agrees_with_counting_pairs(pairs):
    a, b = np.array(pairs).T
    first, second = np.triu_indices(len(a), 1)
    in_a, in_b = a[first] == a[second], b[first] == b[second]
    expected = in_a.sum() * in_b.sum() / len(first)
    spread = (in_a.sum() + in_b.sum()) / 2 - expected
    known = ((in_a & in_b).sum() - expected) / spread if spread > 1e-12 else 1.0
    assert adjusted_rand(a, b) == pytest.approx(known)
    assert adjusted_rand(a, b) == adjusted_rand(b, a)
    assert same_partition(a, b) == bool((in_a == in_b).all())


def test_partitions_of_different_numbers_of_users_are_not_compared():
    assert not same_partition(np.zeros(2, int), np.zeros(3, int))
    with pytest.raises(ValueError, match="2 and 3 users"):
        adjusted_rand(np.zeros(2, int), np.zeros(3, int))


def test_the_incidence_sums_antisymmetric_flows_by_user():
    s = np.random.default_rng(2).standard_normal((5, 5, 2))
    s -= s.transpose(1, 0, 2)
    net, first, second = incidence(5)
    np.testing.assert_allclose(net @ s[first, second], s.sum(axis=1))
