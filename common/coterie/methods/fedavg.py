"""`fedavg`: federated averaging (McMahan, Moore, Ramage, Hampson and Aguera y Arcas, 2017). One model for all users.

Its fine-tuned form, FedAvg+FT of Collins et al. (2021), is what users judge at the end beside it (`fine_tune`).
"""

from __future__ import annotations

from typing import ClassVar, Literal

from coterie.experiment.model import Sharing
from coterie.experiment.registry import ANY_MODEL, Kind
from coterie.families.partial import LOCAL_UPDATE, JointTraining


class Config(JointTraining):
    """Hyper-parameters."""

    models: ClassVar[frozenset[Kind]] = ANY_MODEL
    sharing: ClassVar[Sharing] = "all"

    name: Literal["fedavg"] = "fedavg"


REVEALS = LOCAL_UPDATE
