"""`lg_fedavg`: Liang, Liu, Ziyin, Salakhutdinov and Morency (2020), think locally, act globally.

Users keep their representations and share the head: FedRep the other way round. A local update trains both at once.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from coterie.experiment.model import Sharing
from coterie.families.partial import LOCAL_UPDATE, JointTraining


class Config(JointTraining):
    """Hyper-parameters."""

    sharing: ClassVar[Sharing] = "head"

    name: Literal["lg_fedavg"] = "lg_fedavg"


REVEALS = LOCAL_UPDATE
