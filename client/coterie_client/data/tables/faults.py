"""Errors for bad cells. The message for the host counts all and names the first ones; the finding for others names none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from coterie.errors import ConfigError
from coterie.findings import Finding, Role
from coterie.text.quoting import quoted
from coterie_client.data.tables.cells import other_spelling

MOST_LISTED: Final = 5
_MOST_LEVELS: Final = 10
Place = Callable[[int], str]  # position of a kept row, such as "t.csv line 5"

# For each kind: the rule, the phrase for one cell, for several, and the wanted values.
_KINDS: Final = {
    "missing": ("T4", "is missing", "are missing", "values, or data.missing: drop_rows, mean or indicator"),
    "number": ("T3", "is not a finite number", "are not finite numbers", "numbers"),
    "date": ("T5", "is not an ISO 8601 date", "are not ISO 8601 dates", "dates such as 2024-05-31"),
    "boolean": ("T6", "is not true or false", "are not true or false", "TRUE and FALSE, or 1 and 0"),
    "category": ("T7", "is not a declared level", "are not declared levels", ""),
}
_SINGLE: Final = {"missing": "a value, or data.missing: drop_rows, mean or indicator", "number": "one", "date": "one such as 2024-05-31"}
_NO_FILLING: Final = ("target", "user", "cluster")  # roles whose cells are never filled in


@dataclass(frozen=True)
class Fault:
    """Cells of one column that are wrong in the same way."""

    kind: str
    role: Role
    column: str
    count: int
    first: tuple[tuple[int, str], ...]  # row and cell text; at most MOST_LISTED
    levels: tuple[str, ...] = ()  # the allowed levels of a category


def error_of(faults: Sequence[Fault], place: Place) -> ConfigError:
    """One error for all faults."""
    total, listed = sum(fault.count for fault in faults), _listed(faults)
    row, text, fault = listed[0]
    n_here = sum(one.count for one in faults if (one.kind, one.role) == (fault.kind, fault.role))
    finding = Finding(_KINDS[fault.kind][0], count=n_here, role=fault.role)
    if total == 1:
        where = f"{place(row)}, column {fault.column!r}"
        _, is_wrong, _, wanted = _KINDS[fault.kind]
        wanted = _levels([fault]) if fault.kind == "category" else _SINGLE.get(fault.kind, wanted)
        if fault.kind == "missing" and fault.role in _NO_FILLING:
            wanted = "a value, or data.missing: drop_rows"
        cell = "the cell" if fault.kind == "missing" else text
        return ConfigError(f"{where}: {cell} {is_wrong}, want {wanted}{_hint(listed)}", finding)
    kinds = list(dict.fromkeys(one.kind for one in faults))
    counted = []
    for kind in kinds:
        n = sum(one.count for one in faults if one.kind == kind)
        counted.append(f"{n} cell{'s' if n > 1 else ''} {_KINDS[kind][1 if n == 1 else 2]}")
    places = "; ".join(f"{place(row)}, column {one.column!r}" + ("" if one.kind == "missing" else f": {text}") for row, text, one in listed)
    more = f"; and {total - len(listed)} more" if total > len(listed) else ""
    fillable = any(one.role not in _NO_FILLING for one in faults if one.kind == "missing")
    wants = {kind: _KINDS[kind][3] for kind in kinds}
    if "category" in wants:
        wants["category"] = _levels(faults)
    if "missing" in wants and not fillable:
        wants["missing"] = "values, or data.missing: drop_rows"
    wanted = "; ".join(wants.values())
    return ConfigError(f"{' and '.join(counted)}: {places}{more}; want {wanted}{_hint(listed)}", finding)


def _listed(faults: Sequence[Fault]) -> list[tuple[int, str, Fault]]:
    """The first bad cells in row order."""
    return sorted(((row, text, fault) for fault in faults for row, text in fault.first), key=lambda one: one[0])[:MOST_LISTED]


def _levels(faults: Sequence[Fault]) -> str:
    """The levels of the first category with unknown levels."""
    levels = next(fault.levels for fault in faults if fault.kind == "category")
    more = f" and {len(levels) - _MOST_LEVELS} more" if len(levels) > _MOST_LEVELS else ""
    return f"{', '.join(map(quoted, levels[:_MOST_LEVELS]))}{more} (data.columns)"


def _hint(listed: Sequence[tuple[int, str, Fault]]) -> str:
    for _, text, fault in listed:
        if fault.kind == "number" and (key := other_spelling(text.strip("'\""))) is not None:
            return f" ({text} would be a number with another data.csv.{key})"
    return ""
