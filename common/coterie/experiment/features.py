"""Features: name, kind, and the column of the table. A run's schema is the list of its features."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

# number: unchanged. boolean: 0 or 1. date: days since 1970-01-01. category: 1 if the column has one level, else 0. indicator: 1 if the
# column's cell is missing. term: of a formula.
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


def column_of(feature: Feature) -> str:
    """The column that a feature comes from."""
    return feature.column or feature.name


_COLUMNS = ("user_column", "cluster_column", "target_column", "feature_columns", "columns")  # keys of `data` that name columns
_NAME = re.compile(r"`([^`]+)`|([^\W\d]\w*)")  # in a formula


def named_columns(data: object) -> frozenset[str]:
    """The columns that the experiment's `data` section names. Both sides know them, so messages between them may name them."""
    named: set[str] = set()
    for key in _COLUMNS:
        value = getattr(data, key, None)
        named.update(() if value is None else (value,) if isinstance(value, str) else value)
    for quoted, plain in _NAME.findall(getattr(data, "formula", None) or ""):
        named.add(quoted or plain)
    return frozenset(named)


MAX_LISTED: Final = 20


def listed(features: Sequence[Feature], most: int = MAX_LISTED) -> list[str]:
    """The features for a person: one line where all are plain numbers, else a line for each column; bounded, whatever their number."""
    more = f"... and {len(features) - most:,} more" if len(features) > most else ""
    shown = features[:most]
    head = f"features ({len(features):,})"
    if all(feature.kind == "number" and column_of(feature) == feature.name for feature in features):
        return [f"{head}: {', '.join([*(feature.name for feature in shown), *([more] if more else [])])}"]
    width = max(len(feature.name) for feature in shown)
    sources = (f" from column {feature.column}" if feature.column not in ("", feature.name) else "" for feature in shown)
    lines = [f"  {feature.name:<{width}}  {feature.kind}{source}" for feature, source in zip(shown, sources, strict=True)]
    return [f"{head}:", *lines, *([f"  {more}"] if more else [])]


def in_a_line(features: Sequence[Feature], most: int = MAX_LISTED) -> str:
    """The names, each with its kind where that is another than number: "ses, seen (date), sex=f (category)"; bounded."""
    shown = [feature.name if feature.kind == "number" else f"{feature.name} ({feature.kind})" for feature in features[:most]]
    return ", ".join([*shown, *([f"... and {len(features) - most:,} more"] if len(features) > most else [])])


def to_plain(features: Iterable[Feature]) -> list[list[str]]:
    """For JSON: [name, kind, column] each, the column "" where it has the name of the feature."""
    return [[feature.name, feature.kind, feature.column] for feature in features]


def from_plain(plain: Iterable[Sequence[str]]) -> tuple[Feature, ...]:
    """The features that `to_plain` wrote down."""
    return tuple(Feature(name, kind, column) for name, kind, column in plain)  # type: ignore[arg-type]
