"""Messages of the reference methods that solve for one model per group of users: `global`, `oracle` and, on envelopes, `squared`.

They stay in float64 in a float32 run, because Newton's method on sums of rounded gradients would stop at the rounding level.
"""

from coterie.experiment.method import Room
from coterie.experiment.reveals import Reveal
from coterie.wire.messages import Annotated, Array, Broadcast, Rows, Scalars, Vectors, declare


@declare(method="consensus", step="query")
class GroupModel(Rows):
    """The point at which a user's group is evaluated."""

    x: Annotated[Array, Vectors("rows", "d", exact=True)]


@declare(method="consensus", step="gradient", total=True)
class Slopes(Rows):
    """Value and gradient of a user's term at its group's point."""

    value: Annotated[Array, Scalars("rows")]
    gradient: Annotated[Array, Vectors("rows", "d", exact=True)]


@declare(method="consensus", step="hessian", total=True)
class Curvatures(Rows):
    """The upper triangle of the Hessian of a user's term, row by row: d(d+1)/2 scalars."""

    triangle: Annotated[Array, Scalars("rows", "h")]


@declare(method="consensus", step="model")
class AskModels(Rows):
    """Asks each user for its own model (4), given the common point y."""

    y: Annotated[Array, Vectors("rows", "d", exact=True)]


@declare(method="consensus", step="model")
class UserModels(Rows):
    """A user's own model."""

    x: Annotated[Array, Vectors("rows", "d", exact=True)]


@declare(method="consensus", step="model")
class AskLocalModels(Broadcast):
    """Asks each user for the minimizer of its own loss (2)."""


@declare(method="consensus", step="conjugate")
class AskConjugates(Rows):
    """Asks how far u.y rises above a user's loss f_i(y): for the conjugate f_i^*(u)."""

    u: Annotated[Array, Vectors("rows", "d", exact=True)]


@declare(method="consensus", step="conjugate")
class Conjugates(Rows):
    """The conjugate sup_y u.y - f_i(y), and 1; or 0 and 0 where no maximiser is found."""

    value: Annotated[Array, Scalars("rows")]
    found: Annotated[Array, Scalars("rows")]


# For methods that use these messages.
SOLVED = Reveal(
    "value, gradient and Hessian at given models",
    "for few rows (at most as many as features) the rows up to rotation, and more for one row",
    ("consensus/query", "consensus/gradient", "consensus/hessian"),
    summed="sums of value, gradient and Hessian at given models over the users of a group on one host",
)
PROVED = Reveal(
    "how far a given linear function rises above the loss",
    "one number about the loss, less than a value with its gradient",
    ("consensus/conjugate",),
    needs={"certificate": True},
)
OWN_MODEL = Reveal("the final model", "what a model says of its rows", ("consensus/model",))
ROOM = Room(
    steps={
        "query": "a cluster's model",
        "gradient": "value and gradient there",
        "hessian": "second derivatives there",
        "model": "models where users are on their own",
        "conjugate": "bounds that prove a solution",
    }
)
