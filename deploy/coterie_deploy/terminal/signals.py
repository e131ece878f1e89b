"""What stops a role from outside: SIGINT, SIGTERM, and for a launched client the end of its standard input."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator

EXIT_CODES = {"SIGINT": 130, "SIGTERM": 143}
LAUNCHER = "its launcher"
ECHO_S = 1.0  # a supervisor may signal a whole group and then its leader pass the signal on
STAY_S = 5.0  # of a member, for a parent that was asked to stop at the same time and ends its round


class Stop(asyncio.Event):
    """Set by the first thing that asks to stop; `by` says what it was. `leave` is set when a member is to leave its parent, too."""

    by = ""

    def __init__(self) -> None:
        super().__init__()
        self.leave = asyncio.Event()

    def ask(self, by: str) -> None:
        self.by = self.by or by
        self.set()
        if by == LAUNCHER:
            self.leave.set()
        else:
            asyncio.get_running_loop().call_later(STAY_S, self.leave.set)

    @property
    def exit_code(self) -> int:
        """128 + the signal, as in shells: for supervisors, the work is not done."""
        return EXIT_CODES.get(self.by, EXIT_CODES["SIGTERM"])


@contextlib.contextmanager
def stopping_on_signals() -> Iterator[Stop]:
    """While the block runs, the first SIGINT or SIGTERM asks politely; a later one ends the process at once.

    A second SIGTERM within a moment is an echo of the first: the same request reached the process twice.
    """
    loop, stop = asyncio.get_running_loop(), Stop()
    numbers = (signal.SIGINT, signal.SIGTERM)

    def forget() -> None:
        for number in numbers:
            loop.remove_signal_handler(number)

    def ask(by: str) -> None:
        if stop.by:
            return
        stop.ask(by)
        loop.remove_signal_handler(signal.SIGINT)
        loop.call_later(ECHO_S, loop.remove_signal_handler, signal.SIGTERM)

    for number in numbers:
        loop.add_signal_handler(number, ask, number.name)
    try:
        yield stop
    finally:
        forget()


def stopping_at_end_of_input(stop: Stop) -> contextlib.AbstractContextManager[None]:
    """A launched process ends with its launcher: the pipe to its standard input closes however the launcher dies."""
    return stopping_at_end_of(sys.stdin.fileno(), stop)


@contextlib.contextmanager
def stopping_at_end_of(descriptor: int, stop: Stop) -> Iterator[None]:
    """While the block runs, the end of a pipe asks to stop."""
    loop = asyncio.get_running_loop()

    def read() -> None:
        if not os.read(descriptor, 4096):
            loop.remove_reader(descriptor)
            stop.ask(LAUNCHER)

    loop.add_reader(descriptor, read)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
