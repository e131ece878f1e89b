"""Local update of `pfedme` (see `coterie.methods.pfedme`): w_i follows the gradient of the Moreau envelope, and theta_i is kept."""

from dataclasses import dataclass, replace

from coterie_client.interface.local_update import Context, LocalUpdate, Moved, judge_own, own_model
from coterie_client.learning import Gradient, Gradients, Numbers, Phase, Slope, evaluated


@dataclass(frozen=True)
class Envelope:
    """The gradient of min_theta f(theta) + penalty/2 |theta - w|^2, which is penalty (w - theta). The last theta is returned beside w.

    theta is w after `n_steps` gradient steps on one batch.
    """

    penalty: float
    rate: float
    n_steps: int
    n_batches = 1

    def on(self, slope: Slope, phase: Phase) -> Gradient:  # noqa: ARG002
        return _Envelope(self, slope)


class _Envelope:
    def __init__(self, rule: Envelope, slope: Slope) -> None:
        self._rule, self._slope = rule, slope
        self._theta: dict[str, Numbers] = {}

    def __call__(self, rows: Numbers, *_: Numbers) -> tuple[Numbers, Gradients]:
        slope, penalty, rate = self._slope, self._rule.penalty, self._rule.rate
        w = theta = slope.values()
        for _step in range(self._rule.n_steps):
            value, gradients = evaluated(slope, rows)
            theta = [t - rate * (g + penalty * (t - a)) for t, g, a in zip(theta, gradients, w, strict=True)]
            slope.put(theta)
        slope.put(w)
        self._theta = dict(zip(slope.names, theta, strict=True))
        return value, [penalty * (a - t) for a, t in zip(w, theta, strict=True)]

    def beside(self) -> dict[str, Numbers]:
        return {**self._slope.state(), **self._theta} if self._theta else {}


def update(context: Context) -> Moved:
    """w_i to return, theta_i to keep; the loss is that of theta_i's last steps."""
    fitted = context.fit(context.model, [replace(phase, rule=Envelope(**context.settings)) for phase in context.phases])
    return Moved(fitted.tensors, {**context.kept, **fitted.beside}, fitted.loss)


UPDATE = LocalUpdate(update, own_model, judge_own, together=True)
