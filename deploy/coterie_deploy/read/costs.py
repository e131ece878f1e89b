"""The cost of a run up to each of its rounds, in rounds, seconds or bytes, and the goals whose cost is compared."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from coterie.arrays import Array
from coterie.experiment.problem import METRICS, UNTOLD
from coterie_server.interface.half import CONVERGED, ENDED
from coterie_server.record.curves import GAP, Curves, Goal
from coterie_server.record.rundb import BETWEEN, PEERS, WITHIN

Against = Literal["round", "bytes", "up", "down", "within", "between", "seconds"]
AXES: Mapping[Against, str] = {
    "round": "round",
    "bytes": "bytes on the wire",
    "up": "bytes up",
    "down": "bytes down",
    "within": "bytes within clusters",
    "between": "bytes between clusters",
    "seconds": "seconds",
}
_TWO_TIER: tuple[Against, ...] = ("within", "between")
_MAIN = (*METRICS, GAP, "loss", "objective", "distance", "primal_residual", "dual_residual", "gradient_norm")
_MOST_FIGURES = 4
_DROPPED = (CONVERGED, ENDED)  # figures that say nothing when drawn


@dataclass(frozen=True)
class Weighing:
    """A byte up counts as `up_weight` bytes down. `goal`: the value that runs are to reach."""

    goal: Goal | None = None
    up_weight: float = 1.0


def axes_of(listed: Iterable[Curves]) -> list[Against]:
    """The horizontal axes: bytes by scope only if a run has two tiers, seconds only if they are known."""
    curves = list(listed)
    has_tiers = any(found.is_two_tier for found in curves)
    has_times = any(np.isfinite(found.seconds).sum() > 1 for found in curves)
    return [axis for axis in AXES if (axis not in _TWO_TIER or has_tiers) and (axis != "seconds" or has_times)]


def figures_shown(found: Curves) -> list[str]:
    """A few figures of the rounds that show progress, the main ones first; other figures if there are none of these."""
    known = [name for name in _MAIN if name in found.figures]
    return (known or [name for name in found.figures if name not in _DROPPED])[:_MOST_FIGURES]


def cost(curves: Curves, against: Against, *, up_weight: float = 1.0) -> Array:
    """(t,) the cost up to each round; in "bytes", bytes up count `up_weight` times."""
    if against in ("round", "seconds"):
        return curves.rounds.astype(np.float64) if against == "round" else curves.seconds
    if against in ("within", "between"):
        return curves.bytes_by(scope=WITHIN) if against == "within" else curves.bytes_by(scope=BETWEEN) + curves.bytes_by(scope=PEERS)
    if against == "bytes":
        return up_weight * curves.bytes_by(direction="up") + curves.bytes_by(direction="down")
    return curves.bytes_by(direction=against)


def goal_said(goal: Goal) -> str:
    """A goal in the words of the pages."""
    value = f"{goal.value:.4g}".replace("e-0", "e-").replace("e+0", "e")
    return f"{goal.figure.replace('_', ' ')} {'≥' if goal.is_rising else '≤'} {value}"


def best(found: Curves, figure: str) -> float | None:
    """The best value of a figure that a stage has reached; None where it has none."""
    values = found.figures.get(figure)
    if values is None or not np.isfinite(values).any():
        return None
    return float(np.nanmax(values) if Goal(figure, 0).is_rising else np.nanmin(values))


def common_goal(listed: Iterable[Curves]) -> Goal | None:
    """The best value of their first common figure that all have reached; None if they have no figure in common.

    The metric of a loss from outside is no goal: more may be better or worse.
    """
    curves = list(listed)
    for figure in figures_shown(curves[0]) if curves else ():
        if figure == UNTOLD:
            continue
        values = [value for found in curves if (value := best(found, figure)) is not None]
        if len(values) == len(curves) and is_comparable(figure, curves):
            return Goal(figure, min(values) if Goal(figure, 0).is_rising else max(values))
    return None


def is_comparable(figure: str, listed: Iterable[Curves]) -> bool:
    """Whether a figure can be compared between runs: a gap to a run's own smallest objective cannot."""
    return figure != GAP or all(found.has_reference for found in listed)
