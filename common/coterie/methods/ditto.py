"""`ditto`: Li, Hu, Beirami and Smith (2021), Ditto: fair and robust federated learning through personalization, Algorithm 1.

Users train the global model w as in FedAvg. Beside it they train, keep and evaluate a model v_k of their own. With w^t as received:

    w_k <- w_k - eta grad F_k(w_k),   from w^t, and returned;    v_k <- v_k - eta (grad F_k(v_k) + lambda (v_k - w^t))

Deviations: the server averages by rows by default, and users return models instead of differences. Both models see the same batches, in
equally many steps unless `personal_epochs` says otherwise. Momentum includes the pull, which is part of the gradient, and starts anew in
each update. Batch norm's running statistics of v_k come from its own training.
"""

import math
from typing import Any, Literal

from pydantic import NonNegativeFloat

from coterie.experiment.method import ANY_MODEL
from coterie.families.partial import STEPS_AND_MEAN, Epochs, JointTraining, LocalTraining, Work


class Config(JointTraining):
    WORK = ("epochs", "updates", "personal_epochs")

    name: Literal["ditto"] = "ditto"
    penalty: NonNegativeFloat = 1.0  #: Weight lambda that pulls a personal model to the global one. 0: local training.
    #: Passes over a user's rows for its personal model in an update. Absent: as long as that of the global model.
    personal_epochs: Epochs | None = None

    def own_phases(self) -> list[dict[str, Any]]:
        return self.phases() if self.personal_epochs is None else [self.phase("all", epochs=self.personal_epochs)]

    def keys_for(self, work: Work) -> dict[str, Any] | None:
        """Half for each model; of an odd number of passes the global one has one more. Each has at least one."""
        if super().keys_for(work) is None:
            return None
        if work.batches:
            return {"updates": math.ceil(work.batches / 2)}
        return {"epochs": math.ceil(work.passes / 2), "personal_epochs": max(1, int(work.passes) // 2)}

    def settings(self) -> dict[str, Any]:
        return {"penalty": self.penalty, "personal": self.own_phases()}


METHOD = LocalTraining(config=Config, models=ANY_MODEL, is_personal=True, protects=STEPS_AND_MEAN, strengths=("penalty",))
