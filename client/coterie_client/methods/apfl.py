"""Local update of `apfl` (see `coterie.methods.apfl`): the global model as in FedAvg, and in the same steps the user's own v_i."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

import numpy as np

from coterie.arrays import Array
from coterie_client.interface.local_update import Context, LocalUpdate, Moved, Settings, of_each
from coterie_client.learning import Gradient, Gradients, Numbers, Phase, Slope, Tensors, evaluated

ALPHA = "alpha of the mix"  # key of alpha beside the tensors of v


@dataclass(frozen=True)
class Mixed:
    """The gradient of f(w). v follows the gradient of f(alpha v + (1 - alpha) w) in v; an adaptive alpha follows the one in alpha."""

    own: Tensors  # v, with the running statistics of the mix
    alpha: float | Array  # (k, 1) of several users
    is_adaptive: bool
    n_batches = 1

    def on(self, slope: Slope, phase: Phase) -> Gradient:
        return _Mixed(self, slope, phase)

    def of_user(self, number: int) -> Mixed:
        alpha = np.reshape(self.alpha, -1)[number]
        return Mixed({name: array[number] for name, array in self.own.items()}, float(alpha), self.is_adaptive)


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
        with slope.apart(self._rest):  # w then draws the same dropout as the mix
            slope.put([alpha * own + (1 - alpha) * shared for own, shared in zip(self._v, w, strict=True)])
            value, g = evaluated(slope, rows)
        slope.put(w)
        products = [(own - shared) * slant for own, shared, slant in zip(self._v, w, g, strict=True)]
        self._optimizer.step([alpha * slant for slant in g])
        if self._is_adaptive and isinstance(alpha, np.ndarray):
            self._alpha = np.clip(alpha - self._lr * sum(product.sum(axis=-1, keepdims=True) for product in products), 0.0, 1.0)
        elif self._is_adaptive:
            self._alpha = min(max(alpha - self._lr * sum(float(product.sum()) for product in products), 0.0), 1.0)
        return value, slope(rows)[1]

    def beside(self) -> dict[str, Numbers]:
        return {
            **dict(zip(self._slope.names, self._v, strict=True)),
            **self._rest,
            ALPHA: self._slope.array(np.reshape(self._alpha, np.shape(self._alpha)[:-1])),  # () or (k,)
        }


def start(model: Tensors, settings: Settings) -> Tensors:
    """v_i and alpha_i."""
    return {**model, ALPHA: np.array(settings["alpha"])}


def update(context: Context) -> Moved:
    """w_i to return, v_i and alpha_i to keep; the loss is that of the mix."""
    (phase,), kept = context.phases, context.kept
    alpha = kept[ALPHA][:, None] if kept[ALPHA].ndim else float(kept[ALPHA])
    own = {name: array for name, array in kept.items() if name != ALPHA}
    fitted = context.fit(context.model, [replace(phase, rule=Mixed(own, alpha, context.settings["adaptive"]))])
    return Moved(fitted.tensors, {**kept, **fitted.beside}, fitted.loss)


def judged(model: Tensors, kept: Tensors, parameters: AbstractSet[str]) -> Tensors:
    """alpha_i v_i + (1 - alpha_i) w, with the mix's own running statistics."""
    alpha = kept[ALPHA]
    mixed = {name: of_each(alpha, w) * kept[name] + of_each(1 - alpha, w) * w for name, w in model.items() if name in parameters}
    return {name: mixed.get(name, kept[name]) for name in model}


UPDATE = LocalUpdate(update, start, judged, together=True)
