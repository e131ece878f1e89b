"""`per_fedavg`: Fallah, Mokhtari and Ozdaglar (2020), personalized federated learning with theoretical guarantees: a model-agnostic
meta-learning approach, Algorithm 1.

All users share one model w, from which each gets its own by a gradient step: they minimise the mean of F_i(w) = f_i(w - alpha grad f_i(w)).
A local step takes independent batches D, D' and D'' of the user's rows,

    w~ = w - alpha grad f_i(w; D);   w <- w - beta (I - alpha H_i(w; D'')) grad f_i(w~; D')

where `fo` drops the Hessian H_i, and `hf` computes its product with the gradient g from gradients, section 5: (grad f_i(w + delta g; D'') -
grad f_i(w - delta g; D'')) / (2 delta). beta is `optimizer.lr`. Users evaluate w after `adaptation_epochs` or `adaptation_updates` of such
steps on their own rows, and keep it at the end; fine-tuning starts there.

Deviations: D' goes through the rows in epochs, as in the other methods, and D and D'' each in their own order. Momentum, if any, is that of
w's steps. Averages are weighted by rows by default. Algorithm 1's exact product with the Hessian is not offered.
"""

from typing import Any, Literal, Self

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from coterie.families.partial import Epochs, JointTraining, LocalTraining, Optimizer


class Config(JointTraining):
    name: Literal["per_fedavg"] = "per_fedavg"
    alpha: NonNegativeFloat = 0.01  #: Length of the step by which a user adapts the shared model. 0: FedAvg.
    hessian: Literal["fo", "hf"] = "fo"  #: fo: the Hessian is left out. hf: its product with a vector comes from two more gradients.
    delta: PositiveFloat = 1e-3  #: Length of the difference that `hf` takes.
    #: Passes over a user's rows that adapt the model before it is evaluated. 1 without `adaptation_updates`.
    adaptation_epochs: Epochs | None = None
    adaptation_updates: PositiveInt | None = None  #: Batches that adapt the model, instead of `adaptation_epochs`. The paper takes 1.

    @model_validator(mode="after")
    def _one_of_adaptation_epochs_and_updates(self) -> Self:
        if self.adaptation_epochs is not None and self.adaptation_updates is not None:
            raise ValueError("adaptation_epochs and adaptation_updates both say how users adapt the model: give one")
        return self

    @property
    def gradients(self) -> int:
        """The inner and the outer one; with `hf` also two for the product with the Hessian."""
        return 4 if self.hessian == "hf" else 2

    def settings(self) -> dict[str, Any]:
        """The inner step, the treatment of the Hessian, and how users adapt the model before they evaluate it."""
        epochs = None if self.adaptation_updates is not None else 1 if self.adaptation_epochs is None else self.adaptation_epochs
        plain = self.phase("all", epochs=epochs, updates=self.adaptation_updates, optimizer=Optimizer(momentum=0.0), lr=self.alpha)
        rule = {"rate": self.alpha, "hessian": self.hessian, "delta": self.delta}
        return {"rule": rule, "adaptation": [plain] if self.alpha else []}


METHOD = LocalTraining(config=Config, is_personal=True, strengths=("alpha",))
