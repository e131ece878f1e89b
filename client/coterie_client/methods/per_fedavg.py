"""Local update of `per_fedavg` (see `coterie.methods.per_fedavg`): steps along the gradient at the point after an inner step."""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Literal

from coterie_client.interface.local_update import Context, LocalUpdate, Moved, Received
from coterie_client.learning import Gradient, Gradients, Numbers, Phase, Slope, Tensors, evaluated


@dataclass(frozen=True)
class Adapted:
    """The gradient of f(w - rate grad f(w)), with independent batches D, D' and D'' for inner step, outer gradient and Hessian.

    "fo": g = grad f(w - rate grad f(w; D); D'). "hf": g - rate H(w) g. The product with the Hessian comes from gradients on both sides of
    w: (grad f(w + delta g; D'') - grad f(w - delta g; D'')) / (2 delta).
    """

    rate: float
    hessian: Literal["fo", "hf"]
    delta: float

    @property
    def n_batches(self) -> int:
        return 3 if self.hessian == "hf" else 2

    def on(self, slope: Slope, phase: Phase) -> Gradient:  # noqa: ARG002
        return _Adapted(self, slope)


class _Adapted:
    def __init__(self, rule: Adapted, slope: Slope) -> None:
        self._rule, self._slope = rule, slope

    def __call__(self, rows: Numbers, *others: Numbers) -> tuple[Numbers, Gradients]:
        slope, rate, delta = self._slope, self._rule.rate, self._rule.delta
        w = slope.values()
        inner, *curving = others
        _, g = evaluated(slope, inner)
        slope.put([a - rate * b for a, b in zip(w, g, strict=True)])
        value, g = evaluated(slope, rows)
        for batch in curving:
            ends = []
            for length in (delta, -delta):
                slope.put([a + length * b for a, b in zip(w, g, strict=True)])
                ends.append(evaluated(slope, batch)[1])
            g = [a - rate * (above - below) / (2 * delta) for a, above, below in zip(g, *ends, strict=True)]
        slope.put(w)
        return value, g

    def beside(self) -> dict[str, Numbers]:
        return {}


def update(context: Context) -> Moved:
    """w to return; nothing is kept before the end. The loss is that at the adapted points."""
    fitted = context.fit(context.model, [replace(phase, rule=Adapted(**context.settings["rule"])) for phase in context.phases])
    return Moved(fitted.tensors, context.kept, fitted.loss)


def received(context: Context) -> Received:
    """w, adapted by steps on the user's own rows."""
    phases = [Phase(**phase) for phase in context.settings["adaptation"]]
    return Received(context.fit(context.model, phases, "adaptation").tensors if phases else context.model)


def judged(model: Tensors, kept: Tensors, _: AbstractSet[str]) -> Tensors:
    """The adapted w, or w before it is adapted."""
    return kept or model


UPDATE = LocalUpdate(update, judged=judged, received=received)
