"""The runs below a folder, and the list of them.

The name of a run is the path of its folder from there. A name from a request is looked up among the runs found, never used as a path.
"""

import contextlib
import json
import os
import sqlite3
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from coterie.errors import CoterieError, RunError
from coterie.experiment.config import experiment_from
from coterie.wire.codec import GRPC_FRAME_HEADER_BYTES
from coterie_deploy.read.report import metric_name
from coterie_deploy.read.run_status import Status, Watcher, status_of
from coterie_deploy.terminal.printable import printable
from coterie_deploy.terminal.tables import figure
from coterie_server.record import summary
from coterie_server.record.rundb import open_run
from coterie_server.run.coordinator import is_held

_MAX_DEPTH = 6  # of a run below the folder
_MAX_FOLDERS = 20_000  # looked into
_SEARCH_EVERY_S = 2.0
_SEARCH_AGAIN_S = 0.2  # where a run is asked for that was not there
_MAX_WATCHED = 16  # runs whose rounds are kept in memory
_BYTES = f"""
SELECT COALESCE(MAX(row), ?1), COALESCE(SUM(message_bytes) + {GRPC_FRAME_HEADER_BYTES} * SUM(frames), 0)
FROM ledger WHERE row > ?1 AND useful
"""  # noqa: S608 - a constant of ours
_RESUMED = "SELECT COUNT(*) FROM events WHERE kind = 'resume'"
_FILES = ("run.db", "run.db-wal")


@dataclass(frozen=True)
class Entry:
    """A line of the list. `problem`: why the run cannot be read, in which case the other fields are empty; else ""."""

    run: str
    problem: str = ""
    name: str = ""
    status: str = ""
    method: str = ""
    users: int = 0
    stage: str = ""  # the newest, or that of the result
    stages: int = 0  # that have begun
    rounds: int = 0  # of all stages
    result: str = ""
    wire_bytes: int = 0
    started: float | None = None  # seconds since the epoch


@dataclass(frozen=True)
class Sent:
    """The useful wire bytes up to a row of the ledger; `life` changes when a resumed run makes earlier rows useless."""

    life: tuple[str, str, int]
    row: int = 0
    wire_bytes: int = 0


