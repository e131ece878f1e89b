"""`apfl`: Deng, Kamani and Mahdavi (2020), adaptive personalized federated learning, Algorithm 1.

Users train the global model w as in FedAvg. Beside it they train and keep v_i, and evaluate the mix alpha_i v_i + (1 - alpha_i) w. Each
local step uses the gradients of f_i on one batch:

    w_i <- w_i - eta grad f_i(w_i);   v_i <- v_i - eta alpha_i grad f_i(alpha_i v_i + (1 - alpha_i) w_i)

and, if alpha is adaptive, alpha_i <- alpha_i - eta <v_i - w_i, grad f_i(alpha_i v_i + (1 - alpha_i) w_i)>, equation (10).

Deviations: alpha_i is clipped to [0, 1], which (10) does not ensure. A user's mix is with the last received global w, as in the paper's
guarantees. Averages are weighted by rows by default. Momentum, if any, is separate for w and v. Running statistics of batch norm are not
mixed: the mix has its own, collected where its gradients are taken.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from coterie.experiment.method import ANY_MODEL
from coterie.families.partial import JointTraining, LocalTraining


class Config(JointTraining):
    name: Literal["apfl"] = "apfl"
    #: Share alpha_i of the user's own model in its mix, at the start if it is adaptive. 0: the global model. 1: local training.
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.5
    adaptive: bool = False  #: Whether users learn their alpha_i by gradient steps.

    @property
    def gradients(self) -> int:
        """One for w, and one for v_i."""
        return 2

    def settings(self) -> dict[str, Any]:
        return {"alpha": self.alpha, "adaptive": self.adaptive}


METHOD = LocalTraining(config=Config, models=ANY_MODEL, is_personal=True, strengths=("alpha",))
