"""`local_network`: every user trains its own network on its own rows; nothing is shared. "Local Only" of Collins et al. (2021)."""

from typing import Annotated, Literal

from pydantic import Field

from coterie.experiment.reveals import Reveal
from coterie.families.partial import LOCAL_UPDATE, JointTraining, LocalTraining


class Config(JointTraining):
    """Hyper-parameters; `epochs` are those of one round, in which by default all users take part."""

    name: Literal["local_network"] = "local_network"
    participation: Annotated[float, Field(gt=0, le=1)] = 1.0  #: Share of the users that train in a round.


METHOD = LocalTraining(
    config=Config,
    sharing="none",
    sums=frozenset(),
    reveals=(
        Reveal(
            "its mean training loss",
            "how well a model of its own fits each user",
            ("partial/start", "partial/shared", "partial/loss", "partial/delivery"),
        ),
        LOCAL_UPDATE[1],
    ),
    own_sense=("participation", "users_per_round"),  # users do not depend on each other, so these are not copied
)