class Runs:
    """The runs below a folder, for several threads."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self._lock = threading.Lock()
        self._found: dict[str, Path] = {}
        self._searched_at = -_SEARCH_EVERY_S
        self._entries: dict[str, tuple[object, Entry]] = {}
        self._sent: dict[str, Sent] = {}
        self._watched: OrderedDict[str, Watcher] = OrderedDict()

    def folders(self) -> dict[str, Path]:
        """The run folders by name, found anew every few seconds."""
        with self._lock:
            if time.monotonic() - self._searched_at >= _SEARCH_EVERY_S:
                self._found = find_runs(self.top)
                self._searched_at = time.monotonic()
            return self._found

    def has(self, name: str) -> bool:
        """Whether there is such a run, also one that has just begun."""
        if name not in self.folders():
            with self._lock:
                if time.monotonic() - self._searched_at >= _SEARCH_AGAIN_S:
                    self._searched_at = -_SEARCH_EVERY_S
        return name in self.folders()

    def entries(self) -> list[Entry]:
        """A line for each run; one that has not changed is not read again."""
        folders = self.folders()
        for name in self._entries.keys() - folders.keys():
            self._entries.pop(name, None)
            self._sent.pop(name, None)
        for name, folder in folders.items():
            stamp = _stamp(folder)
            if name in self._entries and self._entries[name][0] == stamp:
                continue
            try:
                entry, self._sent[name] = entry_of(name, folder, self._sent.get(name))
            except (CoterieError, sqlite3.Error, ValueError, TypeError, OSError) as error:
                entry = Entry(name, printable(" ".join(str(error).split())))
            self._entries[name] = (stamp, entry)
        return [self._entries[name][1] for name in folders]

    def watched(self, name: str) -> Watcher | None:
        """The watcher of a run, None when there is no such run."""
        folder = self.folders().get(name)
        with self._lock:
            if folder is None:
                self._watched.pop(name, None)
                return None
            watched = self._watched.setdefault(name, Watcher(folder))
            self._watched.move_to_end(name)
            if len(self._watched) > _MAX_WATCHED:
                self._watched.popitem(last=False)
            return watched


def find_runs(top: Path) -> dict[str, Path]:
    """The run folders at and below a folder; what is inside a run folder, or behind a symbolic link, is none."""
    found: dict[str, Path] = {}
    for n_folders, (here, below, files) in enumerate(os.walk(top), start=1):
        folder = Path(here)
        parts = folder.relative_to(top).parts
        if "run.db" in files:  # names of folders may be any bytes
            names = (printable(os.fsencode(part).decode("utf-8", "backslashreplace")) for part in parts)
            found["/".join(names) or "."] = folder
        if "run.db" in files or len(parts) >= _MAX_DEPTH or n_folders >= _MAX_FOLDERS:
            below.clear()
        below[:] = sorted(name for name in below if not name.startswith("."))
    return found


def _stamp(folder: Path) -> object:
    """A value that changes with the files of the run and the presence of its coordinator."""
    stats = []
    for name in _FILES:
        with contextlib.suppress(OSError):
            found = (folder / name).stat()
            stats.append((name, found.st_ino, found.st_size, found.st_mtime_ns))
    return (is_held(folder), *stats)


def entry_of(name: str, folder: Path, before: Sent | None = None) -> tuple[Entry, Sent]:
    """A line of the list, and the bytes so far. CoterieError, or an error of sqlite3 or json, for a run that cannot be read."""
    is_at_work = is_held(folder)
    with contextlib.closing(open_run(folder)) as connection:
        facts = summary.facts(connection)
        if "status" not in facts:
            raise RunError("the run has not begun")
        stages = summary.stages(connection)
        (n_users,) = connection.execute("SELECT COUNT(*) FROM members").fetchone()
        sent = _sent(connection, facts, before)
        (started,) = connection.execute("SELECT MIN(at) FROM events WHERE kind = 'start'").fetchone()
    status, result = status_of(facts["status"], is_at_work=is_at_work)
    final = next((stage for stage in stages if stage.name == facts.get("final_stage")), stages[-1] if stages else None)
    frozen = json.loads(facts.get("experiment", "{}"))
    if status is not Status.failed and final is not None and "heldout_metric" in final.results:
        result = f"{_metric(frozen)} {figure(final.results['heldout_metric'])}"
    method, stage = str(frozen.get("method", {}).get("name", "")), "" if final is None else final.name
    n_rounds = sum(one.rounds for one in stages)
    known = (facts.get("name", ""), str(status), method, n_users, stage, len(stages), n_rounds, result, sent.wire_bytes, started)
    return Entry(name, "", *known), sent


def _sent(connection: sqlite3.Connection, facts: Mapping[str, str], before: Sent | None) -> Sent:
    """Only rows that are new are read: the list is asked for every few seconds, and a ledger may have millions."""
    life = (facts.get("run_id", ""), facts.get("attempt", ""), connection.execute(_RESUMED).fetchone()[0])
    since = before if before is not None and before.life == life else Sent(life)
    row, n_bytes = connection.execute(_BYTES, (since.row,)).fetchone()
    return Sent(life, row, since.wire_bytes + n_bytes)


_LOSSES = ("least_squares", "huber", "poisson", "logistic", "squared_hinge")


def _metric(frozen: dict[str, object]) -> str:
    """The metric on held-out rows; "metric" for a loss from outside, whose code is not imported for this."""
    with contextlib.suppress(CoterieError):
        experiment = experiment_from(frozen)
        if experiment.model is not None or experiment.problem.loss in _LOSSES:
            return metric_name(experiment)
    return "metric"
