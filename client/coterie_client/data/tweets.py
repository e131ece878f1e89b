"""Short texts of many authors in one CSV file, such as Sent140. The file is read once for users and labels, and again for the texts."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Indices
from coterie.errors import ConfigError
from coterie.experiment.data import TweetsData
from coterie.findings import Finding
from coterie.text.names import check_name
from coterie_client.data.paths import DataFile, one_file
from coterie_client.data.pool import Pool
from coterie_client.data.tables.heads import no_rows, rows_by_user
from coterie_client.data.words import symbols_of


def pool(config: TweetsData, data_dir: Path | None, *_rest: object) -> Pool:
    """Rows of int64 (length,); authors are the natural users."""
    file = one_file(config.path, data_dir)
    names, labels = [], []
    for line, user, label, _ in _lines(config, file):
        names.append(check_name(user.strip(), f"{file.label} line {line}, the user"))
        try:
            labels.append(float(label))
        except ValueError:
            said = f"{file.label} line {line} has the label {label!r}, want a whole number"
            raise ConfigError(said, Finding("T3", role="label")) from None
    if not names:
        raise no_rows(file.label, None)

    def rows(indices: Indices) -> NDArray[Any]:
        wanted = set(indices.tolist())
        texts = {row: text for row, (_, _, _, text) in enumerate(_lines(config, file)) if row in wanted}
        return symbols_of([texts[row] for row in indices.tolist()], config.symbols, config.length)

    return Pool(file.label, np.array(labels), rows, rows_by_user(np.array(names)))


def _lines(config: TweetsData, file: DataFile) -> Iterator[tuple[int, str, str, str]]:
    try:
        with file.path.open(encoding=config.encoding, newline="") as text:
            reader = csv.reader(text, strict=True)
            header = next(reader, []) if config.header else None
            places = [_place(column, header, file) for column in (config.user_column, config.label_column, config.text_column)]
            for cells in reader:
                if not cells:
                    continue
                if max(places) >= len(cells):
                    raise ConfigError(f"{file.label} line {reader.line_num} has {len(cells)} fields, want more than {max(places)}")
                user, label, said = (cells[place] for place in places)
                yield reader.line_num, user, label, said
    except UnicodeDecodeError as error:
        found = f"the byte {error.object[error.start]:#04x} at the wrong place"
        raise ConfigError(f"{file.label} has {found}, want {config.encoding}, or another encoding") from error
    except (OSError, csv.Error) as error:
        said = f"{file.label} cannot be read ({getattr(error, 'strerror', None) or error}), want comma-separated text"
        raise ConfigError(said) from error


def _place(column: str | int, header: list[str] | None, file: DataFile) -> int:
    if isinstance(column, int):
        return column
    assert header is not None  # noqa: S101 - the configuration says so
    if column not in header:
        raise ConfigError(f"{file.label}: column {column!r} is missing, found {', '.join(map(repr, header)) or 'none'}")
    return header.index(column)
