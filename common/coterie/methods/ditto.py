"""`ditto`: Li, Hu, Beirami and Smith (2021), Ditto: fair and robust federated learning through personalization, Algorithm 1.

Users train the global model w as in FedAvg. Beside it they train, keep and evaluate a model v_k of their own. With w^t as received:

    w_k <- w_k - eta grad F_k(w_k),   from w^t, and returned;    v_k <- v_k - eta (grad F_k(v_k) + lambda (v_k - w^t))

Deviations: the server averages by rows by default, and users return models instead of differences. Both models see the same batches, in
equally many steps unless `personal_epochs` says otherwise. Momentum includes the pull, which is part of the gradient, and starts anew in
each update. Batch norm's running statistics of v_k come from its own training.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import NonNegativeFloat

from coterie.experiment.method import ANY_MODEL
from coterie.families.partial import Epochs, JointTraining, LocalTraining


class Config(JointTraining):
    name: Literal["ditto"] = "ditto"
    penalty: NonNegativeFloat = 1.0  # lambda; 0: v_k are the models of local training
    personal_epochs: Epochs | None = None  # of v_k in an update (s of Algorithm 1); absent: as long as that of w_k

    def settings(self) -> dict[str, Any]:
        personal = self.phases() if self.personal_epochs is None else [self.phase("all", epochs=self.personal_epochs)]
        return {"penalty": self.penalty, "personal": personal}


METHOD = LocalTraining(config=Config, models=ANY_MODEL, is_personal=True)
