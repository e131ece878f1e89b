"""Before the first stage: constants that users agree on by sums, and what each user tells about its loss.

No message carries rows. For standardisation users send the sums of their training rows, feature by feature, and, once the common mean is
known, the norm of their deviations from it. These two numbers do give the rows of a small user away: of one row all values, of two rows
both values of each feature, though not which belong together. From `FEW_ROWS` rows on, m, they leave each value free within sqrt(m-1)
deviations of the user's mean, unless the feature is coarse, such as a code of 0 and 1. Where cells are missing, only the cells that are
there count, feature by feature, and how many there are is sent too; without standardisation the sum alone gives a single cell away.
Targets are not summed. Of two members each knows much of the other's sums from the common constants.
"""

from __future__ import annotations

from typing import Final

from coterie.experiment.method import Room
from coterie.experiment.reveals import Reveal
from coterie.wire.messages import Annotated, Array, Broadcast, Indices, Positions, Rows, Scalars, dataclass, declare

FEW_ROWS: Final = 3  # 2 numbers per feature determine up to 2 rows
FEW_CELLS: Final = 2  # 1 number per feature, where missing cells are filled and nothing is standardised, determines 1


@declare(method="prepare", step="standardize")
@dataclass(frozen=True)
class AskSums(Broadcast):
    """Asks every user for the sums over its training rows, and, with a 1, how many cells of each feature are not missing."""

    wants_counts: Annotated[Indices, Positions(1)]


@declare(method="prepare", step="standardize")
@dataclass(frozen=True)
class UserSums(Rows):
    """A user's sums of each of p features over its training rows, missing cells left out."""

    n_rows: Annotated[Indices, Positions("rows")]
    sums: Annotated[Array, Scalars("rows", "p")]


@declare(method="prepare", step="standardize")
@dataclass(frozen=True)
class UserCounts(Rows):
    """How many of a user's training rows have a value of each of p features."""

    n_present: Annotated[Indices, Positions("rows", "p")]


@declare(method="prepare", step="standardize")
@dataclass(frozen=True)
class AgreedMean(Broadcast):
    """The common mean of each feature, which fills missing cells. With a 1 every user is asked for its deviations from it."""

    mean: Annotated[Array, Scalars("p")]
    wants_deviations: Annotated[Indices, Positions(1)]


@declare(method="prepare", step="standardize")
@dataclass(frozen=True)
class UserDeviations(Rows):
    """The Euclidean norm of a user's deviations from the common mean, for each of p features, missing cells left out."""

    norms: Annotated[Array, Scalars("rows", "p")]


@declare(method="prepare", step="standardize")
@dataclass(frozen=True)
class AgreedScale(Broadcast):
    """The common scale of each feature."""

    scale: Annotated[Array, Scalars("p")]


@declare(method="prepare", step="describe")
@dataclass(frozen=True)
class AskFacts(Broadcast):
    """Asks every user to describe its loss, and, with a 1, to refuse one without a unique minimiser of its own."""

    wants_minimisers: Annotated[Indices, Positions(1)]


@declare(method="prepare", step="describe")
@dataclass(frozen=True)
class UserFacts(Rows):
    """A user's number of training rows, the dimension d of its model, smoothness L_i and strong convexity mu_i of its loss.

    Default steps need d and L_i alone. The number of rows says whose sums would tell too much, and mu_i how fast a method can be.
    """

    n_rows: Annotated[Indices, Positions("rows")]
    d: Annotated[Indices, Positions("rows")]
    smoothness: Annotated[Array, Scalars("rows")]
    strong_convexity: Annotated[Array, Scalars("rows")]


@declare(method="prepare", step="describe")
@dataclass(frozen=True)
class AskSizes(Broadcast):
    """Asks every user how many rows it has."""


@declare(method="prepare", step="describe")
@dataclass(frozen=True)
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
    Reveal(
        "row counts, smoothness and convexity constants",
        "the size of the features",
        ("prepare/describe",),
        kind="convex",
        title="preparation (any convex method)",
    ),
    Reveal("row counts", "how many rows a user has", ("prepare/describe",), kind="network", title="preparation (any network)"),
)
ROOM = Room(reveals=_REVEALS)
