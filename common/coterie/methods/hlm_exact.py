"""`hlm_exact`: the minimiser of (2.1) for quadratic losses, in one round and in closed form: the reference for iterative methods.

Lyu, Hanzely and Kolar (2022). With gamma_i = 1/sigma_j^2 and lambda_j = 1/sigma_bar^2 it is the estimator of Theorem 5.1. Each user sends
A_i and b_i of its loss theta'A_i theta/2 - b_i'theta + const, d(d+3)/2 numbers. For least squares with reduction "sum", without l2 and
intercept, they are X'X and X'y. They do not hide rows: A_i reveals the space that they span, and of a single row all but its sign.
"""

from typing import Literal

from coterie.experiment.method import Method
from coterie.experiment.reveals import Reveal
from coterie.families.grid import Grid
from coterie.families.known_clusters import Weights
from coterie.wire.messages import Annotated, Array, Broadcast, Rows, Scalars, Vectors, declare

LOSSES = ("least_squares", "squared_distance")  # those with a constant Hessian


class Config(Weights, Grid):
    name: Literal["hlm_exact"] = "hlm_exact"


@declare(method="hlm_exact", step="statistics")
class AskStatistics(Broadcast):
    """Asks each user for its statistics."""


@declare(method="hlm_exact", step="statistics")
class Statistics(Rows):
    """A_i, the upper triangle row by row, d(d+1)/2 scalars, and b_i. They stay in float64 in a float32 run, since the result is exact."""

    triangle: Annotated[Array, Scalars("rows", "h")]
    slope: Annotated[Array, Vectors("rows", "d", exact=True)]


@declare(method="hlm_exact", step="models", whole=True)
class Models(Rows):
    """theta_i, to its user."""

    theta: Annotated[Array, Vectors("rows", "d")]


METHOD = Method(
    config=Config,
    users_need_minimisers=False,
    has_known_clusters=True,
    protects=frozenset({"row"}),
    noises_sums=True,
    unprotected="its server makes the model of each user from the sums of that user alone, and noise on a total would not be in them",
    intervals=lambda _: "nested",
    steps={"statistics": "sums of squares and products", "models": "final models"},
    reveals=(
        Reveal("X'X and X'y, d(d+3)/2 scalars", "second moments of the rows; **of one row, the row itself up to sign**", ("hlm_exact",)),
    ),
)
