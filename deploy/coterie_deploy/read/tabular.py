"""Comma-separated tables that commands write."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import IO

from coterie.errors import RunError


def write_table(out: Path | None, stdout: IO[str], header: list[str], rows: list[list[str]]) -> None:
    """Writes header and rows to a file, or to standard output. Raises RunError."""
    if out is None:
        csv.writer(stdout, lineterminator="\n").writerows([header, *rows])
        return
    try:
        with out.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([header, *rows])
    except OSError as error:
        raise RunError(f"cannot write {out}: {error.strerror or error}") from None
