"""Chooses where a step takes its gradient: at the parameters, or as the rule of the phase says.

A rule evaluates the plain gradient of the step's rows (`Slope`) wherever its formula says, and restores the parameters w. What it trains
beside w is returned at the end.
"""

from __future__ import annotations

from coterie_client.learning.phases import Phase
from coterie_client.learning.steps import Gradient, Gradients, Numbers, Slope


def gradient(phase: Phase, slope: Slope) -> Gradient:
    return _Plain(slope) if phase.rule is None else phase.rule.on(slope, phase)


class _Plain:
    def __init__(self, slope: Slope) -> None:
        self._slope = slope

    def __call__(self, rows: Numbers, *_: Numbers) -> tuple[Numbers, Gradients]:
        return self._slope(rows)

    def beside(self) -> dict[str, Numbers]:
        return {}


def evaluated(slope: Slope, rows: Numbers) -> tuple[Numbers, Gradients]:
    """Loss and gradients; 0 for parameters that the loss does not depend on."""
    value, gradients = slope(rows)
    return value, [0 * w if g is None else g for w, g in zip(slope.parameters, gradients, strict=True)]
