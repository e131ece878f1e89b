"""The log of a role: sentences for a person, or one JSON object per line for a machine.

There is a line for each event, for each stage, and for a few seconds of progress, but none for a message or a round. A JSON line has `time`
(ISO 8601, UTC), `level`, `event` and `message`, then where it happened (role, run, stage, round) and details (host, seq, ...).

It needs no logging library: a process has one log, and a client must start quickly. This module imports no server.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from coterie_deploy.terminal.printable import printable, without_nan


class LogFormat(StrEnum):
    text = "text"
    json = "json"


class LogLevel(StrEnum):
    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"

    @property
    def rank(self) -> int:
        return list(LogLevel).index(self)


_KINDS = {
    LogLevel.debug: "task begins,task ends",
    LogLevel.info: "start,journal,memory,placed,join,features,model,data,links,replay,resume,back,stop,note,finished",
    LogLevel.warning: "insecure,late,lost,numerics,refused,restart,skip,wait,warning",
    LogLevel.error: "failed",
}
LEVELS = {kind: level for level, kinds in _KINDS.items() for kind in kinds.split(",")}  # of the kinds of event in a run's database
NOTE = "note: "  # how a line of a host's log begins that is a note on its data
_HEAD = ("time", "level", "event", "message")


def level_of(kind: str) -> LogLevel:
    """The level of a kind of event; kinds of other versions are `info`."""
    return LEVELS.get(kind, LogLevel.info)


_print = functools.partial(print, flush=True)


@dataclass(frozen=True)
class Log:
    """The log of a role. Each JSON line has the fields `bound`, and those that `where` returns then."""

    format: LogFormat = LogFormat.text
    level: LogLevel = LogLevel.info
    write: Callable[[str], None] = _print  # one line
    bound: Mapping[str, Any] = field(default_factory=dict)
    where: Callable[[], Mapping[str, Any]] = dict

    @property
    def is_json(self) -> bool:
        return self.format is LogFormat.json

    def with_(self, where: Callable[[], Mapping[str, Any]] | None = None, **bound: Any) -> Log:
        return replace(self, bound={**self.bound, **bound}, where=where or self.where)

    def says(self, level: LogLevel) -> bool:
        return level.rank >= self.level.rank

    def say(self, event: str, message: str, level: LogLevel = LogLevel.info, **what: Any) -> None:
        """Writes a line, unless its level is too low."""
        if self.says(level):
            details = {**self.bound, **self.where(), **what} if self.is_json else {}
            self.write(json_line(level, event, message, details) if self.is_json else printable(message))


def json_line(level: LogLevel, event: str, message: str, what: Mapping[str, Any]) -> str:
    """A JSON line; NaN and infinity become null."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    head = {"time": now, "level": level.value, "event": event, "message": message}
    return json.dumps({**head, **{key: value for key, value in without_nan(what).items() if key not in _HEAD}}, allow_nan=False)


def on_console(console: Any, log_format: LogFormat, level: LogLevel) -> Log:
    """A log on a `rich` console: sentences above its display, JSON as it is."""
    if log_format is LogFormat.json:
        return Log(log_format, level, functools.partial(print, file=console.file, flush=True))
    return Log(log_format, level, functools.partial(console.print, markup=False, highlight=False, emoji=False, soft_wrap=True))


def failure_line(sentence: str, code: int, trace: str = "") -> str:
    """The last line of a JSON log; `trace` is the traceback of code that the experiment names."""
    return json_line(LogLevel.error, "exit", sentence, {"code": code, **({"traceback": trace} if trace else {})})


def wants_json(arguments: list[str]) -> bool:
    """Whether a command line, perhaps with other mistakes, asks for a JSON log."""
    words = [word for argument in arguments for word in argument.split("=", 1)]
    values = [value for name, value in itertools.pairwise(words) if name == "--log-format"]
    return values[-1:] == [LogFormat.json.value]
