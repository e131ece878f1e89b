"""What a method's own formulas say that its steps move. Of its own, since who reads a run database needs nothing else of methods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

# By step and direction, "up" or "down"; a scope behind them where the scopes of a run with aggregators have other counts.
Key = tuple[str, ...]
Counts = Mapping[Key, float]


class Expected(NamedTuple):
    """The closed form of what a step moves in one direction; None where there is no formula."""

    vectors: float | None = None
    spread: float = 0.0  # of the vectors, where these are a mean over random coins: their standard deviation, or a bound of it
    drawn: float | None = None  # the vectors that go with the coins which were drawn; None where `vectors` is no mean
    scalars: float | None = None  # of all fields of the step's messages, those of vectors too
