"""`fedavg`: federated averaging (McMahan, Moore, Ramage, Hampson and Aguera y Arcas, 2017). One model for all users.

Its fine-tuned form, FedAvg+FT of Collins et al. (2021), is what users judge at the end beside it (`fine_tune`).
"""

from __future__ import annotations

from typing import Literal

from coterie.experiment.method import ANY_MODEL
from coterie.families.partial import JointTraining, LocalTraining


class Config(JointTraining):
    """Hyper-parameters."""

    name: Literal["fedavg"] = "fedavg"


METHOD = LocalTraining(config=Config, models=ANY_MODEL)
