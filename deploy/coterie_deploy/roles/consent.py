"""The owner of a host decides what it serves, on a terminal or by `--accept`. The host remembers it, as ssh does known hosts.

The memory is `accepted.json` in the state folder: for each host name the parts of the experiment that count (`coterie.experiment.consent`)
and their hash. The host reads it before any data. An experiment with another hash is refused, on a terminal too: nobody should answer a
changed request by habit. `--accept HASH` accepts it, instead of the earlier one.
"""

import contextlib
import datetime
import fcntl
import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from coterie.errors import ConfigError, RunError
from coterie.experiment.config import Experiment
from coterie.experiment.consent import ANY, changed_parts, consent_parts, hash_of, refusal
from coterie.record.files import private_folder, written_whole
from coterie_deploy.roles.consent_page import asked_lines, in_terminal
from coterie_deploy.telemetry.logs import Log
from coterie_deploy.terminal.printable import printable

MEMORY = "accepted.json"
ANSWER_S = 600.0  # for an answer on the terminal
_FORMAT = 1
_LOOK_S = 0.2  # between two looks at whether the process is to stop
_MAX_BYTES = 16 << 20
_MAX_SHOWN = 5  # changed keys

Answer = Literal["yes", "no", "stopped", "late"]
Ask = Callable[[str], Answer]


@dataclass(frozen=True)
class Asked:
    """What the server that a host joins asks of it."""

    host: str
    server: str
    experiment: Experiment
    state: Path
    accept: str | None = None  # of the command line: a hash, "any", or nothing


def accepted(asked: Asked, log: Log, ask: Ask | None) -> bool:
    """Whether the owner has accepted the experiment; False when the process was asked to stop meanwhile.

    `ask` puts a question on the terminal; None without a terminal. ConfigError with finding C1 when the owner has not accepted it.
    """
    parts = consent_parts(asked.experiment)
    found = hash_of(parts)

    def serves(what: str) -> bool:
        log.say("consent", f"host {asked.host!r} serves {what}", consent=found)
        return True

    if asked.accept == ANY:
        return serves(f"any experiment (--accept any); {found} is not remembered")
    known = None if asked.accept == found else _remembered(asked)
    changed = [] if known is None else changed_parts(known["asked"], parts)
    if asked.accept not in (None, found):
        raise refusal(f"the coordinator asks host {asked.host!r} for {found}, but --accept is {asked.accept}{_named(changed)}", changed)
    if known is not None and known["hash"] == found:
        return serves(f"{found}, as accepted before")
    if known is not None:
        sentence = f"host {asked.host!r} has accepted {known['hash']}, and the coordinator now asks for {found}{_named(changed)}"
        raise refusal(f"{sentence}; if that is right, start with --accept {found}", changed)
    if asked.accept is None and ask is None:
        raise refusal(
            f"nobody has accepted the coordinator's experiment for host {asked.host!r}, and there is no terminal to ask: "
            f"it is {found}; compare it with `coterie data EXPERIMENT --hash` and start with --accept {found}"
        )
    if ask is not None and asked.accept is None and not _answered(asked, found, ask):
        return False
    _remember(asked, parts, found)
    return serves(f"{found}, as accepted")


def _answered(asked: Asked, found: str, ask: Ask) -> bool:
    """Whether the owner says yes on the terminal; False when the process was asked to stop."""
    head = printable(f"The server at {asked.server} asks host {asked.host!r} for this (hash {found}):")
    question = printable(f"Serve it, and remember that in {asked.state / MEMORY}? [y/N] ")
    answer = ask("\n".join([head, *in_terminal(asked_lines(asked.experiment)), question]))
    if answer == "late":
        raise refusal(f"nobody has answered for host {asked.host!r} within {ANSWER_S:g} s whether it serves {found}, which counts as no")
    if answer == "no":
        raise refusal(f"the owner of host {asked.host!r} has not accepted {found}")
    return answer == "yes"


def _named(changed: list[str]) -> str:
    """The changed keys, in words."""
    if not changed:
        return ""
    more = f" and {len(changed) - _MAX_SHOWN} more" if len(changed) > _MAX_SHOWN else ""
    return f": {', '.join(changed[:_MAX_SHOWN])}{more} changed"


# ---- the terminal


def terminal(is_stopped: Callable[[], bool]) -> Ask | None:
    """A question on the terminal that is this process's standard input; None if that is no terminal."""
    try:
        descriptor = sys.stdin.fileno()
    except (AttributeError, ValueError, OSError):
        return None
    if not os.isatty(descriptor):
        return None

    def ask(text: str) -> Answer:
        sys.stderr.write(text)
        sys.stderr.flush()
        deadline, typed = time.monotonic() + ANSWER_S, b""
        while not is_stopped():
            if time.monotonic() > deadline:
                return "late"
            if not select.select([descriptor], [], [], _LOOK_S)[0]:
                continue
            try:
                more = os.read(descriptor, 1024)
            except OSError:  # the terminal is gone
                return "no"
            typed += more
            if not more or b"\n" in typed or len(typed) > 1024:
                return "yes" if typed.strip().lower() in (b"y", b"yes") else "no"
        return "stopped"

    return ask


# ---- the memory


def _remembered(asked: Asked) -> Mapping[str, Any] | None:
    """What the owner has accepted for this host; None for nothing."""
    return _read(asked.state / MEMORY).get(asked.host)


def _remember(asked: Asked, parts: Mapping[str, Any], found: str) -> None:
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    with _alone(asked.state):
        hosts = _read(asked.state / MEMORY)
        if hosts.get(asked.host, {}).get("hash") == found:
            return
        hosts[asked.host] = {"hash": found, "accepted": now, "asked": parts}
        with written_whole(asked.state / MEMORY) as file:
            file.write(json.dumps({"format": _FORMAT, "hosts": hosts}, indent=1, sort_keys=True).encode())


@contextlib.contextmanager
def _alone(state: Path) -> Iterator[None]:
    """While the block runs, no other host with this state folder writes the memory."""
    try:
        private_folder(state)
        lock = (state / f"{MEMORY}.lock").open("ab")
    except OSError as error:
        raise RunError(f"cannot write the state folder {state}: {error.strerror or error}") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _read(path: Path) -> dict[str, Any]:
    """The hosts in the memory. ConfigError when the file is no such memory: without this error the owner would be asked again."""
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(_MAX_BYTES))
        hosts: dict[str, Any] = content["hosts"]
        are_whole = all(isinstance(one["hash"], str) and isinstance(one["asked"], dict) for one in hosts.values())
        if content["format"] != _FORMAT or not are_whole:
            raise ValueError("another format")
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} is not what a client has written there: remove it to be asked again") from error
    return hosts


__all__ = ["ANSWER_S", "MEMORY", "Answer", "Ask", "Asked", "accepted", "terminal"]
