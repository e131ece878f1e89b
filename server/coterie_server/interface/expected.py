"""Closed forms of traffic. They are a module of their own, since a reader of a run database needs nothing else of methods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

# Step and direction, "up" or "down", and a scope where the scopes of a run with aggregators have different counts.
Key = tuple[str, ...]
Counts = Mapping[Key, float]


class Expected(NamedTuple):
    """The closed form of a step's traffic in one direction; None where there is no formula."""

    vectors: float | None = None
    spread: float = 0.0  # where the vectors are a mean over random coins: their standard deviation, or a bound of it
    drawn: float | None = None  # the vectors for the coins that were drawn; None where `vectors` is no mean
    scalars: float | None = None  # of all fields of the step's messages, vectors included
