"""What a run had paid by each of its rounds: rounds, seconds, or bytes of one kind; and what it had paid when a goal was reached."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from coterie.arrays import Array
from coterie.experiment.problem import METRICS, UNTOLD
from coterie_server.interface.half import CONVERGED, ENDED
from coterie_server.record.curves import GAP, Curves, Goal
from coterie_server.record.rundb import BETWEEN, WITHIN

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
    """How costs are weighed: a byte up counts as `up_weight` bytes down. `goal`: what a run is to reach."""

    goal: Goal | None = None
    up_weight: float = 1.0


def axes_of(listed: Iterable[Curves]) -> list[Against]:
    """What figures can be drawn against: bytes by scope only where some run has two tiers, seconds where they are known."""
    curves = list(listed)
    has_tiers = any(found.is_two_tier for found in curves)
    has_times = any(np.isfinite(found.seconds).sum() > 1 for found in curves)
    return [axis for axis in AXES if (axis not in _TWO_TIER or has_tiers) and (axis != "seconds" or has_times)]


def figures_shown(found: Curves) -> list[str]:
    """A few figures of the rounds that say how far a run is, the most telling first; others where there are none of these."""
    known = [name for name in _MAIN if name in found.figures]
    return (known or [name for name in found.figures if name not in _DROPPED])[:_MOST_FIGURES]


def cost(curves: Curves, against: Against, *, up_weight: float = 1.0) -> Array:
    """(t,) what has been paid by each round; of all bytes on the wire, those up count `up_weight` times."""
    match against:
        case "round":
            return curves.rounds.astype(np.float64)
        case "seconds":
            return curves.seconds
        case "up" | "down":
            return curves.bytes_by(direction=against)
        case "within" | "between":
            return curves.bytes_by(scope=WITHIN if against == "within" else BETWEEN)
        case "bytes":
            return up_weight * curves.bytes_by(direction="up") + curves.bytes_by(direction="down")


def goal_said(goal: Goal) -> str:
    """A goal as pages write it."""
    value = f"{goal.value:.4g}".replace("e-0", "e-").replace("e+0", "e")
    return f"{goal.figure.replace('_', ' ')} {'≥' if goal.is_rising else '≤'} {value}"


def best(found: Curves, figure: str) -> float | None:
    """The best value of a figure that a stage has reached; None where it has none."""
    values = found.figures.get(figure)
    if values is None or not np.isfinite(values).any():
        return None
    return float(np.nanmax(values) if Goal(figure, 0).is_rising else np.nanmin(values))


def common_goal(listed: Iterable[Curves]) -> Goal | None:
    """The best value of their first figure that all have reached; None where they have no figure in common.

    Of the metric of one's own loss nobody here knows whether more is better, so it is no goal by itself.
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
    """Whether a figure of one run says something beside that of another: a gap to the run's own smallest objective does not."""
    return figure != GAP or all(found.has_reference for found in listed)
