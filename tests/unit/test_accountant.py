"""Epsilon of the sampled Gaussian mechanism: against published triples, and against integrals that are computed here."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from coterie.draws.accountant import Steps, epsilon, noise_multiplier
from coterie.errors import ConfigError

# Noise multiplier, epochs and epsilon at delta 1e-5 of batches of 256 of 60,000 rows: the tutorial of TensorFlow Privacy (2019), and
# table 1 of Bu, Dong, Long and Su (2020), "Deep learning with Gaussian differential privacy", with that of Gaussian privacy beside it.
PUBLISHED = [(1.3, 15, 1.19, 0.83), (1.1, 60, 3.01, 2.32), (0.7, 45, 7.10, 5.07)]
RATE = 256 / 60_000
ORDERS = [*np.arange(1.25, 10, 0.25), *range(10, 48), 64, 128, 256]


def divergence(order: float, multiplier: float, rate: float) -> float:
    """log E ((1 - q) + q exp((2 z - 1) / 2 s^2))^a / (a - 1), z normal of deviation s: Mironov, Talwar and Zhang (2019), by a sum."""
    z = np.linspace(-40 * multiplier, 40 * multiplier + order, 20_001)
    ratio = np.logaddexp(np.log1p(-rate) if rate < 1 else -np.inf, np.log(rate) + (2 * z - 1) / (2 * multiplier**2))
    logs = order * ratio - z**2 / (2 * multiplier**2) - np.log(multiplier * np.sqrt(2 * np.pi))
    top = logs.max()
    return float((top + np.log(np.exp(logs - top).sum() * (z[1] - z[0]))) / (order - 1))


def by_integrals(multiplier: float, n: int, rate: float, delta: float, *, is_old: bool = False) -> float:
    """The least bound over the orders: that of Mironov (2017), or of Canonne, Kamath and Steinke (2020), proposition 12."""
    found = []
    for order in ORDERS:
        spent = n * divergence(order, multiplier, rate)
        if is_old:
            found.append(spent - np.log(delta) / (order - 1))
        else:
            found.append(spent + np.log1p(-1 / order) - np.log(delta * order) / (order - 1))
    return float(min(found))


@pytest.mark.parametrize(("multiplier", "epochs", "printed", "gaussian"), PUBLISHED)
def test_epsilon_lies_between_the_printed_values_of_an_older_bound_and_of_an_approximation_from_below(
    multiplier: float, epochs: int, printed: float, gaussian: float
) -> None:
    n = int(epochs / RATE)
    assert by_integrals(multiplier, n, RATE, 1e-5, is_old=True) == pytest.approx(printed, rel=0.01)
    assert gaussian < epsilon(Steps(multiplier, n, RATE), 1e-5) < printed


@pytest.mark.parametrize(
    ("multiplier", "n", "rate", "delta"),
    [(1.1, 14_000, RATE, 1e-5), (5.0, 400, 32 / 77, 1e-3), (6.6, 200, 32 / 45, 1e-3), (2.0, 50, 0.1, 1e-6), (8.0, 300, 1.0, 1e-3)],
)
def test_epsilon_is_that_of_an_independent_accountant_within_2_percent(multiplier: float, n: int, rate: float, delta: float) -> None:
    assert epsilon(Steps(multiplier, n, rate), delta) == pytest.approx(by_integrals(multiplier, n, rate, delta), rel=0.02)


def test_one_step_on_all_units_spends_a_little_more_than_the_exact_epsilon_of_the_gaussian_mechanism() -> None:
    """Balle and Wang (2018): 1e-5 = Phi(1/2 - e) - exp(e) Phi(-1/2 - e) at e = 4.377 for a multiplier of 1."""
    assert 4.377 < epsilon(Steps(1.0), 1e-5) < 1.1 * 4.377


@pytest.mark.parametrize("rate", [0.05, 0.4, 0.8, 1.0])
def test_the_noise_for_a_wanted_epsilon_spends_it_and_hardly_less(rate: float) -> None:
    found = noise_multiplier(2.0, 1e-4, 100, rate)
    assert 1.98 < epsilon(Steps(found, 100, rate), 1e-4) <= 2.0


def test_a_large_delta_allows_an_epsilon_of_nothing() -> None:
    assert epsilon(Steps(noise_multiplier(1e-3, 0.5, 1)), 0.5) <= 1e-3


def test_different_steps_add_up() -> None:
    both = epsilon([Steps(5.0, 100, 0.3), Steps(5.0, 100, 0.3)], 1e-4)
    assert both == pytest.approx(epsilon(Steps(5.0, 200, 0.3), 1e-4))
    assert epsilon([Steps(5.0, 100, 0.3), Steps(7.0, 100, 1.0)], 1e-4) > both
    assert epsilon([], 1e-4) == 0 == epsilon(Steps(1.0, 0), 1e-4)


def test_a_fixed_number_of_units_spends_more_than_independent_draws_since_neighbours_differ_by_two_clips() -> None:
    fixed, poisson = (epsilon(Steps(4.0, 50, 0.1, sampling, 1000), 1e-5) for sampling in ("fixed", "poisson"))
    assert 1.5 * poisson < fixed < 8 * poisson
    assert epsilon(Steps(4.0, 50, 1.0, "fixed", 1000), 1e-5) == pytest.approx(epsilon(Steps(2.0, 50, 1.0), 1e-5))


def test_no_noise_is_enough_for_an_epsilon_of_nothing() -> None:
    with pytest.raises(ConfigError, match=r"^privacy.epsilon is 1e-09 with delta 1e-05 over 1,000 steps: no noise up to 100000 clips is"):
        noise_multiplier(1e-9, 1e-5, 1000)


def test_the_library_is_imported_with_the_first_number_only() -> None:
    code = (
        "import sys, coterie.draws.accountant as a; assert not {'dp_accounting', 'scipy'} & set(sys.modules); a.epsilon(a.Steps(1.0), 1e-5)"
    )
    subprocess.run([sys.executable, "-c", code + "; assert 'dp_accounting' in sys.modules"], check=True)
