"""What a role says while it works: sentences for a person, or a JSON object a line for a machine.

A line is for an event of the run, for a stage, or for a few seconds of progress; no line is for a message or a round. A JSON line has
`time` (ISO 8601, UTC), `level`, `event` and `message`, then what is known of where it happened (role, run, stage, round) and of what it was
(host, seq, ...).

It is made with the standard library's json and no logging library: one process has one log, and a client is to start at once. This module
imports no server.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from coterie_deploy.terminal.printable import printable


class LogFormat(StrEnum):
    """For whom."""

    text = "text"
    json = "json"


class LogLevel(StrEnum):
    """From how bad on."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"

    @property
    def rank(self) -> int:
        """Its place, from 0."""
        return list(LogLevel).index(self)


LEVELS = {  # of the kinds of event in a run's database
    "task begins": LogLevel.debug,
    "task ends": LogLevel.debug,
    "start": LogLevel.info,
    "join": LogLevel.info,
    "features": LogLevel.info,
    "data": LogLevel.info,
    "links": LogLevel.info,
    "replay": LogLevel.info,
    "resume": LogLevel.info,
    "back": LogLevel.info,
    "finished": LogLevel.info,
    "insecure": LogLevel.warning,
    "late": LogLevel.warning,
    "lost": LogLevel.warning,
    "numerics": LogLevel.warning,
    "refused": LogLevel.warning,
    "restart": LogLevel.warning,
    "skip": LogLevel.warning,
    "wait": LogLevel.warning,
    "warning": LogLevel.warning,
    "failed": LogLevel.error,
}
NOTE = "note: "  # how a line of a host's log begins that is a note on its data
_HEAD = ("time", "level", "event", "message")


def level_of(kind: str) -> LogLevel:
    """Of an event; one that another version has written is news."""
    return LEVELS.get(kind, LogLevel.info)


def _print(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def _nowhere() -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Log:
    """Where a role says what. `bound` is said with everything, `where` asked each time."""

    format: LogFormat = LogFormat.text
    level: LogLevel = LogLevel.info
    write: Callable[[str], None] = _print  # one line
    bound: Mapping[str, Any] = field(default_factory=dict)
    where: Callable[[], Mapping[str, Any]] = _nowhere

    @property
    def is_json(self) -> bool:
        """Whether a machine reads it."""
        return self.format is LogFormat.json

    def with_(self, where: Callable[[], Mapping[str, Any]] | None = None, **bound: Any) -> Log:
        """The same that also says this."""
        return replace(self, bound={**self.bound, **bound}, where=where or self.where)

    def says(self, level: LogLevel) -> bool:
        """Whether a line of this level is written."""
        return level.rank >= self.level.rank

    def say(self, event: str, message: str, level: LogLevel = LogLevel.info, **what: Any) -> None:
        """Writes a line, unless its level is too low."""
        if not self.says(level):
            return
        if self.is_json:
            self.write(json_line(level, event, message, {**self.bound, **self.where(), **what}))
        else:
            self.write(printable(message))


def json_line(level: LogLevel, event: str, message: str, what: Mapping[str, Any]) -> str:
    """A line for a machine; a number that JSON does not have is null."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    head = {"time": now, "level": level.value, "event": event, "message": message}
    return json.dumps({**head, **{key: _plain(value) for key, value in what.items() if key not in _HEAD}}, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def on_console(console: Any, log_format: LogFormat, level: LogLevel) -> Log:
    """A log on a `rich` console: sentences above what it displays, JSON as it is."""

    def write_sentence(line: str) -> None:
        console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def write_json(line: str) -> None:
        print(line, file=console.file, flush=True)

    return Log(log_format, level, write_json if log_format is LogFormat.json else write_sentence)


def failure_line(sentence: str, code: int, trace: str = "") -> str:
    """The last line of a process whose log is for machines; `trace` is that of code that the experiment names."""
    return json_line(LogLevel.error, "exit", sentence, {"code": code, **({"traceback": trace} if trace else {})})


def wants_json(arguments: list[str]) -> bool:
    """Whether a command line asks for JSON, also one that is wrong elsewhere."""
    given = [argument.partition("=") for argument in arguments]
    values = [
        value or (arguments[place + 1 : place + 2] or [""])[0] for place, (name, _, value) in enumerate(given) if name == "--log-format"
    ]
    return values[-1:] == [LogFormat.json.value]
