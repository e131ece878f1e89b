"""Text and comma-separated tables that commands write."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO

from coterie.record.files import written_whole


def write_text(path: Path, text: str) -> None:
    """Whoever reads the file finds all of it or what was there before. Raises RunError when it cannot be written."""
    with written_whole(path) as file:
        file.write(text.encode())


def csv_text(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A table as text."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    return text.getvalue()


def write_table(out: Path | None, stdout: IO[str], header: list[str], rows: list[list[str]]) -> None:
    """Writes header and rows to a file, or to standard output. Raises RunError."""
    text = csv_text(header, rows)
    if out is None:
        stdout.write(text)
    else:
        write_text(out, text)
