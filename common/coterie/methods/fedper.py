"""`fedper`: Arivazhagan, Aggarwal, Singh and Choudhary (2019), federated learning with personalization layers.

Users share the representation (the base layers) and keep their heads, as in FedRep, but a local update trains both at once.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from coterie.experiment.model import Sharing
from coterie.families.partial import LOCAL_UPDATE, JointTraining


class Config(JointTraining):
    """Hyper-parameters."""

    sharing: ClassVar[Sharing] = "representation"

    name: Literal["fedper"] = "fedper"


REVEALS = LOCAL_UPDATE
