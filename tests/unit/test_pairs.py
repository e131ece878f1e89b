"""Pair storage and arithmetic against loops over i and j."""

import numpy as np
import pytest

from coterie.draws.streams import generator
from coterie.methods.pdmm import Constants
from coterie_server.methods.pdmm import pairs

STEPS = Constants(rho=0.7, eta=0.1, nu=0.6, tau=0.8)


def some(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


@pytest.mark.parametrize("n", [2, 3, 7])
def test_places_and_owners_fit_together(n):
    for layout in (pairs.half(n), pairs.ordered(n)):
        assert (layout.place(layout.first, layout.second) == np.arange(layout.size)).all()
    everyone = [(i, j) for i in range(n) for j in range(n) if i != j]
    owner, partner, place, sign = pairs.half(n).directed(np.arange(n * (n - 1) // 2))
    assert list(zip(owner.tolist(), partner.tolist(), strict=True)) == everyone
    assert (place == pairs.half(n).place(np.minimum(owner, partner), np.maximum(owner, partner))).all()
    assert (sign == np.where(owner < partner, 1, -1)).all()


@pytest.mark.parametrize("n", [2, 3, 7])
def test_what_users_see_is_antisymmetric_and_comes_back(n):
    layout = pairs.half(n)
    values = some((3, layout.size))
    seen = pairs.to_users(layout, values)
    everyone = np.zeros((n, n, 3))
    everyone[~np.eye(n, dtype=bool)] = seen.reshape(-1, 3)
    assert (everyone == -everyone.transpose(1, 0, 2)).all()
    assert (values == everyone[layout.first, layout.second].T).all()
    assert (pairs.from_users(layout, seen) == values).all()


@pytest.mark.parametrize("n", [2, 5])
@pytest.mark.parametrize("d", [1, 3])
def test_sums_count_a_pair_for_one_user_and_against_the_other(n, d):
    for layout in (pairs.half(n), pairs.ordered(n)):
        values, wanted = some((d, layout.size)), np.zeros((n, d))
        for place, (i, j) in enumerate(zip(layout.first, layout.second, strict=True)):
            wanted[i] += values[:, place]
            wanted[j] -= values[:, place]
        np.testing.assert_allclose(pairs.sums(layout, values), wanted, atol=1e-13)


def test_the_block_threshold_shortens_long_vectors_and_zeroes_short_ones():
    w = np.array([[3.0, 0.3, 0.0], [4.0, 0.4, 0.0]])
    np.testing.assert_allclose(pairs.shrink(w.copy(), 1.0), [[2.4, 0, 0], [3.2, 0, 0]])
    assert (pairs.shrink(w.copy(), 1.0)[:, 1:] == 0).all()


def by_loops(layout, chosen, seen, new, z, mu, muhat, lam):
    """(17), (18), (19) as written, on the chosen places."""
    rho = STEPS.rho / layout.copies
    z, mu, muhat = z.copy(), mu.copy(), muhat.copy()
    for place in chosen.z:
        i, j = layout.first[place], layout.second[place]
        w = seen[i] - seen[j] + muhat[:, place] / rho
        z[:, place] = max(0, 1 - lam / layout.copies / rho / np.linalg.norm(w)) * w
    for place in chosen.mu:
        residual = new[layout.first[place]] - new[layout.second[place]] - z[:, place]
        mu[:, place] += STEPS.tau * rho * residual
        muhat[:, place] = mu[:, place] - STEPS.nu * rho * residual
    return z, mu, muhat


@pytest.mark.parametrize("d", [1, 3, 70])
def test_a_round_is_the_papers_formulas_also_over_several_tiles(d, monkeypatch):
    monkeypatch.setattr(pairs, "_SHORTEST_TILE", 16)
    monkeypatch.setattr(pairs, "_TILE_SCALARS", 48)
    layout = pairs.half(11)
    seen, new, (z, mu, muhat) = some((11, d)), some((11, d), 1), some((3, d, layout.size), 2)
    everything = pairs.Chosen(np.arange(11), np.arange(layout.size), np.arange(layout.size))
    wanted = by_loops(layout, everything, seen, new, z, mu, muhat, 0.9)
    split = pairs.split_all(layout, STEPS, 0.9, seen, muhat)
    whole = pairs.dual_all(layout, STEPS, new, split, mu)
    some_split, some_of = pairs.advance_some(layout, STEPS, 0.9, everything, seen, new, z, mu, muhat)
    for z_found, found in ((split, whole), (some_split, some_of)):
        for values, right in zip((z_found, found.mu, found.muhat), wanted, strict=True):
            np.testing.assert_allclose(values, right, atol=1e-12)
    residual = pairs.differences(new.T, layout) - wanted[0]
    assert whole.gap == pytest.approx(np.linalg.norm(residual)) == some_of.gap


@pytest.mark.parametrize("layout", [pairs.half(6), pairs.ordered(6)], ids=["half", "ordered"])
def test_what_is_not_chosen_stays(layout):
    seen, new, (z, mu, muhat) = some((6, 2)), some((6, 2), 1), some((3, 2, layout.size), 2)
    chosen = pairs.Chosen(np.array([1]), np.array([1, 3]), np.array([3, 4]))
    split, found = pairs.advance_some(layout, STEPS, 0.9, chosen, seen, new, z, mu, muhat)
    for values, right in zip((split, found.mu, found.muhat), by_loops(layout, chosen, seen, new, z, mu, muhat, 0.9), strict=True):
        np.testing.assert_allclose(values, right, atol=1e-12)


def test_a_pair_kept_twice_is_zero_when_both_are_and_touched_when_either_is():
    layout, upper = pairs.ordered(4), pairs.half(4)
    values = np.ones((2, 16))
    values[:, [1, 4, 2]] = 0  # (0,1) and (1,0); (0,2) without (2,0)
    assert pairs.zero_pairs(layout, values).tolist() == [True, False, False, False, False, False]
    assert pairs.touched(layout, np.array([8, 7])).tolist() == [False, True, False, False, True, False]
    assert pairs.zero_pairs(upper, np.eye(6)[:, :6] * 0).all()
    assert pairs.touched(upper, np.array([2])).tolist() == [False, False, True, False, False, False]


def test_draws_have_the_right_size_and_no_block_is_preferred():
    n, rounds = 8, 3000
    upper, both = pairs.half(n), pairs.ordered(n)
    x, z = np.zeros(n), np.zeros(upper.size)
    blocks = 0
    for number in range(rounds):
        paired = pairs.draw_paired(upper, 16, None, generator(0, "test", round_number=number))
        assert paired.mu is paired.z
        x[paired.x] += 1
        z[paired.z] += 1
        blocks += paired.x.size + 2 * paired.z.size
        uniform = pairs.draw_uniform(both, 16, 9, generator(0, "test", round_number=number))
        assert uniform.x.size + uniform.z.size == 16
        assert uniform.mu.size == np.unique(uniform.mu).size == 9
        for places in (uniform.z, uniform.mu):
            assert (places // n != places % n).all()
            assert (np.diff(places) > 0).all()
    assert blocks / rounds == pytest.approx(16, rel=0.02)
    np.testing.assert_allclose(np.concatenate([x, z]) / rounds, 16 / n**2, atol=0.04)


def test_distances_between_models_are_summed_once_per_pair():
    x = some((5, 3))
    wanted = sum(np.linalg.norm(x[i] - x[j]) for i in range(5) for j in range(i + 1, 5))
    assert pairs.total_distance(pairs.half(len(x)), x) == pytest.approx(wanted)


def test_the_scale_of_distances_is_exact_when_the_models_sum_to_zero_and_else_a_bound():
    x = some((5, 3))
    centred = x - x.mean(axis=0)
    for models, exact in ((centred, True), (x, False)):
        wanted = sum(np.square(models[i] - models[j]).sum() for i in range(5) for j in range(i + 1, 5)) ** 0.5
        assert wanted <= pairs.distance_norm(pairs.half(len(models)), models) * (1 + 1e-12)
        assert (pairs.distance_norm(pairs.half(len(models)), models) == pytest.approx(wanted)) == exact


def test_a_paired_draw_has_the_rounded_number_of_units():
    layout = pairs.half(6)  # 6 + 15 units for 36 blocks
    for blocks, units in ((1, 1), (2, 1), (3, 2), (18, 10), (36, 21)):
        drawn = pairs.draw_paired(layout, blocks, 7, generator(0, "test", round_number=blocks))
        assert drawn.x.size + drawn.z.size == units
        assert drawn.mu.size == 4
