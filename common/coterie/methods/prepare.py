"""Before the first stage: constants of standardisation agreed on by sums, and what each user tells about its loss.

Rows never move: users send the sums and the sums of squares of their training rows, or three constants.
"""

from __future__ import annotations

from coterie.messages import Annotated, Array, Broadcast, Indices, Positions, Rows, Scalars, dataclass, declare


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
    """Asks every user to describe its loss."""


@declare(method="prepare", step="describe")
@dataclass(frozen=True)
class UserFacts(Rows):
    """A user's number of training rows, the dimension d of its model, smoothness L_i and strong convexity mu_i of its loss."""

    n_rows: Annotated[Indices, Positions("rows")]
    d: Annotated[Indices, Positions("rows")]
    smoothness: Annotated[Array, Scalars("rows")]
    strong_convexity: Annotated[Array, Scalars("rows")]
