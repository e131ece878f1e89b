"""`fedprox`: Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith (2020), federated optimization in heterogeneous networks, Algorithm 2.

As in FedAvg there is one model for all users, but a local update stays close to the received model w^t:

    w_k^{t+1} ~ argmin_w h_k(w; w^t) = F_k(w) + mu/2 ||w - w^t||^2

Deviations: the inexact solver (gamma_k^t) is a fixed number of minibatch steps, as in the paper's experiments. Users are drawn uniformly
and weighted by rows; the paper draws them with probability p_k and averages plainly. The optimizer works on h_k. So momentum includes the
gradient mu (w - w^t) as well as F_k's; it ends with the update.
"""

from typing import Any, Literal

from pydantic import NonNegativeFloat

from coterie.experiment.method import ANY_MODEL
from coterie.families.partial import STEPS_AND_MEAN, JointTraining, LocalTraining


class Config(JointTraining):
    name: Literal["fedprox"] = "fedprox"
    mu: NonNegativeFloat = 0.1  #: Weight mu that keeps a local update near the received model. 0: FedAvg.

    def settings(self) -> dict[str, Any]:
        return {"mu": self.mu}


METHOD = LocalTraining(config=Config, models=ANY_MODEL, protects=STEPS_AND_MEAN, strengths=("mu",))
