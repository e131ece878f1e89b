"""Table formats by file suffix. The reader of a format is imported on first use.

pyarrow reads large CSV files, if it is installed (`csv_arrow`), with the same values. `csv_table` reads again what pyarrow rejects, so
errors are the same too.
"""

# ruff: noqa: PLC0415 - see above

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, Literal, TypeVar

from coterie.errors import ConfigError
from coterie.experiment.columns import Dialect
from coterie.experiment.tables import CsvData
from coterie_client.data.paths import DataFile, data_files
from coterie_client.data.reading import Reading
from coterie_client.data.tables import table_reader
from coterie_client.data.tables.cells import Spelling
from coterie_client.data.tables.heads import Table
from coterie_client.data.tables.table_reader import Format
from coterie_client.data.users import UserHead

T = TypeVar("T")
Source = Literal["csv", "parquet", "stata", "spss"]
SUFFIXES: Final[Mapping[Source, tuple[str, ...]]] = {
    "csv": (".csv", ".csv.gz"),
    "parquet": (".parquet",),
    "stata": (".dta",),
    "spss": (".sav",),
}
_TYPED: Final = Spelling(frozenset({""}))  # missing cells are nulls, or empty text


def source_of(path: Path) -> Source | None:
    """The source for a file name; None if its suffix is not a table's."""
    return next((source for source, suffixes in SUFFIXES.items() if path.name.endswith(suffixes)), None)


def format_of(source: Source, dialect: Dialect | None = None) -> Format:
    """How files of a source are opened; `dialect` applies to CSV."""
    if source == "csv":
        from coterie_client.data.tables import csv_table

        chosen = Dialect() if dialect is None else dialect
        spelling = Spelling.of(chosen)
        return Format(spelling, "line", partial(csv_table.opened, dialect=chosen, spelling=spelling))
    if source == "parquet":
        from coterie_client.data.tables import parquet_table

        return Format(_TYPED, "row", parquet_table.opened)
    from coterie_client.data.tables import statistics_table

    return Format(_TYPED, "row", partial(statistics_table.opened, source))


def heads(config: Table, data_dir: Path | None) -> list[UserHead]:
    """All users of the files. One pass that keeps no values; Parquet reads only the columns of user and cluster."""
    files = data_files(config.path, data_dir, SUFFIXES[config.source])
    return _read(config, files, lambda how: table_reader.heads(config, files, how))


def load(config: Table, seed: int, names: Collection[str] | None, data_dir: Path | None) -> Reading:
    """The users in `names` (None: all) that the files have."""
    files = data_files(config.path, data_dir, SUFFIXES[config.source])
    return _read(config, files, lambda how: table_reader.load(config, files, how, seed, names))


def _read(config: Table, files: Sequence[DataFile], read: Callable[[Format], T]) -> T:
    """The result of `read`, with pyarrow if that is faster."""
    if not isinstance(config, CsvData):
        return read(format_of(config.source))
    from coterie_client.data.tables import csv_arrow

    how = format_of("csv", config.csv)
    if csv_arrow.reads(files, config.csv, how.spelling):
        with contextlib.suppress(csv_arrow.Unread, ConfigError):
            return read(Format(how.spelling, how.what, partial(csv_arrow.opened, dialect=config.csv, spelling=how.spelling)))
    return read(how)
