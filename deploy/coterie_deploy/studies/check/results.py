"""What a run has left, number by number, so that two runs can be compared to the bit and the first difference has a name."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from coterie_server.record.rundb import read_run
from coterie_server.run.coordinator import Finished

_COUNTED = (
    "SELECT stage, round, step, direction, kind, SUM(vectors), SUM(scalars), SUM(payload_bytes) FROM ledger "
    "WHERE useful AND seq > 0 AND step != 'control' GROUP BY 1, 2, 3, 4, 5"
)
_EXPECTED = "SELECT stage, step, direction, scope, vectors, spread, drawn, scalars FROM expected"
# Figures that count messages: names of closed forms, and of those who were sent nothing.
_COUNT = re.compile(r"(figure '|figures/)(unasked\w*|\w+_(expected|drawn))\b")


@dataclass(frozen=True)
class Results:
    """Arrays, figures and clusters by their places, in words."""

    arrays: Mapping[str, NDArray[Any]]  # "models of stage 'pdmm'": of each stage what its outcome holds
    figures: Mapping[str, float | None]  # "figure 'objective' of round 3 of stage 'pdmm'"
    clusters: Mapping[str, str]  # by round, where a method finds any

    def first_difference(self, other: Self, *, with_counts: bool = True) -> str:
        """The first place in which another run differs from this one, as a sentence; "" for the same bits.

        Without counts it ignores figures that count messages: they depend on the connected hosts, and on the hosts that users share.
        """
        for mine, theirs in ((self.figures, other.figures), (self.clusters, other.clusters), (self.arrays, other.arrays)):
            for place in {**mine, **theirs}:
                if not with_counts and _COUNT.match(place):
                    continue
                if place not in theirs or place not in mine:
                    return f"{place} is {'missing' if place in mine else 'new'}"
                if said := _difference(place, mine[place], theirs[place]):
                    return said
        return ""


def results_of(finished: Finished, folder: Path) -> Results:
    """What a finished run in a folder has left."""
    arrays = {
        f"{place[1:]} of stage {name!r}": array
        for name, outcome in finished.outcomes.items()
        for place, array in arrays_in({**vars(outcome), "carry": None})
    }
    with read_run(folder) as connection:
        names = dict(connection.execute("SELECT number, name FROM stages"))
        rows = connection.execute("SELECT stage, round, name, value FROM figures ORDER BY stage, round, name")
        figures = {f"figure {name!r} of round {number} of stage {names.get(stage)!r}": value for stage, number, name, value in rows}
        found = connection.execute("SELECT stage, round, labels FROM memberships ORDER BY stage, round")
        clusters = {f"the clusters after round {number} of stage {names.get(stage)!r}": labels for stage, number, labels in found}
    return Results(arrays, figures, clusters)


def counted_in(folder: Path) -> Mapping[str, tuple[Any, ...]]:
    """What the ledger of a run counts once, and what its closed forms say, each by its place in words."""
    with read_run(folder) as connection:
        rows = connection.execute(_COUNTED)
        found = {f"{kind} {way} in round {number} of stage {stage}": tuple(sums) for stage, number, _, way, kind, *sums in rows}
        rows = connection.execute(_EXPECTED)
        found |= {f"the closed form of {step} {way} ({scope}) of stage {stage}": tuple(rest) for stage, step, way, scope, *rest in rows}
    return found


def arrays_in(value: Any, place: str = "") -> Iterator[tuple[str, NDArray[Any]]]:
    """All arrays in an outcome with their places, in the order of the places; floats are arrays of one number."""
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping | list | tuple):
        items = sorted(value.items(), key=lambda item: str(item[0])) if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from arrays_in(item, f"{place}/{key}")
    elif isinstance(value, np.ndarray | float):
        yield place, np.asarray(value)


def _difference(place: str, mine: Any, theirs: Any) -> str:
    """How two values of a place differ, "" where they are the same bits."""
    if not isinstance(mine, np.ndarray):
        return "" if mine == theirs or (mine is None and theirs is None) else f"{place} is {theirs}, not {mine}"
    if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
        return f"{place} is {theirs.dtype} {theirs.shape}, not {mine.dtype} {mine.shape}"
    if mine.tobytes() == theirs.tobytes():
        return ""
    one, other = (np.ascontiguousarray(array).reshape(-1) for array in (mine, theirs))
    differ = np.not_equal(*(array.view(np.uint8).reshape(-1, array.itemsize) for array in (one, other))).any(axis=1)
    at = int(np.flatnonzero(differ)[0])
    return f"{place} differs in {differ.sum()} of {differ.size} numbers: the first is {other[at]!s}, not {one[at]!s}"
