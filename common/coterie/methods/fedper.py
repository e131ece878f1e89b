"""`fedper`: Arivazhagan, Aggarwal, Singh and Choudhary (2019), federated learning with personalization layers.

Users share the representation (the base layers) and keep their heads as in FedRep, but a local update trains both at once.
"""

from typing import Literal

from coterie.families.partial import STEPS_AND_MEAN, JointTraining, LocalTraining


class Config(JointTraining):
    name: Literal["fedper"] = "fedper"


METHOD = LocalTraining(config=Config, protects=STEPS_AND_MEAN, sharing="representation")
