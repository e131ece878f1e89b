"""Text and comma-separated tables that commands write."""

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from coterie.record.files import written_whole


def write_text(path: Path, text: str) -> None:
    """Replaces the file as a whole. RunError if it cannot be written."""
    with written_whole(path) as file:
        file.write(text.encode())


def csv_text(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    return text.getvalue()
