"""`ifca`: Ghosh, Chung, Yin and Ramchandran (2020), an efficient framework for clustered federated learning, Algorithm 1 (model averaging).

The server keeps K models theta_j, and sends all of them to the users of a round. Each user takes the one that fits its rows best,

    j_i = argmin_j F_i(theta_j),   theta~_i: local steps from theta_j_i,   theta_j <- mean of the theta~_i with j_i = j

trains it and returns it with j_i. A model that no user took is unchanged. Users receive K models and return one. At the end, and for each
evaluation, each user takes its best of the K by its training rows, and fine-tuning starts there. K = 1 is FedAvg.

The models start from K seeds; the first is that of the other methods. Deviations: F_i is the mean loss over all training rows, with the
model in evaluation mode. Means are weighted by rows by default. Momentum, if any, starts anew each round. Ties go to the first model.
Representations shared by all clusters (section 4's experiments) are not implemented.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from coterie.experiment.method import ANY_MODEL
from coterie.experiment.reveals import Reveal
from coterie.families.partial import LOCAL_UPDATE, JointTraining, LocalTraining
from coterie.wire.messages import Indices, Positions, Rows, declare


class Config(JointTraining):
    name: Literal["ifca"] = "ifca"
    #: Number K of models. Each user receives all of them, so traffic to users grows with it.
    clusters: Annotated[int, Field(ge=1, le=1000)] = 2
    batch_norm: Literal["shared"] = "shared"  #: Running statistics of batch norm belong to a model, and users change models.

    def client_options(self) -> dict[str, Any]:
        return {**super().client_options(), "n_models": self.clusters}


@declare(method="ifca", step="shared")
class Chosen(Rows):
    """The number of the best model for a user: the cluster identity."""

    model: Annotated[Indices, Positions("rows")]


METHOD = LocalTraining(
    config=Config,
    models=ANY_MODEL,
    sums=frozenset(),
    is_personal=True,
    strengths=("clusters",),
    reveals=(
        *LOCAL_UPDATE,
        Reveal(
            "beside them, the number of the model that fits best, each round and at the end", "who has data like whose", ("ifca/shared",)
        ),
    ),
)
