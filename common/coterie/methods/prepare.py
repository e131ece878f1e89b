"""Before the first stage: constants of standardisation agreed on by sums, and what each user tells about its loss.

No message carries rows. For standardisation users send the sums and the sums of squares of their training rows, feature by feature, and
these do give the rows of a small user away: of one row all values, of two rows both values of each feature, though not which belong
together. From `FEW_ROWS` rows on, m, the sums leave each value free within sqrt(m-1) deviations of the user's mean, unless the feature is
coarse, such as a code of 0 and 1. Targets are not summed. Of two members each knows much of the other's sums from the common constants.
"""

from __future__ import annotations

from typing import Final

from coterie.messages import Annotated, Array, Broadcast, Indices, Positions, Rows, Scalars, dataclass, declare

FEW_ROWS: Final = 3  # 2 numbers per feature determine up to 2 rows


@declare(method="prepare", step="standardize")
@dataclass(frozen=True)
class AskMoments(Broadcast):
    """Asks every user for the sums over its training rows."""


@declare(method="prepare", step="standardize")
@dataclass(frozen=True)
class UserMoments(Rows):
    """A user's sums, over its training rows, of each of p features and of its square."""

    n_rows: Annotated[Indices, Positions("rows")]
    sums: Annotated[Array, Scalars("rows", "p")]
    sums_of_squares: Annotated[Array, Scalars("rows", "p")]


@declare(method="prepare", step="standardize")
@dataclass(frozen=True)
class Constants(Broadcast):
    """The common mean and scale of each feature."""

    mean: Annotated[Array, Scalars("p")]
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
