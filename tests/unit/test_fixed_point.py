"""Sums in fixed point have the same bits in any order and any grouping, and are as near to the true sums as they say."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.arrays import Array, Indices
from coterie.wire.fixed_point import Form, added, form_of, largest, read, sums_of
from coterie.wire.messages import Positions, Scalars, Weights
from coterie.wire.precision import Precision

CONVEX, NETWORK = Precision.of("float64", is_convex=True), Precision.of("float32")
SPECS = (Scalars("rows", "d"), Weights("rows", "d"))


def dealt(rows: Array, weights: Indices, groups: Indices, form: Form, hosts: Indices, order: list[int]) -> tuple[Indices, Indices]:
    """The sums of hosts that have these users, added in this order."""
    parts = [sums_of(rows[hosts == host], weights[hosts == host], groups[hosts == host], form) for host in order if (hosts == host).any()]
    return added(parts)


@given(
    st.integers(1, 12),
    st.integers(0, 2**32 - 1),
    st.floats(-60, 14),
    st.sampled_from([(spec, precision) for spec in SPECS for precision in (CONVEX, NETWORK)]),
    st.permutations(range(4)),
)
def test_any_hosts_in_any_order_give_the_same_bits_near_the_true_sum(n, seed, size, how, order) -> None:  # type: ignore[no-untyped-def]
    rng, (spec, precision) = np.random.default_rng(seed), how
    rows = rng.standard_normal((n, 3)) * 2.0**size
    rows = np.clip(rows, -(2.0**16), 2.0**16)
    weights, groups, hosts = rng.integers(0, 50, n), rng.integers(0, 2, n), rng.integers(0, 4, n)
    form = form_of(spec, max(1, int(weights.sum())), precision)
    of_one, alone = sums_of(rows, weights, groups, form)
    of_many, together = dealt(rows, weights, groups, form, hosts, order)
    np.testing.assert_array_equal(of_one, of_many)
    np.testing.assert_array_equal(alone, together)
    for group, found in zip(of_many.tolist(), read(together, form), strict=True):
        mine = np.flatnonzero(groups == group)
        for column, value in enumerate(found.tolist()):
            true = sum(Fraction(float(rows[i, column])) * int(weights[i]) for i in mine)
            bound = Fraction(form.error) * int(weights[mine].sum()) + abs(true) * Fraction(2.0**-52)
            assert abs(Fraction(value) - true) <= bound


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("precision", [CONVEX, NETWORK])
@pytest.mark.parametrize("weight", [1, 2, 1000, 2**31 + 1])
def test_the_largest_numbers_do_not_wrap(spec, precision, weight) -> None:  # type: ignore[no-untyped-def]
    form = form_of(spec, weight, precision)
    for extreme in (2.0**form.bound, -(2.0**form.bound), -math.ldexp(1.0, -form.bits), math.ldexp(1 - 2.0**-53, form.bound)):
        _, sums = sums_of(np.full((1, 1), extreme), np.array([weight]), np.zeros(1, np.int64), form)
        assert read(sums, form)[0, 0] == pytest.approx(weight * extreme, rel=1e-15)


def test_networks_need_one_word_and_other_numbers_two() -> None:
    assert form_of(SPECS[1], 1000, NETWORK) == Form(16, 36, 0)
    assert form_of(SPECS[1], 1000, CONVEX) == Form(40, 44, 32)
    assert form_of(SPECS[0], 1000, NETWORK) == Form(40, 44, 32)
    assert form_of(Positions("rows"), 1000, NETWORK) == Form(40, 0, 0)
    assert form_of(SPECS[0], 1000, CONVEX, bound=3.0) == Form(2, 82, 32)


def test_whole_numbers_stay_whole() -> None:
    form = form_of(Positions("rows", "k"), 5, NETWORK)
    _, sums = sums_of(np.array([[2, -3], [7, 0]]), np.array([2, 3]), np.zeros(2, np.int64), form)
    np.testing.assert_array_equal(sums, [[[25, -6]]])


def test_weights_and_bounds_that_no_form_fits_are_refused() -> None:
    with pytest.raises(ValueError, match="a total weight of 0, want 1 to 2"):
        form_of(SPECS[0], 0, CONVEX)
    with pytest.raises(ValueError, match="a bound of -1"):
        form_of(SPECS[0], 1, CONVEX, bound=-1)


def test_the_largest_value_is_that_of_both_signs() -> None:
    assert largest(np.array([[-3.0, 2.0]])) == 3.0
    assert largest(np.zeros((0, 2))) == 0.0


def test_large_weights_take_a_second_word_before_numbers_get_coarse() -> None:
    assert form_of(SPECS[1], 1 << 22, NETWORK) == Form(16, 24, 0)
    assert form_of(SPECS[1], (1 << 22) + 1, NETWORK) == Form(16, 55, 32)
    for spec, precision in ((SPECS[0], CONVEX), (SPECS[1], NETWORK)):
        finest = [form_of(spec, 1 << power, precision).bits for power in range(33)]
        assert min(finest) >= 20
    with pytest.raises(ValueError, match="a total weight of 1,099,511,627,776 leaves numbers 4 bits behind the point, want at least 20"):
        form_of(SPECS[0], 1 << 40, CONVEX)
    assert form_of(SPECS[0], 1 << 40, CONVEX, bound=1.0).bits == 44  # who knows the bound has finer numbers
