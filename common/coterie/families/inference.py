"""What users send about the accuracy of a stage's models, with `inference: true`. The ledger books this apart, under "inference".

At its final model x, with s_r the prediction for row a_r, a user sends sums over its m rows:

    H = sum_r phi''(s_r) a_r a_r',   G = sum_r phi'(s_r)^2 a_r a_r',   g = sum_r phi'(s_r) a_r,

for least squares also the residual sum of squares, and m. They are sums whatever the reduction, and without the penalty, which the
coordinator knows. H and G make the classical and the robust covariance of an estimate. For least squares H, g and the residuals give X'X,
X'y and y'y, from which variance components are estimated. Everything travels in float64.
"""

from coterie.experiment.method import Room
from coterie.experiment.reveals import Reveal
from coterie.wire.messages import Annotated, Array, Indices, Positions, Rows, Scalars, Vectors, declare


@declare(method="inference", step="inference")
class FittedModels(Rows):
    """Each user's final model."""

    x: Annotated[Array, Vectors("rows", "d", exact=True)]


@declare(method="inference", step="inference")
class Moments(Rows):
    """A user's sums: the upper triangles of H and G, row by row, d(d+1)/2 scalars each, the vector g, and the number of rows."""

    hessian: Annotated[Array, Scalars("rows", "h")]
    outer: Annotated[Array, Scalars("rows", "h")]
    gradient: Annotated[Array, Vectors("rows", "d", exact=True)]
    residual: Annotated[Array, Scalars("rows", allows="nan")]  # the residual sum of squares, NaN unless the loss is least_squares
    n_rows: Annotated[Indices, Positions("rows")]


ROOM = Room(
    reveals=(
        Reveal(
            "at the final model Hessian and gradient of the loss, the sum of the outer products of the rows' gradients, the residual "
            "sum of squares, and the row count",
            "second moments of the rows; **of one row, the row itself up to sign**, and its residual",
            ("inference",),
            needs={"inference": True},
            kind="convex",
            title="standard errors (`inference: true`)",
        ),
    ),
    steps={"inference": "second moments for standard errors"},
)
