"""`scaffold`: Karimireddy, Kale, Mohri, Reddi, Stich and Suresh (2020), stochastic controlled averaging, Algorithm 1.

Local steps follow g_i(y) - c_i + c, where the control variates c_i and c estimate the gradients of the user and of all. After K steps a
user's control variate is c_i - c + (x - y) / (K eta_l), option II of line 12; option I (the gradient at x) is not implemented. Control
variates start at zero. A user's own is its private state. The server's is sent with the model, so the traffic is twice that of FedAvg.

Deviations: K follows from the user's `epochs` or `updates`, so users with more rows may take more steps. Weight decay is part of the
gradient. Running statistics of batch norm and counts have no control variates (0 is sent for the former), and are averaged.
"""

from typing import Literal, Self

from pydantic import PositiveFloat, model_validator

from coterie.experiment.method import ANY_MODEL
from coterie.experiment.reveals import Reveal
from coterie.families.partial import LOCAL_UPDATE, JointTraining, LocalTraining, PlainSgd, Single
from coterie.wire.messages import Annotated, Rows, Weights, declare


class Config(JointTraining):
    name: Literal["scaffold"] = "scaffold"
    optimizer: PlainSgd = PlainSgd()  #: Optimizer of the local steps: sgd without momentum.
    server_lr: PositiveFloat = 1.0  #: Step size eta_g of the server. 1 takes the users' mean.
    #: Weights of users in the average. plain: equal, as in print, and as control variates are averaged. rows: by their numbers of rows.
    average: Literal["rows", "plain"] = "plain"

    @model_validator(mode="after")
    def _has_plain_steps(self) -> Self:
        if self.optimizer.name != "sgd" or self.optimizer.momentum:
            found = (
                f"{self.optimizer.name} with momentum {self.optimizer.momentum:g}" if self.optimizer.name == "sgd" else self.optimizer.name
            )
            raise ValueError(f"optimizer is {found}, but control variates are made from steps of plain sgd: want sgd with momentum 0")
        return self


@declare(method="scaffold", step="variate")
class Variate(Rows):
    """The server's control variate c, for the users of this round: Algorithm 1, line 4."""

    weights: Annotated[Single, Weights("shared")]


@declare(method="scaffold", step="variate")
class VariateMove(Rows):
    """A user returns the change of its own control variate: line 13, "communicate (Delta y_i, Delta c_i)"."""

    weights: Annotated[Single, Weights("rows", "shared")]


METHOD = LocalTraining(
    config=Config,
    continues="the server's control variate is the mean of those of users, which are never sent",
    models=ANY_MODEL,
    sums=frozenset(),
    steps={"variate": "control variates: that of the server, and how far those of the users drawn have moved"},
    reveals=(
        *LOCAL_UPDATE,
        Reveal("beside them, how far its control variate has moved", "the mean gradient of the user's round", ("scaffold/variate",)),
    ),
)
