"""`ditto`: Li, Hu, Beirami and Smith (2021), Ditto: fair and robust federated learning through personalization, Algorithm 1.

Users train the global model w as in FedAvg, and beside it one of their own, v_k, which they keep and judge by. With w^t as it was sent:

    w_k <- w_k - eta grad F_k(w_k),   from w^t, and returned;    v_k <- v_k - eta (grad F_k(v_k) + lambda (v_k - w^t))

Deviations: the server averages by rows by default, and returned are models, not their differences; both models see the same batches, in
equally many steps unless `personal_epochs` says otherwise. The pull is part of the gradient, and so of what momentum remembers, whose
memory begins anew in each update. Batch norm's running statistics of v_k are those that its own training gathers.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import NonNegativeFloat

from coterie.experiment.method import ANY_MODEL
from coterie.families.partial import Epochs, JointTraining, LocalTraining


class Config(JointTraining):
    """Hyper-parameters."""

    name: Literal["ditto"] = "ditto"
    penalty: NonNegativeFloat = 1.0  # lambda; 0: v_k are the models of local training
    personal_epochs: Epochs | None = None  # of v_k in an update (s of Algorithm 1); absent: as long as that of w_k

    def settings(self) -> dict[str, Any]:
        """How v_k is trained."""
        personal = self.phases() if self.personal_epochs is None else [self.phase("all", epochs=self.personal_epochs)]
        return {"penalty": self.penalty, "personal": personal}


METHOD = LocalTraining(config=Config, models=ANY_MODEL, is_personal=True)
