"""What all reproductions do with files: numbers that are kept between two of them, tables for others to read, pictures."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from coterie import __version__
from coterie.errors import RunError
from coterie.experiment.config import Experiment, experiment_to_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

R = TypeVar("R")


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
    content = {"fingerprint": fingerprint, "rows": [vars(row) for row in rows]}
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(content, indent=1), encoding="utf-8")
    except OSError as error:
        raise RunError(f"cannot write {kept}: {error.strerror or error}") from error
    return rows


def write_csv(columns: Sequence[str], rows: Iterable[Sequence[object]], path: Path) -> None:
    """A table. Raises RunError when the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(rows)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error


def save_figure(figure: Figure, path: Path) -> None:
    """A picture. Raises RunError when the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error
