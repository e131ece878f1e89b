"""Noise that hosts share: an exact sampler, vectors that never exceed the clip, and epsilons against sums over the distribution itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats
from scipy.special import logsumexp

from coterie.arrays import Array
from coterie.draws.accountant import Steps, epsilon
from coterie.draws.discrete import MAX_DEVIATION, discrete_gaussian
from coterie.draws.secret import KEY_BYTES, Secret, SecretNumbers
from coterie.draws.shares import Shares, combined, tau
from coterie.errors import ConfigError

REACH = 300  # whole numbers on each side: beyond, densities are less than 1e-250, or of no use


def numbers(name: str = "noise") -> SecretNumbers:
    return Secret(bytes(KEY_BYTES)).child(name).numbers()


def density(deviation: float) -> Array:
    """That of N_Z(0, deviation^2) on -REACH..REACH, by its definition."""
    y = np.arange(-REACH, REACH + 1)
    found = np.exp(-(y**2) / (2 * deviation**2))
    return found / found.sum()


def of_sum(deviation: float, n: int) -> Array:
    """That of the sum of n shares, by convolution."""
    found = density(deviation)
    for _ in range(n - 1):
        found = np.convolve(found, density(deviation), mode="same")
    return found


# ---- the sampler


@pytest.mark.parametrize("deviation", [1, 2, 5])
def test_numbers_have_the_frequencies_of_the_discrete_gaussian(deviation: int) -> None:
    n = 60_000
    drawn = discrete_gaussian(numbers(str(deviation)), n, deviation)
    expected = n * density(deviation)
    often = np.flatnonzero(expected > 20)
    counts = np.bincount(drawn + REACH, minlength=expected.size)
    rest = n - expected[often].sum()
    statistic = ((counts[often] - expected[often]) ** 2 / expected[often]).sum() + (n - counts[often].sum() - rest) ** 2 / rest
    assert statistic < stats.chi2.isf(1e-4, often.size)
    assert statistic > stats.chi2.isf(1 - 1e-4, often.size)


def test_numbers_of_a_large_deviation_are_those_of_a_normal_distribution() -> None:
    drawn = discrete_gaussian(numbers(), 20_000, MAX_DEVIATION)
    assert stats.kstest(drawn / MAX_DEVIATION, "norm").pvalue > 1e-3
    assert stats.chisquare(np.bincount(drawn % 8)).pvalue > 1e-3  # the last bits are even


def test_the_same_key_repeats_its_numbers_and_another_one_does_not() -> None:
    one, same, other = (discrete_gaussian(numbers(name), 1000, 1 << 20) for name in ("a", "a", "b"))
    assert (one == same).all()
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.15


@pytest.mark.parametrize("deviation", [0, MAX_DEVIATION + 1])
def test_deviations_whose_products_would_not_fit_are_refused(deviation: int) -> None:
    with pytest.raises(ValueError, match=f"the deviation of a discrete Gaussian is {deviation}, want 1 to 2097152"):
        discrete_gaussian(numbers(), 1, deviation)


def test_whole_numbers_below_a_bound_are_equally_likely() -> None:
    """With a bound of 3/4 of 2^63 plain remainders would prefer small numbers: of words from 0 to 2^64, those above are drawn again."""
    bound = 3 << 61
    drawn = numbers().below(bound, 30_000)
    assert stats.chisquare(np.bincount(drawn // (bound // 6), minlength=6)).pvalue > 1e-3
    assert numbers().below(1, 5).tolist() == [0] * 5


# ---- whole numbers


@pytest.mark.parametrize(("clip", "wanted", "n_hosts"), [(0.7, 2.0, 3), (1e-6, 0.01, 100), (1e5, 30.0, 2)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_no_vector_is_longer_than_the_clip_after_rounding(clip: float, wanted: float, n_hosts: int, dtype: type) -> None:
    """In whole numbers without rounding, since the proof needs it: also vectors that are all at the worst place, halves."""
    shares = Shares(clip, wanted, n_hosts)
    draws = np.random.default_rng(0)
    rows = np.concatenate([draws.normal(size=(20, 501)) * clip, draws.normal(size=(5, 501)) * 1e9 * clip]).astype(dtype)
    rows[3] = 0.0
    rows[3, :2] = clip
    limit = int(2.0 ** (2 * shares.bits) * clip**2) if shares.bits >= 0 else (clip * 2.0**shares.bits) ** 2
    halves = (np.arange(501) % 40 + 0.5) * 2.0**-shares.bits
    for vector in shares.whole(np.vstack([rows, halves * (clip / np.linalg.norm(halves))])):
        assert sum(int(number) ** 2 for number in vector) <= limit
    kept = np.ldexp(shares.whole(rows[:20]).astype(np.float64), -shares.bits)
    wanted_rows = rows[:20] * np.minimum(1, clip / np.maximum(np.linalg.norm(rows[:20].astype(np.float64), axis=1), 1e-300))[:, None]
    np.testing.assert_allclose(kept, wanted_rows, atol=clip * 1e-4 * max(1, wanted))


def test_a_vector_whose_length_is_no_number_counts_as_zero_and_a_short_one_stays() -> None:
    shares = Shares(1.0, 1.0, 2)
    found = shares.whole(np.array([[np.nan, 1.0], [np.inf, 0.0], [1e200, 1e200], [0.25, -0.5]]))
    assert (found[:3] == 0).all()
    assert np.ldexp(found[3].astype(float), -shares.bits).tolist() == [0.25, -0.5]


def test_the_noise_of_the_fewest_hosts_is_what_is_claimed() -> None:
    """Of any N hosts, also where others are lost: no share counts on those."""
    shares, size = Shares(0.5, 3.0, 4), 20_000
    total = sum(shares.noise(numbers(str(host)), size) for host in range(4))
    assert shares.read(total).std() == pytest.approx(3.0 * 0.5, rel=0.02)
    assert shares.multiplier(size) >= 3.0
    assert shares.multiplier(size) == pytest.approx(3.0, rel=1e-5)
    assert 1 << 20 <= shares.deviation <= MAX_DEVIATION


def test_the_deviation_of_a_share_just_below_a_power_of_two_is_one_that_noise_can_have() -> None:
    shares = Shares(math.nextafter(1.0, 0.0), math.sqrt(2), 2)
    assert shares.deviation <= MAX_DEVIATION
    assert shares.multiplier(10) >= shares.wanted


def test_hosts_that_help_take_their_shares_of_the_noise_away() -> None:
    shares, size = Shares(0.5, 3.0, 4), 20_000
    left = sum(shares.noise(numbers(str(host)), size) for host in range(6 - 3))  # of six in the total, three help
    assert shares.left(6, 3) == pytest.approx(3.0 * math.sqrt(3 / 4))
    assert shares.read(left).std() == pytest.approx(0.5 * shares.left(6, 3), rel=0.02)
    assert shares.left(4, 4) == 0.0


def test_too_little_noise_for_64_bits_and_too_much_for_the_grid_are_refused_with_what_would_fit() -> None:
    Shares(1.0, 1e-5, 4).check(1000, 10)
    with pytest.raises(ConfigError, match=r"noise of 1e-12 clips, too little for sums of 1,000 users in 64 bits: want at least 1.82e-09"):
        Shares(1.0, 1e-12, 4).check(1000, 10)
    Shares(1.0, 1.9e-9, 4).check(1000, 10)
    with pytest.raises(
        ConfigError, match=r"noise of 1e\+06 clips, too much for 1,000 shared numbers: rounding would take half of the clip"
    ):
        Shares(1.0, 1e6, 4).check(10, 1000)


# ---- what it spends


@pytest.mark.parametrize(("deviation", "n"), [(0.5, 4), (0.7, 3), (1.0, 5), (1.3, 2)])
def test_the_sum_of_shares_is_as_near_to_one_discrete_gaussian_as_tau_says(deviation: float, n: int) -> None:
    middle = slice(REACH - 6, REACH + 7)
    ratio = np.log(of_sum(deviation, n)[middle] / density(math.sqrt(n) * deviation)[middle])
    assert 0 < np.abs(ratio).max() <= tau(deviation, n) / 2
    assert tau(2.0**20, 10_000) == 0.0


@pytest.mark.parametrize(("deviation", "n", "length"), [(0.7, 3, 1), (1.0, 4, 2), (1.3, 2, 3), (3.0, 5, 7)])
def test_divergences_by_sums_over_the_density_are_no_larger_than_those_that_are_counted(deviation: float, n: int, length: int) -> None:
    there = of_sum(deviation, n)
    with_user, without = there[length:], there[:-length]
    known = (with_user > 1e-250) & (without > 1e-250)
    z = combined(length, deviation, n, 1)
    for order in (1.1, 1.5, 2.0, 4.0, 16.0):
        for p, q in ((with_user, without), (without, with_user)):
            found = logsumexp(order * np.log(p[known]) + (1 - order) * np.log(q[known])) / (order - 1)
            assert found <= order / (2 * z**2) * (1 + 1e-9)
            if deviation >= 1.3:
                assert found > 0.9 * order / (2 * z**2), "the bound says little"


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize(("deviation", "n", "length"), [(2.0, 3, 4), (3.0, 2, 3)])
def test_delta_by_sums_over_all_outcomes_is_no_larger_than_the_one_that_belongs_to_the_epsilon(
    deviation: float, n: int, length: int, rounds: int
) -> None:
    """The outcomes of all rounds together: E max(0, 1 - exp(epsilon - loss)), with the loss of a round from the density."""
    delta = 1e-3
    claimed = epsilon(Steps(combined(length, deviation, n, 1), rounds), delta)
    there = of_sum(deviation, n)
    p, q = there[length:], there[:-length]
    known = (p > 1e-14) & (q > 1e-14)
    p, losses = p[known], np.log(p[known] / q[known])
    total, chances = losses, p
    for _ in range(rounds - 1):
        total, chances = np.add.outer(total, losses).reshape(-1), np.multiply.outer(chances, p).reshape(-1)

    def found(spent: float) -> float:
        return float((chances * np.maximum(0, -np.expm1(np.minimum(spent - total, 0)))).sum()) + 1e-12

    assert found(claimed) <= delta
    assert found(0.75 * claimed) > delta, "the claim is far too large"


@pytest.mark.parametrize(("wanted", "users"), [(1.0, 1), (0.0, 1)])
def test_a_guess_at_who_took_part_is_no_better_than_epsilon_allows_and_is_without_noise(wanted: float, users: int) -> None:
    """A lower bound of epsilon from 2,000 totals with a user and as many without it (at 99.9 %), for the guess by a threshold."""
    n, clip, delta, noise = 2000, 1.0, 1e-2, max(wanted, 1e-4)
    shares = Shares(clip, noise, 3)
    base = shares.whole(np.array([[0.3]]))[0, 0]
    change = shares.whole(np.array([[clip]]))[0, 0] * users
    drawn = [sum(shares.noise(numbers(f"{side}{host}"), n) for host in range(3)) for side in "ab"]
    there, absent = shares.read(drawn[0] + base + change), shares.read(drawn[1] + base)
    threshold = shares.read(np.array([base])) + clip
    hits, false = int((there > threshold).sum()), int((absent > threshold).sum())
    least_hits = stats.beta.ppf(0.0005, hits, n - hits + 1)
    most_false = stats.beta.ppf(0.9995, false + 1, n - false)
    bound = math.log(max(least_hits - delta, 1e-12) / most_false)
    claimed = epsilon(Steps(1.0), delta)
    assert (bound <= claimed) == (wanted > 0)
