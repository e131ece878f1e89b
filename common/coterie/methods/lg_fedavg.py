"""`lg_fedavg`: Liang, Liu, Ziyin, Salakhutdinov and Morency (2020), think locally, act globally.

Users keep their representations and share the head, the reverse of FedRep. A local update trains both at once.
"""

from typing import Literal

from coterie.families.partial import STEPS_AND_MEAN, JointTraining, LocalTraining


class Config(JointTraining):
    name: Literal["lg_fedavg"] = "lg_fedavg"


METHOD = LocalTraining(config=Config, protects=STEPS_AND_MEAN, sharing="head")
