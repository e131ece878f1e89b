"""The closed form of PDMM's traffic, and the paper's own count.

Armacki, Bajovic, Jakovetic and Kar (2022), Algorithm 1: a round draws X blocks x_i and Z blocks z_ij, S_P together, and
S_D blocks mu_ij.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coterie.arrays import Array, Indices
from coterie.families.ties import Extent
from coterie.methods.pdmm import Config
from coterie_server.interface.half import OVERLAP, Counts, Key
from coterie_server.maths.clusters import overlap
from coterie_server.methods.pdmm import balance, pairs
from coterie_server.methods.pdmm import messages as pdmm_messages
from coterie_server.methods.pdmm.forecast import Forecasts


def blocks(layout: pairs.Layout, chosen: pairs.Chosen) -> dict[str, float]:
    """The figures of a round that the closed form is made of: blocks updated of each kind."""
    per_place = 2 // layout.copies
    everything = layout.extent.duals
    return {
        "x_blocks": float(layout.n if chosen.x is None else chosen.x.size),
        "z_blocks": float(everything if chosen.z is None else per_place * chosen.z.size),
        "dual_blocks": float(everything if chosen.mu is None else per_place * chosen.mu.size),
    }


def of_clusters(x: Array, labels: Indices) -> dict[str, float]:
    """The closing figures about the clusters `labels` (n,) of the models x (n, d)."""
    found = overlap(x, labels)
    return {"clusters": float(labels.max() + 1), **({} if found is None else {OVERLAP: found})}


def of_forecasts(known: Forecasts, *, is_valued: bool) -> dict[str, float]:
    """The figures of a round with `forecast`: users asked and not asked, exchanges, and whose losses are known."""
    n = len(known.x)
    asked = float(known.asked)
    return {"x_blocks": asked, "foretold": n - asked, "exchanges": float(known.exchanges), "told": float(n) if is_valued else 0.0}


def vectors(config: Config, n: int, start: Array | None, figures: Sequence[Mapping[str, float]]) -> Counts:
    """The vectors of rounds with these figures; `start` (n, d) is the message S0, if there is one.

    S5 = X, S6 = Z (one per unordered pair when drawn in pairs), S7 = X counted once, S10 = S_D; lean: X each way.
    """
    x, z, mu = (sum(f.get(key, 0.0) for f in figures) for key in ("x_blocks", "z_blocks", "dual_blocks"))
    absent, unasked = (sum(f.get(key, 0.0) for f in figures) for key in ("absent", "unasked"))
    expected: dict[Key, float] = {("S5", "up"): x - absent}
    if start is not None and figures:
        expected["S0", "down"] = 1.0 if pdmm_messages.is_common(start) else n - figures[0].get("unasked_at_start", 0.0)
    if config.placement == "lean":
        expected["S7+S10", "down"] = x - unasked
    else:
        expected["S6", "up"] = z / 2 if config.sampling == "paired" else z
        expected["S7", "down"], expected["S10", "down"] = x, mu
    return expected


def scalars(config: Config, n: int, figures: Sequence[Mapping[str, float]]) -> Counts:
    """f_i(x_i) from each user in the rounds that evaluate, and rho to all in those it may have changed before."""
    every = config.evaluate_every
    found: dict[Key, float] = {}
    if "ties_told" in (figures[0] if figures else ()):
        found["ties", "down"] = sum(row.get("ties_told", 0.0) - row.get("unasked_ties", 0.0) for row in figures)
    if n_told := sum(row.get("exchanges", 1.0) * balance.has_weight(config, number) for number, row in enumerate(figures, 1)):
        found["balance", "down"] = float(n_told)
    if config.stochastic is not None:
        found["x_update", "up"] = sum(row.get("x_blocks", 0.0) - row.get("absent", 0.0) for row in figures)
    if not every:
        return found
    return found | {("evaluate", "up"): sum(row.get("told", float(n)) for number, row in enumerate(figures, 1) if number % every == 0)}


def printed(config: Config, extent: Extent, n_rounds: int) -> Mapping[str, float]:
    """The paper's own count, S_P up and S_P + S_D down per iteration: an upper bound for any placement, without S0."""
    if config.schedule is not None:
        rounds = config.schedule[:n_rounds]
        s_p, s_d = sum(len(x) + len(z) for x, z, _ in rounds), sum(len(mu) for _, _, mu in rounds)
        return {"up": float(s_p), "down": float(s_p + s_d)}
    s_p, s_d = extent.blocks, extent.duals
    if config.sampling != "full":
        s_p = config.primal_blocks(extent)
        s_d = config.dual_blocks(extent) if config.dual == "independent" else min(s_p, s_d)
    if config.sampling == "paired" and config.dual == "independent":
        s_d = 2 * max(1, round(s_d / 2))  # both of a pair are drawn, or neither
    return {"up": float(n_rounds * s_p), "down": float(n_rounds * (s_p + s_d))}
