"""`coterie events`: what has happened in a run, finished or under way, with the events of its aggregators in between."""

from __future__ import annotations

import csv
import datetime
import json
import re
import sqlite3
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rich.console import Console

from coterie.errors import ConfigError, RunError
from coterie.text.names import similar_names
from coterie_deploy.telemetry.logs import LEVELS, LogLevel, level_of
from coterie_deploy.terminal.printable import printable
from coterie_deploy.terminal.tables import duration, is_narrow, table
from coterie_server.record.rundb import read_run
from coterie_server.run.coordinator import is_held

FORMATS = ("table", "jsonl", "csv")
COLUMNS = ("time", "elapsed_s", "level", "kind", "text", "data")
_AGO = re.compile(r"(\d+(?:\.\d+)?)(s|min|m|h|d)")
_UNITS_S = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_LOOK_EVERY_S = 0.5
_WIDTHS = (10, 8)  # of an elapsed time and a level, in lines that follow one another


@dataclass(frozen=True)
class Asked:
    """Which events: of these kinds or of all, from this level on, and since then: an ISO 8601 time, or 90s, 5m, 2h, 1d ago."""

    kinds: Sequence[str] = ()
    level: LogLevel = LogLevel.debug
    since: str | None = None


@dataclass(frozen=True)
class Event:
    """One event; `at` in seconds since the epoch, `elapsed_s` since the run's first."""

    at: float
    elapsed_s: float
    kind: str
    text: str
    data: dict[str, Any]

    @property
    def level(self) -> LogLevel:
        """How bad it is."""
        return level_of(self.kind)

    @property
    def time(self) -> str:
        """ISO 8601, UTC."""
        return datetime.datetime.fromtimestamp(self.at, datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")

    @property
    def sentence(self) -> str:
        """The text, of an aggregator's event with where it happened."""
        at = self.data.get("aggregator")
        return self.text if at is None or repr(at) in self.text else f"at {at!r}: {self.text}"


def print_events(folder: Path, asked: Asked, form: str, console: Console, *, follow: bool = False) -> None:
    """Prints the events of a run; with `follow` also those to come, until nobody is at work in the run folder.

    ConfigError for a folder without a run, a kind that no run has, and what is no time; RunError when a run that was followed has failed or
    was killed.
    """
    since = _since(asked.since)
    reading = _Reading(folder)
    _check_kinds(asked.kinds, reading.kinds())
    if form == "table" and not follow:
        _print_table([event for event in reading.new() if _is_wanted(event, asked, since)], console)
        return
    write = _writer(form, console)
    while True:
        is_at_work = follow and is_held(folder)  # asked before the events are: what was written until then is among them
        for event in reading.new():
            if _is_wanted(event, asked, since):
                write(event)
        console.file.flush()
        if not is_at_work:
            break
        time.sleep(_LOOK_EVERY_S)

    if follow:
        _check_ending(reading.status())


def _check_ending(said: str) -> None:
    """RunError as of `coterie watch` when a run at which nobody is at work has not finished; `said` is what it has last said of itself."""
    from coterie_deploy.read.run_status import Status, ending, status_of  # noqa: PLC0415 - only here, and slow to import

    status, reason = status_of(said, is_at_work=False)
    if status is not Status.finished:
        raise RunError(ending(status, reason))


class _Reading:
    """The events of a run, in order of time, each once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._row = 0
        self._began: float | None = None

    def kinds(self) -> set[str]:
        """Those that have happened."""
        with read_run(self._folder) as connection:
            return {kind for (kind,) in connection.execute("SELECT DISTINCT kind FROM events")}

    def status(self) -> str:
        """What the run has last said of itself."""
        with read_run(self._folder) as connection:
            row = connection.execute("SELECT value FROM run WHERE key = 'status'").fetchone()
            return "" if row is None else str(row[0])

    def new(self) -> list[Event]:
        """What came since the last reading."""
        with read_run(self._folder) as connection:
            if self._began is None:
                [[self._began]] = connection.execute("SELECT MIN(at) FROM events").fetchall()
            return sorted(self._rows(connection), key=lambda event: event.at)

    def _rows(self, connection: sqlite3.Connection) -> Iterator[Event]:
        rows = connection.execute("SELECT rowid, at, kind, text, data FROM events WHERE rowid > ? ORDER BY rowid", (self._row,))
        for self._row, at, kind, text, data in rows:
            yield Event(at, at - (self._began or at), kind, text, json.loads(data))


def _check_kinds(wanted: Sequence[str], found: set[str]) -> None:
    known = sorted(found | LEVELS.keys())
    for kind in wanted:
        if kind not in known:
            listed = similar_names(kind, known) or known
            raise ConfigError(f"--kind is {kind!r}, want one of {', '.join(listed)}")


def _since(text: str | None) -> float:
    """Seconds since the epoch."""
    if text is None:
        return float("-inf")
    if match := _AGO.fullmatch(text.strip()):
        return time.time() - float(match[1]) * _UNITS_S[match[2]]
    try:
        return datetime.datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError):
        raise ConfigError(f"--since is {text!r}, want a time such as 2026-01-31T12:00:00Z, or how long ago: 90s, 5m, 2h, 1d") from None


def _is_wanted(event: Event, asked: Asked, since: float) -> bool:
    return event.level.rank >= asked.level.rank and event.at >= since and (not asked.kinds or event.kind in asked.kinds)


# ---- how they are written


def _print_table(events: Sequence[Event], console: Console) -> None:
    if not events:
        console.print("no such events")
        return
    if is_narrow(console):
        columns, first = ["elapsed", "kind", "text"], 2
        rows = [[duration(event.elapsed_s), event.kind, event.sentence] for event in events]
    else:
        columns, first = ["time (UTC)", "elapsed", "level", "kind", "text"], 4
        rows = [[_short(event), duration(event.elapsed_s), event.level.value, event.kind, event.sentence] for event in events]
    built = table("Events", columns, [[printable(cell) for cell in row] for row in rows], n_text=len(columns), gap=2)
    for column in built.columns[:first]:
        column.no_wrap = True
    console.print(built)


def _short(event: Event) -> str:
    return datetime.datetime.fromtimestamp(event.at, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")


def _writer(form: str, console: Console) -> Any:
    """Writes one event; of a table, a line by itself."""
    if form == "jsonl":
        return lambda event: _write_line(console.file, json.dumps(_values(event)))
    if form == "csv":
        rows = csv.writer(console.file, lineterminator="\n")
        rows.writerow(COLUMNS)
        return lambda event: rows.writerow([*list(_values(event).values())[:-1], json.dumps(event.data)])
    return lambda event: _write_line(console.file, _line(event))


def _values(event: Event) -> dict[str, Any]:
    values = (event.time, round(event.elapsed_s, 3), event.level.value, event.kind, event.text, event.data)
    return dict(zip(COLUMNS, values, strict=True))


def _line(event: Event) -> str:
    return printable(f"{duration(event.elapsed_s):>{_WIDTHS[0]}}  {event.level.value:<{_WIDTHS[1]}}{event.kind}: {event.sentence}")


def _write_line(file: IO[str], line: str) -> None:
    print(line, file=file)
