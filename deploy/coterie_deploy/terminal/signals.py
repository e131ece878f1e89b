"""What stops a role from outside: SIGINT, SIGTERM, and for a launched client the end of its standard input."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator

EXIT_CODES = {"SIGINT": 130, "SIGTERM": 143}
LAUNCHER = "its launcher"


class Stop(asyncio.Event):
    """Set by the first thing that asks to stop; `by` says what it was."""

    by = ""

    def ask(self, by: str) -> None:
        """Asks to stop."""
        self.by = self.by or by
        self.set()

    @property
    def exit_code(self) -> int:
        """128 + the signal, as shells have it; for supervisors the work is not done."""
        return EXIT_CODES.get(self.by, EXIT_CODES["SIGTERM"])


@contextlib.contextmanager
def stopping_on_signals() -> Iterator[Stop]:
    """While the block runs, the first SIGINT or SIGTERM asks politely; a second one ends the process at once."""
    loop, stop = asyncio.get_running_loop(), Stop()
    listened: list[signal.Signals] = []

    def forget() -> None:
        while listened:
            loop.remove_signal_handler(listened.pop())

    def ask(by: str) -> None:
        stop.ask(by)
        forget()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ask, number.name)
        listened.append(number)
    try:
        yield stop
    finally:
        forget()


@contextlib.contextmanager
def stopping_at_end_of_input(stop: Stop) -> Iterator[None]:
    """A launched process ends with its launcher: the pipe to its standard input closes however the launcher dies."""
    loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()

    def read() -> None:
        if not os.read(descriptor, 4096):
            loop.remove_reader(descriptor)
            stop.ask(LAUNCHER)

    loop.add_reader(descriptor, read)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
