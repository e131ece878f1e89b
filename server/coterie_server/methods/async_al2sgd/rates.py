"""The parameters of Algorithm 2, given or by Corollary 4.4, and the coin of new anchors.

Lyu, Hanzely and Kolar (2022); see `coterie.methods.async_al2sgd`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from coterie.arrays import Array
from coterie.draws.coins import Coin, DrawnCoin, RecordedCoin
from coterie.errors import ConfigError
from coterie.methods import async_l2gd
from coterie.methods.async_al2sgd import Config
from coterie_server.families.known_clusters import Clusters
from coterie_server.methods.async_l2gd.rates import expected_smoothness, rates_of


@dataclass(frozen=True)
class Rates:
    """The parameters of Algorithm 2 for k clusters."""

    p0: float
    p: Array  # (k,)
    tau: Array  # (k,)
    rho: float
    eta: float
    a1: float
    a2: float
    b1: float
    b2: float
    contraction: float  # the least relative decrease of the Lyapunov function in an iteration, if all of Corollary 4.4 holds


def accelerated(config: Config, clusters: Clusters, smoothness: float, convexity: float) -> Rates:
    """The given parameters, and the rest by Corollary 4.4, in its order; `smoothness` is L~, `convexity` mu. Raises ConfigError.

    p0, p_j, tau_j are those of Corollary 3.6 and calL that of (3.3), both with L~. The contraction is that of Theorem 4.3's proof,
    min{b2 mu, a1/2, rho a1/(2 a2 + a1)}.
    """
    shared = {key: getattr(config, key) for key in ("gamma", "lam", "alpha", "p0", "p", "tau")}
    rates = rates_of(async_l2gd.Config(**shared), clusters, smoothness)
    rho = rates.p0 if config.rho is None else config.rho
    if rho <= 0:
        raise ConfigError("method.rho would be p0, which is 0: without new anchors nothing converges, want rho above 0")
    cal_l = expected_smoothness(rates.p0, rates.p, rates.tau, clusters, smoothness)
    largest = max(smoothness + float(clusters.gamma.max()), cal_l)
    eta = given(config.eta, 1 / (4 * largest))
    a2 = given(config.a2, cal_l / (2 * largest))
    a1 = given(config.a1, min(0.5, (eta * convexity * max(0.5, a2 / rho)) ** 0.5))
    if a1 + a2 > 1:
        raise ConfigError(f"method.a1 is {a1:g} and a2 is {a2:g}, want at most 1 together")
    b2 = given(config.b2, 1 / max(2 * convexity, 4 * a1 / eta))
    b1 = given(config.b1, 1 - b2 * convexity)
    contraction = min(b2 * convexity, a1 / 2, rho * a1 / (2 * a2 + a1))
    return Rates(rates.p0, rates.p, rates.tau, rho, eta, a1, a2, b1, b2, contraction)


def given(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


@functools.lru_cache(maxsize=16)
def refresh_coin(seed: int, rho: float, recorded: tuple[int, ...] | None) -> Coin:
    """xi', which only the coordinator needs."""
    return DrawnCoin(seed, "coin of the anchors", rho) if recorded is None else RecordedCoin(recorded)
