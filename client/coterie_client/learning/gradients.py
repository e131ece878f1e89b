"""Where a step takes its gradient, if not at the parameters as they are: the rules of `phases` at work.

A rule evaluates the plain gradient of the step's rows (`Slope`) wherever its formula says, and leaves the parameters w as they were. What
it trains beside w is handed out in the end.
"""

from __future__ import annotations

from typing import assert_never

import numpy as np

from coterie_client.learning.phases import ALPHA, Adapted, Envelope, Mixed, Phase
from coterie_client.learning.steps import Gradient, Gradients, Numbers, Slope


def gradient(phase: Phase, slope: Slope) -> Gradient:
    """The rule of the phase at work on a slope."""
    match phase.rule:
        case None:
            return _Plain(slope)
        case Adapted():
            return _Adapted(phase.rule, slope)
        case Envelope():
            return _Envelope(phase.rule, slope)
        case Mixed():
            return _Mixed(phase.rule, slope, phase)
        case _:
            assert_never(phase.rule)


class _Plain:
    def __init__(self, slope: Slope) -> None:
        self._slope = slope

    def __call__(self, rows: Numbers, *_: Numbers) -> tuple[Numbers, Gradients]:
        return self._slope(rows)

    def beside(self) -> dict[str, Numbers]:
        return {}


class _Adapted:
    def __init__(self, rule: Adapted, slope: Slope) -> None:
        self._rule, self._slope = rule, slope

    def __call__(self, rows: Numbers, *others: Numbers) -> tuple[Numbers, Gradients]:
        slope, rate, delta = self._slope, self._rule.rate, self._rule.delta
        w = slope.values()
        inner, *curving = others
        _, g = _evaluated(slope, inner)
        slope.put([a - rate * b for a, b in zip(w, g, strict=True)])
        value, g = _evaluated(slope, rows)
        for batch in curving:
            ends = []
            for length in (delta, -delta):
                slope.put([a + length * b for a, b in zip(w, g, strict=True)])
                ends.append(_evaluated(slope, batch)[1])
            g = [a - rate * (above - below) / (2 * delta) for a, above, below in zip(g, *ends, strict=True)]
        slope.put(w)
        return value, g

    def beside(self) -> dict[str, Numbers]:
        return {}


class _Envelope:
    def __init__(self, rule: Envelope, slope: Slope) -> None:
        self._rule, self._slope = rule, slope
        self._theta: dict[str, Numbers] = {}

    def __call__(self, rows: Numbers, *_: Numbers) -> tuple[Numbers, Gradients]:
        slope, penalty, rate = self._slope, self._rule.penalty, self._rule.rate
        w = theta = slope.values()
        for _step in range(self._rule.n_steps):
            value, gradients = _evaluated(slope, rows)
            theta = [t - rate * (g + penalty * (t - a)) for t, g, a in zip(theta, gradients, w, strict=True)]
            slope.put(theta)
        slope.put(w)
        self._theta = dict(zip(slope.names, theta, strict=True))
        return value, [penalty * (a - t) for a, t in zip(w, theta, strict=True)]

    def beside(self) -> dict[str, Numbers]:
        return {**self._slope.state(), **self._theta} if self._theta else {}


class _Mixed:
    def __init__(self, rule: Mixed, slope: Slope, phase: Phase) -> None:
        self._slope, self._lr, self._alpha, self._is_adaptive = slope, phase.lr, rule.alpha, rule.is_adaptive
        own = {name: slope.array(numbers) for name, numbers in rule.own.items()}
        self._v = [own.pop(name) for name in slope.names]
        self._rest = own
        self._optimizer = slope.optimizer(phase, self._v)

    def __call__(self, rows: Numbers, *_: Numbers) -> tuple[Numbers, Gradients]:
        """The loss is that of the mix, before the step."""
        slope, alpha = self._slope, self._alpha
        w = slope.values()
        with slope.apart(self._rest):  # the mix drops out what w does
            slope.put([alpha * own + (1 - alpha) * shared for own, shared in zip(self._v, w, strict=True)])
            value, g = _evaluated(slope, rows)
        slope.put(w)
        in_alpha = sum(float(((own - shared) * slant).sum()) for own, shared, slant in zip(self._v, w, g, strict=True))
        self._optimizer.step([alpha * slant for slant in g])
        if self._is_adaptive:
            self._alpha = min(max(alpha - self._lr * in_alpha, 0.0), 1.0)
        return value, slope(rows)[1]

    def beside(self) -> dict[str, Numbers]:
        return {**dict(zip(self._slope.names, self._v, strict=True)), **self._rest, ALPHA: self._slope.array(np.array(self._alpha))}


def _evaluated(slope: Slope, rows: Numbers) -> tuple[Numbers, Gradients]:
    """Loss and gradients, 0 where the loss does not depend on a parameter."""
    value, gradients = slope(rows)
    return value, [0 * w if g is None else g for w, g in zip(slope.parameters, gradients, strict=True)]
