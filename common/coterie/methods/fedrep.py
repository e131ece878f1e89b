"""`fedrep`: Algorithm 1 of Collins, Hassani, Mokhtari and Shakkottai (2021).

Users share a representation phi and keep their heads h_i. In round t each of the r n drawn users makes tau updates of its head, from where
it was, with phi^t fixed. Then it updates the representation with the head fixed, and returns it; the server averages:

    h_i^{t,s} <- GRD(f_i(h_i^{t,s-1}, phi^t), h_i^{t,s-1}, alpha),  s = 1..tau;   phi_i^{t+1} <- GRD(f_i(h_i^{t,tau}, phi^t), phi^t, alpha)

In the experiments of section 5.2 both are epochs of SGD with momentum: ten for the head, then one (CIFAR) or five for the representation.
Algorithm 1 weights all users equally (`average: plain`). The default is by rows, since users may have very different numbers.
"""

from typing import Any, Literal, Self

from pydantic import PositiveInt, model_validator

from coterie.families.partial import STEPS_AND_MEAN, Epochs, LocalTraining, Optimizer, Training, Work


class Config(Training):
    WORK = ("head_epochs", "head_updates", "representation_epochs")

    name: Literal["fedrep"] = "fedrep"
    head_epochs: Epochs | None = None  #: Passes over a user's rows that train its head. 10 without `head_updates`.
    head_updates: PositiveInt | None = None  #: Batches that train the head, instead of `head_epochs`.
    head_optimizer: Optimizer | None = None  #: Optimizer of the head. Absent: that of the representation.
    representation_epochs: Epochs = 1  #: Passes over a user's rows that train the representation, after the head.
    #: Whether the inputs of the head are computed once in an update. It is faster, and takes memory for the features of a user's rows.
    cache_features: bool = True

    @model_validator(mode="after")
    def _one_of_epochs_and_updates(self) -> Self:
        if self.head_epochs is not None and self.head_updates is not None:
            raise ValueError("head_epochs and head_updates both say how long heads are trained: give one")
        return self

    def phases(self) -> list[dict[str, Any]]:
        """The head with the representation fixed, then the representation with the head fixed."""
        epochs = None if self.head_updates is not None else 10 if self.head_epochs is None else self.head_epochs
        return [
            self.phase("head", epochs=epochs, updates=self.head_updates, optimizer=self.head_optimizer, cache=self.cache_features),
            self.phase("representation", epochs=self.representation_epochs),
        ]

    def keys_for(self, work: Work) -> dict[str, Any] | None:
        """One pass for the representation and the others for the head, which gets at least one."""
        if work.batches or not float(work.passes).is_integer():
            return None
        return {"head_epochs": max(1, int(work.passes) - 1), "representation_epochs": 1}


METHOD = LocalTraining(config=Config, protects=STEPS_AND_MEAN, sharing="representation")
