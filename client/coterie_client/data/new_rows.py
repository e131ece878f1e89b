"""Reads a new table the way a model's training rows were read: same dialect, types, categories and formula.

The model's features decide which columns are needed. Columns of users, clusters and targets are not.
"""

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coterie.arrays import Array
from coterie.errors import ConfigError
from coterie.experiment.columns import Dialect, Levels
from coterie.experiment.data import DataConfig
from coterie.experiment.tables import CsvData, ParquetData, SpssData, StataData
from coterie.findings import Finding
from coterie_client.data.paths import DataFile, one_file
from coterie_client.data.tables.cells import Spelling
from coterie_client.data.tables.formats import SUFFIXES, format_of, source_of
from coterie_client.data.tables.formula import Asked, asked_by
from coterie_client.data.tables.heads import Roles
from coterie_client.data.tables.table_reader import load_rows

_NO_TABLES = (".npz", ".xlsx")
_MISSING = " is missing"  # suffix of an indicator's name


@dataclass(frozen=True)
class NewRows:
    """A table with its features. Missing cells that the experiment fills in are NaN."""

    header: tuple[str, ...]
    cells: list[list[str]]
    features: Array  # (m, p)


def read_new_rows(data: DataConfig, path: Path, features: Sequence[str], label: str | None = None) -> NewRows:
    """The rows of a table in any format. `features` are the model's feature names in order, empty if it has none.

    Without names, features are all numbers in columns that have no other role. Raises ConfigError.
    """
    config, fills = _as_csv(data, path), getattr(data, "missing", "refuse") in ("mean", "indicator")
    label = str(path) if label is None else label
    if path.suffix in _NO_TABLES:
        wanted = ", ".join(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)
        raise ConfigError(f"{label} ends in {path.suffix}, want the rows as a table: {wanted}", Finding("T1"))
    file, how = DataFile(one_file(str(path), None).path, label, user="rows"), format_of(source_of(path) or "csv", config.csv)
    with how.opened(file) as opened:
        header = tuple(opened.header)
        at: list[int] = []
        cells: list[list[str]] = []
        for block in opened.blocks:
            at += block.lines.tolist()
            cells += map(list, zip(*map(block.texts, header), strict=True))
    if not cells:
        return NewRows(header, cells, np.empty((0, len(features))))
    if config.formula is not None:
        asked = asked_by(config.formula)
        columns = tuple(column for column in asked.columns if column != asked.target)
        roles = Roles((), (), None, None, Asked(asked.target, columns, asked.categories))
        known = {column: re.compile(rf"(?:^|:)(?:C\({re.escape(column)}\)|{re.escape(column)})\[T\.(.*?)\](?:$|:)") for column in columns}
        levels = {column: [match[1] for name in features if (match := pattern.search(name))] for column, pattern in known.items()}
    elif features:
        levels = _columns_of(label, header, features)
        roles = Roles((), (), None, tuple(levels))
    else:
        roles, levels = Roles((), (), None, None), {}
    types = dict(config.columns)
    for column, trained in levels.items():
        if trained and not isinstance(types.get(column), Levels):
            types[column] = Levels(category=(_reference(header, cells, column, trained, how.spelling, label), *dict.fromkeys(trained)))
    config = config.model_copy(update={"columns": types})
    found = load_rows(config, roles, file, how)
    missing = np.argwhere(np.isnan(found.features))
    if not fills and len(missing):
        row, place = missing[0]
        n_rows, column = len(set(missing[:, 0].tolist())), found.schema[place].column or found.schema[place].name
        more = f" (and cells of {n_rows - 1} more rows)" if n_rows > 1 else ""
        where = f"{label} {how.what} {at[row]}, column {column!r}"
        said = f"{where}: the cell is missing{more}, want a value, for the run has not filled in any"
        raise ConfigError(said, Finding("T4", count=n_rows, role="feature"))
    names = [feature.name for feature in found.schema]
    if features and set(features) - set(names):
        lacking = next(name for name in features if name not in names)
        raise ConfigError(f"{label}: feature {lacking!r} of the model is missing, found {', '.join(map(repr, names))}", Finding("T2"))
    order = [names.index(name) for name in features] if features else list(range(len(names)))
    return NewRows(header, cells, found.features[:, order])


def frame_rows(data: DataConfig, frame: Any, features: Sequence[str]) -> NewRows:
    """As `read_new_rows`, for a pandas or polars data frame with the table's columns. It goes through CSV text; numbers keep their bits."""
    if isinstance(data, CsvData):
        data = data.model_copy(update={"csv": Dialect(missing=tuple(dict.fromkeys((*data.csv.missing, ""))))})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.csv")
        text = frame.to_csv(index=False) if hasattr(frame, "to_csv") else frame.write_csv()
        path.write_text(text, encoding="utf-8")
        return read_new_rows(data, path, features, label="the frame")


def _as_csv(data: DataConfig, path: Path) -> CsvData:
    """The run's data section as CSV, without users and targets."""
    kept: dict[str, object] = {}
    others = {"user_column", "cluster_column", "target_column", "user", "target", "cluster"}
    if isinstance(data, CsvData | ParquetData | StataData | SpssData):
        kept = {"columns": dict(data.columns), "formula": data.formula, "indicator_columns": data.indicator_columns}
        kept["missing"] = "indicator" if data.missing == "indicator" else "mean"  # drops no row: each needs a prediction
    given = [getattr(data, role, None) for role in others]
    ignored = {name for column in given for name in ((column,) if isinstance(column, str) else column if isinstance(column, tuple) else ())}
    columns: dict[str, object] = {**dict.fromkeys(ignored, "ignore"), **kept.pop("columns", {})}  # type: ignore[dict-item]
    columns |= dict.fromkeys(ignored, "ignore")
    section = CsvData(source="csv", path=str(path), csv=data.csv if isinstance(data, CsvData) else Dialect())
    return section.model_copy(update={**kept, "columns": columns})


def _columns_of(label: str, header: Sequence[str], features: Sequence[str]) -> dict[str, list[str]]:
    """The columns of a model's features, in order, with those levels of categories that have a feature."""
    columns: dict[str, list[str]] = {}
    for name in features:
        if name in header:
            columns.setdefault(name, [])
        elif name.endswith(_MISSING) and name.removesuffix(_MISSING) in header:
            continue
        else:
            splits = [at.start() for at in re.finditer("=", name) if name[: at.start()] in header]
            if not splits:
                raise ConfigError(f"{label}: column {name!r} is missing, found {', '.join(map(repr, header))}", Finding("T2"))
            columns.setdefault(name[: splits[0]], []).append(name[splits[0] + 1 :])
    return columns


def _reference(
    header: Sequence[str], cells: Sequence[Sequence[str]], column: str, trained: Sequence[str], spelling: Spelling, label: str
) -> str:
    """The level without a feature, unless it was declared: the only other level that the rows may contain."""
    if column not in header:
        raise ConfigError(f"{label}: column {column!r} is missing, found {', '.join(map(repr, header))}", Finding("T2"))
    place = header.index(column)
    others = sorted({row[place].strip() for row in cells if not spelling.is_missing(row[place])} - set(trained))
    if len(others) > 1:
        said = f"{label}: column {column!r} has the levels {', '.join(map(repr, others[:5]))}, which the model has no features for"
        raise ConfigError(f"{said}, want at most one, its reference", Finding("T7", count=len(others), role="feature"))
    return others[0] if others else "(reference)"
