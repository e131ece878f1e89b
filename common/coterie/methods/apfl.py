"""`apfl`: Deng, Kamani and Mahdavi (2020), adaptive personalized federated learning, Algorithm 1.

Users train the global model w as in FedAvg, and beside it v_i, which they keep; they judge the mix alpha_i v_i + (1 - alpha_i) w. In each
local step, with the gradients of f_i on one batch:

    w_i <- w_i - eta grad f_i(w_i);   v_i <- v_i - eta alpha_i grad f_i(alpha_i v_i + (1 - alpha_i) w_i)

and, where alpha is adaptive, alpha_i <- alpha_i - eta <v_i - w_i, grad f_i(alpha_i v_i + (1 - alpha_i) w_i)>, equation (10).

Deviations: alpha_i stays within [0, 1], which (10) does not see to; a user's mix is with the global w as it was sent last, the one that
the paper's guarantees are about; averages are by rows by default. Momentum, where there is any, is w's and v's own. Running statistics of
batch norm are not mixed: the mix has its own, gathered where its gradients are taken.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from coterie.experiment.method import ANY_MODEL
from coterie.families.partial import JointTraining, LocalTraining


class Config(JointTraining):
    """Hyper-parameters."""

    name: Literal["apfl"] = "apfl"
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.5  # alpha_i, at first where it is adaptive; 0: the global model, 1: local training
    adaptive: bool = False

    def settings(self) -> dict[str, Any]:
        """How the mix begins, and whether it stays."""
        return {"alpha": self.alpha, "adaptive": self.adaptive}


METHOD = LocalTraining(config=Config, models=ANY_MODEL, is_personal=True)
