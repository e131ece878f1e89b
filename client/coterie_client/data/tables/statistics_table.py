"""Reads files of statistics programs with pandas: Stata's `.dta`, and SPSS's `.sav`, which also needs pyreadstat.

A file is read whole. Types come from the file. Labelled values are read as text, so they become a category if the experiment declares one.
pandas and pyreadstat are imported on first use.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array
from coterie.errors import ConfigError
from coterie.findings import Finding
from coterie.text.names import normal
from coterie_client.data.paths import DataFile
from coterie_client.data.tables.cells import MICROSECONDS_A_DAY
from coterie_client.data.tables.rows import Chunk, Codes, codes_of

_CALLED: Final = {"stata": "a Stata file", "spss": "an SPSS file"}


@dataclass(frozen=True)
class _Rows:
    """All rows of a file."""

    label: str
    series: dict[str, Any]  # by normalised column name
    n_rows: int

    @property
    def lines(self) -> NDArray[np.int64]:
        return np.arange(1, self.n_rows + 1)

    def coded(self, column: str) -> tuple[list[str | None], Codes]:
        names, codes = codes_of([None if text == "" else text for text in _texts(self.series[column])])
        return [None if name is None else str(name) for name in names], codes

    def chunks(self, columns: Sequence[str], texts: Collection[str]) -> dict[str, Chunk]:
        present = [column for column in columns if column in self.series]
        return {name: Chunk(texts=_texts(self.series[name])) if name in texts else _chunk(self.series[name]) for name in present}


@dataclass
class _File:
    label: str
    header: list[str]
    known: dict[str, str]
    rows: _Rows
    hint: str = ""

    def blocks(self, columns: Sequence[str], texts: Collection[str]) -> Iterator[_Rows]:  # noqa: ARG002 - all are there
        if self.rows.n_rows:
            yield self.rows


@contextmanager
def opened(source: str, file: DataFile) -> Iterator[_File]:
    """A file of source `stata` or `spss`."""
    frame = _frame(source, file)
    header = [normal(str(name)) for name in frame.columns]
    series = {name: frame.iloc[:, place] for place, name in enumerate(header)}
    yield _File(file.label, header, {name: _kind(values) for name, values in series.items()}, _Rows(file.label, series, len(frame)))


def _frame(source: str, file: DataFile) -> Any:
    """The file as a data frame. ConfigError if a library is missing, or the file is damaged."""
    try:
        import pandas as pd  # noqa: PLC0415 - tens of megabytes, and an optional dependency
    except ImportError as error:
        said = f"{file.label} is {_CALLED[source]} and pandas is not installed, want `pip install pandas`"
        raise ConfigError(said, Finding("T21")) from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about labels that only some of the values have
            return pd.read_spss(file.path) if source == "spss" else _stata(pd, file.path)
    except ImportError as error:
        said = f"{file.label} is {_CALLED[source]} and pyreadstat is not installed, want `pip install pyreadstat`"
        raise ConfigError(said, Finding("T21")) from error
    except Exception as error:  # pandas may raise anything for a damaged file
        raise ConfigError(f"{file.label} cannot be read ({error}), want {_CALLED[source]}", Finding("T1")) from error


def _stata(pd: Any, path: Path) -> Any:
    try:
        return pd.read_stata(path)
    except ValueError:  # two values with the same label
        return pd.read_stata(path, convert_categoricals=False)


def _kind(values: Any) -> str:
    """The type of a column; "text" if it needs declaring."""
    kind = getattr(values.dtype, "kind", "O")
    return "boolean" if kind == "b" else "number" if kind in "iuf" else "date" if kind == "M" else "text"


def _chunk(values: Any) -> Chunk:
    kind = _kind(values)
    if kind == "text":
        return Chunk(texts=_texts(values))
    if kind == "date":
        moments = values.to_numpy().astype("datetime64[us]")
        days: Array = moments.astype(np.int64) / MICROSECONDS_A_DAY
        return Chunk(np.where(np.isnat(moments), np.nan, days), kind="date")
    return Chunk(values.to_numpy().astype(np.float64), kind=kind)


def _texts(values: Any) -> list[str]:
    """Each value as text, "" if missing. Whole numbers have no decimals: these programs store numeric user names as floats."""
    cells = values.astype(object).to_numpy()
    is_missing = values.isna().to_numpy()
    return ["" if missing else _text(cell) for cell, missing in zip(cells, is_missing.tolist(), strict=True)]


def _text(cell: Any) -> str:
    if isinstance(cell, float):
        return str(int(cell)) if cell.is_integer() else repr(cell)
    return str(cell).strip()
