"""What all reproductions share: runs from each seed, a table beside the paper's numbers, a plot, and the numbers as a CSV file."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich.console import Console

from coterie import __version__
from coterie.arrays import Array
from coterie.errors import RunError
from coterie.experiment.config import Experiment, experiment_to_json
from coterie_deploy.engines.api import Result
from coterie_deploy.read.tabular import csv_text, write_text
from coterie_deploy.view.charts import Spec

R = TypeVar("R")
Measure = Callable[..., list[R]]


@dataclass(frozen=True)
class Work:
    """What the measures of a study receive."""

    folder: Path  # keeps measured numbers
    data: Path | None = None  # a folder with data that is not shipped
    columns: str | None = None  # the columns of a table that the command asks for
    say: Callable[[str], None] = lambda _: None  # shows what runs now

    def rows(
        self, name: str, said: str, of: Sequence[Experiment], kind: Callable[..., R], measure: Measure[R], *with_: Any, also: str = ""
    ) -> list[R]:
        """The rows that the file NAME.json in the folder has of these experiments. Else those of `measure(*with_)`, which it keeps.

        `kind` is the dataclass of a row, and `also` what the rows depend on besides. Raises RunError when the file cannot be written.
        """
        content = "\n".join([__version__, also, *map(experiment_to_json, of)])
        fingerprint, kept = hashlib.sha256(content.encode()).hexdigest(), self.folder / f"{name}.json"
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # missing, damaged, or of another version: measured again
            found = json.loads(kept.read_text(encoding="utf-8"))
            if found["fingerprint"] == fingerprint:
                return [kind(**row) for row in found["rows"]]
        if not self.measures(name):
            return []
        self.say(said)
        rows = measure(*with_)
        write_text(kept, json.dumps({"fingerprint": fingerprint, "rows": [vars(row) for row in rows]}, indent=1))
        return rows

    def measures(self, _: str, /) -> bool:
        """Whether what the folder does not have is measured now."""
        return True


@dataclass(frozen=True)
class Plan(Work):
    """Measures nothing, and lists the names of what the folder does not have."""

    missing: list[str] = field(default_factory=list)

    def measures(self, name: str, /) -> bool:
        self.missing.append(name)
        return False


@dataclass(frozen=True)
class Part(Work):
    """Measures what has this name, and nothing else."""

    name: str = ""

    def measures(self, name: str, /) -> bool:
        return name == self.name


@dataclass(frozen=True)
class Study:
    """A table or figure of a paper. Its rows are dataclasses with the field `seed`."""

    measure: Callable[[int, Work], Sequence[Any]]  # the rows of a seed
    show: Callable[[Sequence[Any], Console], None]
    chart: Callable[[Sequence[Any]], Spec] | None = None
    columns: Sequence[str] = ()  # of the CSV file, () for the fields of a row
    lines: Callable[[Any], Iterable[Sequence[object]]] = lambda row: [astuple(row)]  # the lines of a row in that file
    numbers: str = ""  # the name of the CSV file without its ending, "" for that of the study

    def write_numbers(self, rows: Sequence[Any], path: Path) -> None:
        """Writes the CSV file. Raises RunError when it cannot be written."""
        columns = self.columns or [one.name for one in fields(rows[0])]
        write_text(path, csv_text(columns, (line for row in rows for line in self.lines(row))))


def models_of(result: Result, stage: str) -> Array:
    """The models (n, d) of a stage; RunError if they stayed with their users."""
    models = result.outcomes[stage].models
    if models is None:
        raise RunError(f"stage {stage!r} has left no models")
    return models


def deviation(values: Sequence[float]) -> float:
    """The standard deviation between seeds, 0 for a single one."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def seeds_of(rows: Sequence[Any]) -> str:
    """ "seed 0", or "seeds 0 to 7"."""
    seeds = sorted({row.seed for row in rows})
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds[0]} to {seeds[-1]}"
