"""The graph of convex clustering: which users are tied to each other, and how strongly."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from coterie.experiment.settings import FilePath, Settings
from coterie.families.consensus import OWN_MODEL


class Neighbours(Settings):
    """Each user is tied to those with the nearest local models."""

    neighbours: PositiveInt  #: Ties of a user: to so many others with the nearest local models. A spanning tree connects the parts.
    phi: NonNegativeFloat = 2.0  #: How fast weights fall: exp(-phi |x_i - x_j|^2 / median), with the median over the tied pairs.


class Pairs(Settings):
    """Ties that are known."""

    #: Tied users and weights, such as [[u0, u1, 2.5], [u1, u2, 1]].
    pairs: Annotated[tuple[tuple[str, str, PositiveFloat], ...], Field(min_length=1)]


class File(Settings):
    """Ties in a file of the coordinator."""

    #: CSV without a header: a line for each pair, two users and a weight. Relative to where the coordinator runs, also with `--data`.
    file: FilePath


Graph = Literal["complete"] | Neighbours | Pairs | File

ALL_PAIRS = "all pairs of users are tied, with weight 1, so no ties are drawn"


def said(graph: Graph) -> str:
    """Which users are tied, as a sentence without a stop."""
    if isinstance(graph, Neighbours):
        return f"each user is tied to the {graph.neighbours:,} with the nearest local models, and a tree connects the parts"
    return ALL_PAIRS if graph == "complete" else "the ties and their weights are given by the experiment"


# What users say for a graph of neighbours.
OWN_MODELS = replace(OWN_MODEL, up="the model of its own rows alone", needs={"graph": Neighbours})


@dataclass(frozen=True)
class Extent:
    """What the constants and counts of a method need to know of a graph."""

    n: int  # users
    n_pairs: int  # unordered
    degree: float  # the mean over the users of the sum of their ties' weights
    is_complete: bool  # all pairs, with weight 1

    @staticmethod
    def complete(n: int) -> Extent:
        """All pairs of n users."""
        return Extent(n, n * (n - 1) // 2, float(n - 1), is_complete=True)

    @property
    def duals(self) -> int:
        """Ordered pairs: N(N-1) of a complete graph."""
        return 2 * self.n_pairs

    @property
    def blocks(self) -> int:
        """Users and ordered pairs: N^2 of a complete graph."""
        return self.n + self.duals
