"""What all reproductions are: runs from each seed, a table beside the paper's numbers, a plot, and the numbers as a CSV file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from coterie import __version__
from coterie.experiment.config import Experiment, experiment_to_json
from coterie_deploy.read.tabular import csv_text, write_text
from coterie_deploy.view.charts import Spec

R = TypeVar("R")


@dataclass(frozen=True)
class Work:
    """What measures of a study are given."""

    folder: Path  # where measured numbers are kept
    data: Path | None = None  # a folder with data that is not shipped
    columns: str | None = None  # of a table, those asked for
    say: Callable[[str], None] = lambda _: None  # shows what is done now


@dataclass(frozen=True)
class Study:
    """A table or figure of a paper. Its rows are dataclasses with the field `seed`."""

    measure: Callable[[int, Work], Sequence[Any]]  # the rows of a seed
    show: Callable[[Sequence[Any], Console], None]
    chart: Callable[[Sequence[Any]], Spec] | None
    columns: Sequence[str] = ()  # of the CSV file, () for the fields of a row
    lines: Callable[[Any], Iterable[Sequence[object]]] = lambda row: [astuple(row)]  # what a row is there
    numbers: str = ""  # the name of the CSV file without its ending, "" for that of the study


def fingerprint_of(*experiments: Experiment, also: str = "") -> str:
    """What numbers depend on: the version, the experiments, and what else is said."""
    return hashlib.sha256("\n".join([__version__, also, *map(experiment_to_json, experiments)]).encode()).hexdigest()


def kept_rows(kept: Path, fingerprint: str, kind: Callable[..., R], measure: Callable[[], list[R]]) -> list[R]:
    """The rows in the file `kept` where it has this fingerprint, else those that are measured, and written there.

    `kind` is the dataclass of a row. Raises RunError when the file cannot be written.
    """
    try:
        content = json.loads(kept.read_text(encoding="utf-8"))
        if content["fingerprint"] == fingerprint:
            return [kind(**row) for row in content["rows"]]
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not there, or of another version: the runs are made again
    rows = measure()
    write_text(kept, json.dumps({"fingerprint": fingerprint, "rows": [vars(row) for row in rows]}, indent=1))
    return rows


def write_numbers(study: Study, rows: Sequence[Any], path: Path) -> None:
    """The rows as a table for others to read. Raises RunError when the file cannot be written."""
    columns = study.columns or [field.name for field in fields(rows[0])]
    write_text(path, csv_text(columns, (line for row in rows for line in study.lines(row))))


def seeds_of(rows: Sequence[Any]) -> str:
    """ "seed 0", or "seeds 0 to 7"."""
    seeds = sorted({row.seed for row in rows})
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds[0]} to {seeds[-1]}"
