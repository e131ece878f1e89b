"""Accounting of differential privacy: the epsilon that steps of the Gaussian mechanism spend, by Renyi divergences.

A step adds normal noise of deviation `multiplier` times C to a sum of vectors of norm at most C, of units (rows or users) that are drawn

- poisson: each unit with probability `rate`, independently. Neighbouring data lack or have one unit. Mironov, Talwar and Zhang (2019),
  "Renyi differential privacy of the sampled Gaussian mechanism". With rate 1 all units are in each step.
- fixed: `rate` times n units without replacement. Neighbouring data differ in the values of one unit, which moves the sum by up to 2 C.
  Wang, Balle and Kasiviswanathan (2019), "Subsampled Renyi differential privacy and analytical moments accountant", theorem 9.

Divergences of steps add up. Their conversion to (epsilon, delta) is that of Canonne, Kamath and Steinke (2020). All of it is computed by
Google's library dp-accounting, which is imported when the first number is asked for. Results are upper bounds.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from coterie.arrays import Array
from coterie.errors import ConfigError
from coterie.extras import needed

Sampling = Literal["poisson", "fixed"]

# Orders of the divergences. Fractional ones matter where most units are in each step. For fewer, their series converge slowly or not at
# all.
_WHOLE: Final = (*map(float, range(2, 50)), 56.0, 64.0, 80.0, 96.0, 128.0, 192.0, 256.0, 512.0)
_ORDERS: Final = tuple(sorted((*_WHOLE, 1.1, 1.25, 1.5, 1.75, 2.25, 2.5, 3.5)))
_FINE_FROM: Final = 0.5  # of the rate
_MOST: Final = 1e5  # the largest noise multiplier that is tried
_LEAST: Final = 0.01  # times the first multiplier that is enough: the least one tried
_PRECISION: Final = 1e-3  # of a noise multiplier, relative


@dataclass(frozen=True)
class Steps:
    """Equal steps on the same units."""

    multiplier: float  #: deviation of the noise over the clip C
    n: int = 1  #: number of steps
    rate: float = 1.0  #: share of the units in a step
    sampling: Sampling = "poisson"
    n_units: int = 0  #: for fixed samples


def epsilon(steps: Steps | Sequence[Steps], delta: float) -> float:
    """The epsilon that these steps spend together, for this delta. ConfigError without the extra `privacy`."""
    listed = [steps] if isinstance(steps, Steps) else list(steps)
    used = [one for one in listed if one.n]
    if not used:
        return 0.0
    total = sum((one.n * _divergences(one.multiplier, one.rate, one.sampling, one.n_units) for one in used), np.zeros(len(_ORDERS)))
    with _quiet():
        found, _ = _library().compute_epsilon(_ORDERS, total, delta)
    return float(found)


@functools.lru_cache(maxsize=10_000)
def noise_multiplier(wanted: float, delta: float, n: int, rate: float = 1.0, sampling: Sampling = "poisson", n_units: int = 0) -> float:
    """The least noise multiplier, to a thousandth above, with which n steps spend at most the wanted epsilon.

    ConfigError if none up to 100,000 does.
    """

    def spent(multiplier: float) -> float:
        return epsilon(Steps(multiplier, n, rate, sampling, n_units), delta)

    low, high = 0.0, 1.0
    while spent(high) > wanted:
        low, high = high, 2 * high
        if high > _MOST:
            raise ConfigError(
                f"privacy.epsilon is {wanted:g} with delta {delta:g} over {n:,} steps: no noise up to {_MOST:g} clips is enough"
            )
    from scipy.optimize import brentq  # noqa: PLC0415 - members without privacy start without scipy

    low = max(low, high * _LEAST)
    if spent(low) <= wanted:
        return low
    least = np.finfo(float).tiny  # a large delta may allow what no epsilon is needed for
    found = float(brentq(lambda multiplier: np.log(max(spent(multiplier), least) / wanted), low, high, rtol=_PRECISION))
    while spent(found) > wanted:
        found *= 1 + _PRECISION
    return found


def _library() -> Any:
    return needed("dp_accounting.rdp", "privacy", "privacy is accounted by dp-accounting")


@functools.lru_cache(maxsize=50_000)
def _divergences(multiplier: float, rate: float, sampling: Sampling, n_units: int) -> Array:
    """Those of one step at `_ORDERS`, infinite where they are not computed."""
    if rate >= 1:
        found: Array = np.array(_ORDERS) * _sensitivity(sampling) ** 2 / (2 * multiplier**2)
        return found
    library = _library()
    import dp_accounting  # noqa: PLC0415 - an optional library

    orders = _ORDERS if sampling == "poisson" and rate >= _FINE_FROM else _WHOLE
    event: Any = dp_accounting.GaussianDpEvent(multiplier / _sensitivity(sampling))
    if sampling == "fixed":
        accountant = library.RdpAccountant(orders, dp_accounting.NeighboringRelation.REPLACE_ONE)
        event = dp_accounting.SampledWithoutReplacementDpEvent(n_units, round(rate * n_units), event)
    else:
        accountant = library.RdpAccountant(orders)
        event = dp_accounting.PoissonSampledDpEvent(rate, event)
    with _quiet():
        accountant.compose(event)
    listed = dict(zip(orders, accountant._rdp, strict=True))
    return np.array([listed.get(order, np.inf) for order in _ORDERS])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The library warns of each order that it leaves out. The others bound epsilon as well."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _sensitivity(sampling: Sampling) -> float:
    """How far a unit may move the sum, in clips."""
    return 2.0 if sampling == "fixed" else 1.0
