"""`ifca`: Ghosh, Chung, Yin and Ramchandran (2020), an efficient framework for clustered federated learning, Algorithm 1 (model averaging).

The server keeps K models theta_j. It sends all of them to the users of a round, each of which takes the one that fits its rows best,

    j_i = argmin_j F_i(theta_j),   theta~_i: local steps from theta_j_i,   theta_j <- mean of the theta~_i with j_i = j

trains it and returns it with j_i. A model that nobody has taken stays. Down go K models, up goes one. At the end, and where models are
judged, each user takes its best of the K by its training rows, and fine-tuning starts there. K = 1 is FedAvg.

The models start from K seeds; the first is that of the other methods. Deviations: F_i is the mean loss over all training rows, with the
model in evaluation mode; means are by rows by default; momentum, where there is any, begins anew each round. Of equal losses the first
model is taken. Representations that all clusters share (section 4's experiments) are not built.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from coterie.experiment.method import ANY_MODEL
from coterie.experiment.reveals import Reveal
from coterie.families.partial import LOCAL_UPDATE, JointTraining, LocalTraining
from coterie.wire.messages import Indices, Positions, Rows, dataclass, declare


class Config(JointTraining):
    """Hyper-parameters."""

    name: Literal["ifca"] = "ifca"
    clusters: Annotated[int, Field(ge=1, le=1000)] = 2  # K
    batch_norm: Literal["shared"] = "shared"  # statistics are those of a model, and users change models

    def client_options(self) -> dict[str, Any]:
        """With how many models there are."""
        return {**super().client_options(), "n_models": self.clusters}


@declare(method="ifca", step="shared")
@dataclass(frozen=True)
class Chosen(Rows):
    """The number of the model that fits a user best: the cluster identity."""

    model: Annotated[Indices, Positions("rows")]


METHOD = LocalTraining(
    config=Config,
    models=ANY_MODEL,
    is_personal=True,
    reveals=(
        *LOCAL_UPDATE,
        Reveal(
            "beside them, the number of the model that fits best, each round and at the end", "who has data like whose", ("ifca/shared",)
        ),
    ),
)
