"""Before the first stage: users agree on constants by sums, and describe their losses.

No message carries rows. For standardisation users send the sum of each feature over their training rows and, once the common mean is known,
the norm of their deviations from it. These two numbers reveal the rows of a small user: all values of a single row, and of two rows both
values of each feature, though not which belong together. With m >= `FEW_ROWS` rows, each value may still be anywhere within sqrt(m-1)
deviations of the user's mean, unless the feature is coarse, such as a code of 0 and 1.

Missing cells are left out of the sums of their feature, and the number of present cells is sent too. Without standardisation, the sum of a
single cell reveals it. Targets are not summed. With two members, each can compute much of the other's sums from the common constants.
"""

from typing import Final

from coterie.experiment.method import Room
from coterie.experiment.reveals import Reveal
from coterie.wire.messages import Annotated, Array, Broadcast, Indices, Positions, Rows, Scalars, declare

FEW_ROWS: Final = 3  # 2 numbers per feature determine up to 2 rows
FEW_CELLS: Final = 2  # without standardisation, 1 number per feature determines 1 cell


@declare(method="prepare", step="standardize")
class AskSums(Broadcast):
    """Asks every user for the sums over its training rows, and, with a 1, for the number of present cells of each feature."""

    wants_counts: Annotated[Indices, Positions(1)]


@declare(method="prepare", step="standardize")
class UserSums(Rows):
    """A user's sum of each of p features over its training rows, without missing cells."""

    n_rows: Annotated[Indices, Positions("rows")]
    sums: Annotated[Array, Scalars("rows", "p")]


@declare(method="prepare", step="standardize")
class UserCounts(Rows):
    """The number of a user's training rows with a value of each of p features."""

    n_present: Annotated[Indices, Positions("rows", "p")]


@declare(method="prepare", step="standardize")
class AgreedMean(Broadcast):
    """The common mean of each feature, which fills missing cells. With a 1, it asks every user for its deviations from it."""

    mean: Annotated[Array, Scalars("p")]
    wants_deviations: Annotated[Indices, Positions(1)]


@declare(method="prepare", step="standardize")
class UserDeviations(Rows):
    """The Euclidean norm of a user's deviations from the common mean, for each of p features, without missing cells."""

    norms: Annotated[Array, Scalars("rows", "p")]


@declare(method="prepare", step="standardize")
class AgreedScale(Broadcast):
    """The common scale of each feature."""

    scale: Annotated[Array, Scalars("p")]


@declare(method="prepare", step="describe")
class AskFacts(Broadcast):
    """Asks every user to describe its loss, and, with a 1, to refuse one without a unique minimiser of its own."""

    wants_minimisers: Annotated[Indices, Positions(1)]


@declare(method="prepare", step="describe")
class UserFacts(Rows):
    """A user's number of training rows, which shows whose sums would reveal too much, and the dimension d of its model."""

    n_rows: Annotated[Indices, Positions("rows")]
    d: Annotated[Indices, Positions("rows")]


@declare(method="prepare", step="smoothness")
class AskSmoothness(Broadcast):
    """Asks every user for L_i. Only methods with such steps need it: see `Method.facts`."""


@declare(method="prepare", step="smoothness")
class UserSmoothness(Rows):
    """The smoothness L_i of a user's loss."""

    smoothness: Annotated[Array, Scalars("rows")]


@declare(method="prepare", step="convexity")
class AskConvexity(Broadcast):
    """Asks every user for mu_i, likewise."""


@declare(method="prepare", step="convexity")
class UserConvexity(Rows):
    """The strong convexity mu_i of a user's loss."""

    strong_convexity: Annotated[Array, Scalars("rows")]


@declare(method="prepare", step="describe")
class AskSizes(Broadcast):
    """Asks every user for its numbers of rows."""


@declare(method="prepare", step="describe")
class UserSizes(Rows):
    """A user's numbers of training and of held-out rows: the weights of averages."""

    n_rows: Annotated[Indices, Positions("rows")]
    n_test: Annotated[Indices, Positions("rows")]


_REVEALS = (
    Reveal(
        "at joining the names of its users and known clusters; of a table also name, kind and column of each feature",
        "who is in the data; **without `feature_columns` the names of all columns that are features, and of a category without declared "
        "levels the names of its levels**",
        (),
        title="joining (any method)",
    ),
    Reveal(
        "row count; of each feature its sum, and the norm of its deviations from the common mean",
        "means and variances of the user's features; of a user with **one row, the row itself**, of two rows both values of each feature "
        "(a warning says so)",
        ("prepare/standardize",),
        needs={"standardize": True},
        title="standardisation (any method)",
    ),
    Reveal(
        "of each feature the sum and the number of its cells that are there",
        "means of the user's features; **a cell that is the only one of its feature** (a warning says so)",
        ("prepare/standardize",),
        needs={"missing": frozenset({"mean", "indicator"})},
        title="filling of missing cells (any method)",
    ),
    Reveal("row counts", "how many rows a user has", ("prepare/describe",), title="preparation (any method)"),
    Reveal(
        "the smoothness constant of its loss",
        "the size of the features",
        ("prepare/smoothness",),
        needs={"smoothness": True},
        kind="convex",
        title="preparation (methods whose steps need it)",
    ),
    Reveal(
        "the convexity constant of its loss",
        "how far the features lie from a plane",
        ("prepare/convexity",),
        needs={"strong_convexity": True},
        kind="convex",
        title="preparation (methods whose steps need it)",
    ),
)
ROOM = Room(
    reveals=_REVEALS,
    steps={
        "standardize": "sums of features, and the constants",
        "describe": "row counts",
        "smoothness": "smoothness constants of the losses",
        "convexity": "convexity constants of the losses",
    },
)
