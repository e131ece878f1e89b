"""The parent's own side of the ledger. It is written while the hosts work on the next tasks, so that nobody waits for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from coterie.errors import RunError
from coterie.record.ledger import Booked, rows_of
from coterie_server.session.ports import Recorder
from coterie_server.session.run_state import Host, RunState


class Bookings:
    """Rows to be written about messages that were sent and received, and other work that can wait."""

    def __init__(self, state: RunState, recorder: Recorder) -> None:
        self._state, self._recorder = state, recorder
        self._waiting: deque[tuple[Host, tuple[int, int], Booked, bool]] = deque()  # stage and round, the message, whether it is useful
        self._work: Callable[[], None] | None = None

    def add(self, host: Host, booked: Booked, *, is_useful: bool) -> None:
        """Puts off the booking of a message until the next `settle`."""
        self._waiting.append((host, (self._state.stage, self._state.round), booked, is_useful))

    def meanwhile(self, work: Callable[[], None]) -> None:
        """Puts off work until the next exchange is under way, or the next `settle`."""
        if self._work is not None:  # the round before asked nobody
            self.settle()
        self._work = work

    def settle(self) -> None:
        """Does what was put off: books messages in their order, then the work of `meanwhile`. RunError: full disk."""
        while self._waiting:
            host, where, booked, is_useful = self._waiting.popleft()
            rows = zip(rows_of(*booked), [entry.users for entry in booked[0]], strict=True)
            self._recorder.book(host.name, where, rows, is_useful)
            host.n_booked += len(booked[0])
        work, self._work = self._work, None
        if work is not None:
            work()

    def settle_or_fail(self) -> None:
        """The same, but a full disk ends the run, not the session that happens to notice it."""
        self.write_or_fail(self.settle)

    def write_or_fail(self, write: Callable[[], None]) -> None:
        """Writes; RunError is the end of the run."""
        try:
            write()
        except RunError as error:
            self._state.fail(error)
