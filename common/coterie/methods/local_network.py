"""`local_network`: every user trains its own network on its own rows; nothing is shared. "Local Only" of Collins et al. (2021)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from coterie.experiment.model import Sharing
from coterie.experiment.reveals import Reveal
from coterie.families.partial import LOCAL_UPDATE, JointTraining


class Config(JointTraining):
    """Hyper-parameters; `epochs` are those of one round, in which by default everyone takes part."""

    sharing: ClassVar[Sharing] = "none"
    own_sense: ClassVar[tuple[str, ...]] = ("participation", "users_per_round")  # nobody waits for what others train: not taken over

    name: Literal["local_network"] = "local_network"
    participation: Annotated[float, Field(gt=0, le=1)] = 1.0


REVEALS = (
    Reveal(
        "its mean training loss",
        "how well a model of its own fits each user",
        ("partial/start", "partial/shared", "partial/loss", "partial/delivery"),
    ),
    LOCAL_UPDATE[1],
)
