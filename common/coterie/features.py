"""What a feature is: its name, its kind, and the column of the table that it comes from. The schema of a run is the list of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, get_args

# number: as it stands. boolean: 0 or 1. date: days since 1970-01-01. category: 1 where the column has one level, else 0.
# indicator: 1 where the column's cell is missing. term: of a formula.
Kind = Literal["number", "boolean", "date", "category", "indicator", "term"]
KINDS: Final = frozenset(get_args(Kind))


@dataclass(frozen=True)
class Feature:
    """One of the p numbers of a row."""

    name: str
    kind: Kind = "number"
    column: str = ""  # of the table; "": that of the same name


def numbers(names: Iterable[str]) -> tuple[Feature, ...]:
    """Features that are columns of numbers."""
    return tuple(Feature(name) for name in names)
