"""Where a step takes its gradient: at the parameters as they are, or where the rule of its phase says.

A rule evaluates the plain gradient of the step's rows (`Slope`) wherever its formula says, and leaves the parameters w as they were. What
it trains beside w is handed out in the end. Rules are their methods' own.
"""

from __future__ import annotations

from coterie_client.learning.phases import Phase
from coterie_client.learning.steps import Gradient, Gradients, Numbers, Slope


def gradient(phase: Phase, slope: Slope) -> Gradient:
    """The rule of the phase at work on a slope."""
    return _Plain(slope) if phase.rule is None else phase.rule.on(slope, phase)


class _Plain:
    def __init__(self, slope: Slope) -> None:
        self._slope = slope

    def __call__(self, rows: Numbers, *_: Numbers) -> tuple[Numbers, Gradients]:
        return self._slope(rows)

    def beside(self) -> dict[str, Numbers]:
        return {}


def evaluated(slope: Slope, rows: Numbers) -> tuple[Numbers, Gradients]:
    """Loss and gradients, 0 where the loss does not depend on a parameter."""
    value, gradients = slope(rows)
    return value, [0 * w if g is None else g for w, g in zip(slope.parameters, gradients, strict=True)]
