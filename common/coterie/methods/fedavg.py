"""`fedavg`: federated averaging (McMahan, Moore, Ramage, Hampson and Aguera y Arcas, 2017). One model for all users.

With `fine_tune`, users at the end also evaluate FedAvg+FT of Collins et al. (2021).
"""

from typing import Literal

from coterie.experiment.method import ANY_MODEL
from coterie.families.partial import STEPS_AND_MEAN, JointTraining, LocalTraining


class Config(JointTraining):
    name: Literal["fedavg"] = "fedavg"


METHOD = LocalTraining(config=Config, models=ANY_MODEL, protects=STEPS_AND_MEAN)
