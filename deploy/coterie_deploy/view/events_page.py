"""`coterie events`: the events of a run, finished or under way, including those of its aggregators."""

import datetime
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from coterie.errors import ConfigError, RunError
from coterie.text.names import similar_names
from coterie_deploy.telemetry.logs import LEVELS, LogLevel, level_of
from coterie_deploy.terminal.printable import printable
from coterie_deploy.terminal.tables import duration, is_narrow, say_left_out, table_of
from coterie_deploy.view.ledger_tables import write_lines
from coterie_server.record import summary
from coterie_server.record.rundb import read_run
from coterie_server.run.coordinator import is_held

COLUMNS = ("time", "elapsed_s", "level", "kind", "text", "data")
_AGO = re.compile(r"(\d+(?:\.\d+)?)(s|min|m|h|d)")
_UNITS_S = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_LOOK_EVERY_S = 0.5


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
        return level_of(self.kind)

    @property
    def sentence(self) -> str:
        """The text, with the name of the aggregator if it happened below one."""
        at = self.data.get("aggregator")
        return self.text if at is None or repr(at) in self.text else f"at {at!r}: {self.text}"

    @property
    def values(self) -> tuple[Any, ...]:
        """The values of `COLUMNS`; times are ISO 8601, UTC."""
        time = datetime.datetime.fromtimestamp(self.at, datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        return (time, round(self.elapsed_s, 3), self.level.value, self.kind, self.text, self.data)


def print_events(folder: Path, asked: Asked, form: str, console: Console, *, follow: bool = False) -> None:
    """Prints the events of a run; with `follow` also new ones, until no coordinator works in the run folder.

    ConfigError for a folder without a run, a kind that no run has, and a wrong time; RunError if a followed run failed or was killed.
    """
    since = _since(asked.since)
    with read_run(folder) as connection:
        _check_kinds(asked.kinds, {kind for (kind,) in connection.execute("SELECT DISTINCT kind FROM events")})
    events = (
        event
        for event in _events(folder, console, follow=follow)
        if event.level.rank >= asked.level.rank and event.at >= since and (not asked.kinds or event.kind in asked.kinds)
    )
    if form != "table":
        write_lines(form, console.file, COLUMNS, (event.values for event in events), as_ascii=True)
    elif not follow:
        _print_table(list(events), console)
    else:
        for event in events:
            line = f"{duration(event.elapsed_s):>10}  {event.level.value:<8}{event.kind}: {event.sentence}"
            print(printable(line), file=console.file)
    if follow:
        _check_ending(folder)


def _check_ending(folder: Path) -> None:
    """RunError, as of `coterie watch`, for a run that has not finished and at which nobody works."""
    from coterie_deploy.read.run_status import Status, ending, status_of  # noqa: PLC0415 - only here, and slow to import

    with read_run(folder) as connection:
        status, reason = status_of(summary.facts(connection).get("status", ""), is_at_work=False)
    if status is not Status.finished:
        raise RunError(ending(status, reason))


def _events(folder: Path, console: Console, *, follow: bool) -> Iterator[Event]:
    """The events of a run in order of time, each once; with `follow` those to come too."""
    row, began = 0, None
    while True:
        is_at_work = follow and is_held(folder)  # asked before the events are: what was written until then is among them
        with read_run(folder) as connection:
            found = connection.execute("SELECT rowid, at, kind, text, data FROM events WHERE rowid > ? ORDER BY rowid", (row,)).fetchall()
        found.sort(key=lambda one: one[1])
        row = max((one[0] for one in found), default=row)
        began = found[0][1] if began is None and found else began
        for _, at, kind, text, data in found:
            yield Event(at, at - (began or at), kind, text, json.loads(data))
        console.file.flush()
        if not is_at_work:
            return
        time.sleep(_LOOK_EVERY_S)


def _check_kinds(wanted: Sequence[str], found: set[str]) -> None:
    known = sorted(found | LEVELS.keys())
    for kind in wanted:
        if kind not in known:
            listed = similar_names(kind, known) or known
            raise ConfigError(f"--kind is {kind!r}, want one of {', '.join(listed)}")


def _since(text: str | None) -> float:
    """The time in seconds since the epoch."""
    if text is None:
        return float("-inf")
    if match := _AGO.fullmatch(text.strip()):
        return time.time() - float(match[1]) * _UNITS_S[match[2]]
    try:
        return datetime.datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError):
        raise ConfigError(f"--since is {text!r}, want a time such as 2026-01-31T12:00:00Z, or how long ago: 90s, 5m, 2h, 1d") from None


def _print_table(events: Sequence[Event], console: Console) -> None:
    if not events:
        console.print("no such events")
        return
    columns = {
        "time (UTC)": [f"{datetime.datetime.fromtimestamp(event.at, datetime.UTC):%Y-%m-%d %H:%M:%S}" for event in events],
        "elapsed": [duration(event.elapsed_s) for event in events],
        "level": [event.level.value for event in events],
        "kind": [event.kind for event in events],
        "text": [event.sentence for event in events],
    }
    left_out = ["time (UTC)", "level"] if is_narrow(console) else []
    for name in left_out:
        del columns[name]
    built = table_of("Events", {name: [*map(printable, cells)] for name, cells in columns.items()}, n_text=len(columns))
    for column in built.columns[:-1]:
        column.no_wrap = True
    console.print(built)
    say_left_out(console, left_out)
