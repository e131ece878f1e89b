"""Numbers, sentences and tables in a terminal, wide or narrow."""

# ruff: noqa: PLC0415 - a client prints counts and no tables, and stays smaller without rich

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from coterie_deploy.terminal.printable import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

NARROW = 76  # columns below which tables leave out what can be done without
TINY = 56  # columns below which little more than what a row is about has room


def count(value: float | None) -> str:
    """An exact number with thousands separated, "-" for none."""
    return "-" if value is None else f"{value:,.0f}" if float(value).is_integer() else f"{value:,.2f}"


def counted(number: int, what: str) -> str:
    """ "1 host", "2 hosts"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def size(n_bytes: float) -> str:
    """Bytes in powers of 1000 with three digits: "1.62 MB"."""
    units = ("B", "kB", "MB", "GB", "TB")
    power = 0
    while n_bytes >= 999.5 and power < len(units) - 1:
        n_bytes, power = n_bytes / 1000, power + 1
    digits = 0 if power == 0 else 2 if n_bytes < 9.995 else 1 if n_bytes < 99.95 else 0
    return f"{n_bytes:.{digits}f} {units[power]}"


def figure(value: float | None, digits: int = 4) -> str:
    """A measured value with a few significant digits, "-" for none."""
    if value is None or math.isnan(value):
        return "-"
    return f"{value:#.{digits}g}".removesuffix(".") if digits > 2 and abs(value) < 10**digits else f"{value:.{digits}g}"


def duration(seconds: float) -> str:
    """A length of time: "2.4 s", "41 s", "12:03", "1:02:03"."""
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def is_narrow(console: Console) -> bool:
    return console.width < NARROW


def is_tiny(console: Console) -> bool:
    return console.width < TINY


def say(console: Console, *sentences: str, style: str = "") -> None:
    """Prints each sentence that is not empty on a new line, wrapped."""
    from rich.text import Text

    for sentence in sentences:
        if sentence:
            console.print(Text(printable(sentence), style=style))


def say_left_out(console: Console, columns: Sequence[str]) -> None:
    """Names the columns for which the terminal is too narrow, if there are any."""
    if columns:
        say(console, f"without room in {console.width} columns: {', '.join(columns)}", style="dim")


def table_of(title: str, columns: Mapping[str, Sequence[str] | None], **look: int) -> Table:
    """As `table`, by columns instead of rows; those that are None are left out."""
    shown = {name: cells for name, cells in columns.items() if cells is not None}
    return table(title, [*shown], [*zip(*shown.values(), strict=True)], **look)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, n_text: int = 1, last: int = 0, gap: int = 2) -> Table:
    """A borderless table: the first `n_text` columns are text, the others numbers; the `last` rows stand apart; `gap` between columns."""
    from rich.table import Table
    from rich.text import Text

    padding = (0, gap, 0, 0)
    built = Table(title=Text(title, style="bold"), title_justify="left", box=None, padding=padding, header_style="dim", pad_edge=False)
    for place, column in enumerate(columns):
        built.add_column(column, justify="left" if place < n_text else "right", no_wrap=place >= n_text, overflow="fold")
    first_of_last = len(rows) - last
    for place, row in enumerate(rows):
        style = "bold" if place >= first_of_last else ""
        built.add_row(*(Text(cell) for cell in row), end_section=place == first_of_last - 1, style=style)
    return built
