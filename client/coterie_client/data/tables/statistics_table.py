"""Reads files of statistics programs with pandas: Stata's `.dta`, and SPSS's `.sav`, which also needs pyreadstat.

A file is read whole. Types come from the file. Labelled values are read as text, so they become a category if the experiment declares one.
pandas and pyreadstat are imported on first use.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from coterie.arrays import Array
from coterie.errors import ConfigError
from coterie.extras import needed, not_installed
from coterie.findings import Finding
from coterie.text.names import normal
from coterie_client.data.paths import DataFile
from coterie_client.data.tables.cells import MICROSECONDS_A_DAY, Spelling
from coterie_client.data.tables.rows import Block, Chunk, TableFile, as_text

_CALLED: Final = {"stata": "a Stata file", "spss": "an SPSS file"}


class _Rows(Block):
    def texts(self, column: str) -> Sequence[str]:
        return _texts(self.columns[column])

    def cells(self, column: str) -> Chunk:
        return _chunk(self.columns[column])


@contextmanager
def opened(file: DataFile, source: str, spelling: Spelling) -> Iterator[TableFile]:
    """A file of source `stata` or `spss`."""
    frame = _frame(source, file)
    header = [normal(str(name)) for name in frame.columns]
    series = {name: frame.iloc[:, place] for place, name in enumerate(header)}
    rows = [_Rows(series, np.arange(1, len(frame) + 1), spelling)] if len(frame) else []
    yield TableFile(header, rows, {name: _kind(values) for name, values in series.items()})


def _frame(source: str, file: DataFile) -> Any:
    """The file as a data frame of pandas, which takes tens of megabytes. ConfigError if a library is missing, or the file is damaged."""
    pd = needed("pandas", "", f"{file.label}, {_CALLED[source]}, needs pandas", package="pandas", finding=Finding("T21"))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about labels that only some of the values have
            return pd.read_spss(file.path) if source == "spss" else _stata(pd, file.path)
    except ImportError as error:
        raise not_installed(f"{file.label}, {_CALLED[source]}, needs pyreadstat", "pyreadstat", Finding("T21")) from error
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
    return ["" if missing else as_text(cell).strip() for cell, missing in zip(cells, is_missing.tolist(), strict=True)]
