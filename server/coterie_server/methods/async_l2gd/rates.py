"""The parameters of Algorithm 1, given or derived from the constants of the losses as in the paper.

Lyu, Hanzely and Kolar (2022), Proposition 3.3 and Corollary 3.6; see `coterie.methods.async_l2gd`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from coterie.arrays import Array
from coterie.errors import ConfigError
from coterie.methods.async_l2gd import Config
from coterie_server.families.known_clusters import Clusters


@dataclass(frozen=True)
class Rates:
    """The parameters of Algorithm 1 for k clusters."""

    p0: float
    p: Array  # (k,)
    tau: Array  # (k,)
    eta: float


def rates_of(config: Config, clusters: Clusters, smoothness: float) -> Rates:
    """The given parameters, and the rest by Corollary 3.6; `smoothness` is L. ConfigError if they do not fit together.

    C1 = max alpha_j gamma_i, C2 = max (1-alpha_j) gamma_i, tau_j = p0/(p0 + 2(1-p0)p_j) by Proposition 3.3, eta = 1/(2 calL). With a single
    coin both averages wait for it, so that p makes calL smallest as p0 does in the corollary's second case, for max{C1, C2} in place of C1.
    """
    names = clusters.names
    own_alpha = clusters.alpha[clusters.segments.place]
    c1, c2 = float((own_alpha * clusters.gamma).max()), float(((1 - own_alpha) * clusters.gamma).max())
    is_single = config.variant == "single_coin"
    if is_single and c1 == 0 < c2:
        found = "method.variant is 'single_coin', but alpha_j gamma_i is 0 for all"
        raise ConfigError(f"{found}: its rounds need a global average, want an alpha above 0 or variant 'two_coins'")
    p0, p = _probabilities(max(c1, c2), 0.0, smoothness) if is_single else _probabilities(c1, c2, smoothness)
    p0 = p0 if config.p0 is None else config.p0
    each_p = _each("p", config.p, names, p)
    if is_single:
        each_tau = np.ones(len(names))
    else:
        total = p0 + 2 * (1 - p0) * each_p
        each_tau = _each("tau", config.tau, names, np.divide(p0, total, out=np.zeros_like(total), where=total > 0))
    _check_probabilities(p0, each_p, each_tau, clusters, c1)
    if config.eta is not None:
        return Rates(p0, each_p, each_tau, config.eta)
    return Rates(p0, each_p, each_tau, 1 / (2 * expected_smoothness(p0, each_p, each_tau, clusters, smoothness)))


def _probabilities(c1: float, c2: float, smoothness: float) -> tuple[float, float]:
    """p0 and p_j of Corollary 3.6."""
    if c2 > c1:
        return 2 * c1 / (c1 + c2 + smoothness), (c2 - c1) / (c2 - c1 + smoothness)
    return (2 * c1 / (2 * c1 + smoothness) if c1 > 0 else 0.0), 0.0


def expected_smoothness(p0: float, p: Array, tau: Array, clusters: Clusters, smoothness: float) -> float:
    """calL = max{2 C1/p0, max_j (1-alpha_j) max gamma_i v_j, L/(1-p0) max_j 1/(1-p_j)}, terms that never run left out.

    v_j = 2 tau_j^2/p0 + (1-tau_j)^2/((1-p0)p_j) is how the proof of Proposition 3.3 weighs the pull to bar_j before it chooses tau_j. For
    its tau_j that is 2/(p0 + 2(1-p0)p_j), the smallest, as in (3.3), which would be too small for another, and eta too large to converge.
    """
    gamma = clusters.segments.maxima(clusters.gamma)
    within = (1 - p0) * p
    pull = np.divide((1 - tau) ** 2, within, out=np.zeros_like(within), where=within > 0)
    terms = [smoothness / (1 - p0) * float((1 / (1 - p)).max())]
    if p0 > 0:
        pull += 2 * tau**2 / p0
        terms.append(2 * float((clusters.alpha * gamma).max()) / p0)
    return max(*terms, float(((1 - clusters.alpha) * gamma * pull).max()))


def _each(key: str, value: float | Mapping[str, float] | None, names: Sequence[str], otherwise: float | Array) -> Array:
    if value is None:
        return np.broadcast_to(np.asarray(otherwise, dtype=np.float64), (len(names),)).copy()
    if not isinstance(value, Mapping):
        return np.full(len(names), float(value))
    wrong = next((name for name in (*value, *names) if name not in value or name not in names), None)
    if wrong is not None:
        what = "has no value for" if wrong in names else "names"
        raise ConfigError(f"method.{key} {what} cluster {wrong!r}, want a value for each of {', '.join(names)}")
    return np.array([value[name] for name in names], dtype=np.float64)


def _check_probabilities(p0: float, p: Array, tau: Array, clusters: Clusters, c1: float) -> None:
    if p0 == 0 and c1 > 0:
        j = int(clusters.alpha.argmax())
        found = f"method.p0 is 0, but cluster {clusters.names[j]!r} has alpha {clusters.alpha[j]:g}"
        raise ConfigError(f"{found}: without global rounds want alpha 0 for all")
    if p0 > 0 and c1 == 0:
        found = f"method.p0 is {p0:g}, but alpha_j gamma_i is 0 for all"
        raise ConfigError(f"{found}: there is no global average, want p0 0 or an alpha above 0")
    for j, name in enumerate(clusters.names):
        never = "its average would never count in full"
        if p0 == 0 and (1 - clusters.alpha[j]) * tau[j] * clusters.gamma_sums[j] > 0:
            raise ConfigError(f"method.tau is {tau[j]:g} for cluster {name!r}, but p0 is 0: {never}, want tau 0")
        if p[j] == 0 and (1 - clusters.alpha[j]) * (1 - tau[j]) * clusters.gamma_sums[j] > 0:
            raise ConfigError(f"method.p is 0 for cluster {name!r}, but tau is {tau[j]:g}: {never}, want p above 0 or tau 1")
