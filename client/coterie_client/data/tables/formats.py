"""Table formats by file suffix. The reader of a format is imported on first use."""

# ruff: noqa: PLC0415 - see above

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Final, Literal

from coterie.experiment.columns import Dialect
from coterie.experiment.tables import CsvData
from coterie_client.data.paths import data_files
from coterie_client.data.tables import table_reader
from coterie_client.data.tables.cells import Spelling
from coterie_client.data.tables.heads import Table
from coterie_client.data.tables.table_reader import Format
from coterie_client.data.users import Reading, UserHead

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

        return Format(_TYPED, "row", partial(parquet_table.opened, spelling=_TYPED))
    from coterie_client.data.tables import statistics_table

    return Format(_TYPED, "row", partial(statistics_table.opened, source=source, spelling=_TYPED))


def _format(config: Table) -> Format:
    return format_of(config.source, config.csv if isinstance(config, CsvData) else None)


def heads(config: Table, _: int, data_dir: Path | None) -> list[UserHead]:
    """All users of the files. One pass that keeps no values; Parquet reads only the columns of user and cluster."""
    return table_reader.heads(config, data_files(config.path, data_dir, SUFFIXES[config.source]), _format(config))


def load(config: Table, seed: int, names: Collection[str] | None, data_dir: Path | None) -> Reading:
    """The users in `names` (None: all) that the files have."""
    return table_reader.load(config, data_files(config.path, data_dir, SUFFIXES[config.source]), _format(config), seed, names)
