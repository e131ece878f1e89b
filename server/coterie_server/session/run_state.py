"""Where a run stands for its hub: its exchange, stage and round, whether it has started, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from coterie.errors import CoterieError
from coterie.v1 import session_pb2
from coterie.wire.messages import Message
from coterie_server.interface.wanted import Wanted
from coterie_server.session.ports import Tracer


@dataclass
class Pending:
    """The exchange under way."""

    seq: int
    waiting: set[str]  # hosts whose answers are missing
    answers: dict[str, list[Message]]
    done: asyncio.Future[None]
    since: float
    wanted: Sequence[Wanted] = ()

    def leave_out(self, hosts: Iterable[str]) -> None:
        """No longer waits for the answers of these hosts."""
        self.waiting.difference_update(hosts)
        if not self.waiting and not self.done.done():
            self.done.set_result(None)

    def answer(self, host: str, messages: list[Message]) -> None:
        """Takes the answer of a host."""
        self.answers[host] = messages
        self.leave_out((host,))


class RunState:
    """What all parts of a hub must know of the run. `reserved`: the last number that an exchange of an earlier attempt may have."""

    def __init__(self, attempt: int, reserved: int, tracer: Tracer | None) -> None:
        self.attempt = attempt
        self.tracer = tracer
        self.seq = 0
        self.earlier = self.reserved = reserved
        self.stage = 0
        self.round = 0
        self.stage_json = ""  # the settings of the stage
        self.has_started = False  # the join barrier has been passed in this attempt
        self.pending: Pending | None = None
        self.failure: CoterieError | None = None
        self.finish: session_pb2.JoinResponse | None = None  # what hosts are told at the end
        self._changed = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, so that nobody can join any more."""
        return self.finish is not None

    @property
    def furthest(self) -> int:
        """The last exchange that a host of this run can have seen."""
        return max(self.seq, self.earlier)

    def awaits(self, host: str) -> bool:
        """Whether the exchange under way needs the host's answer."""
        return self.pending is not None and host in self.pending.waiting

    def fail(self, error: CoterieError) -> None:
        """The run cannot go on: whoever waits gets this error."""
        self.failure = self.failure or error
        if self.pending is not None and not self.pending.done.done():
            self.pending.done.set_exception(self.failure)
        self.changed()

    def raise_failure(self) -> None:
        """Raises why the run has failed, if it has."""
        if self.failure is not None:
            raise self.failure

    def changed(self) -> None:
        """Wakes whoever waits for hosts to come, to go, or to bring something."""
        self._changed.set()

    async def change_within(self, seconds: float) -> None:
        """Returns at the next change, at the latest after so many seconds."""
        self._changed.clear()
        try:
            await asyncio.wait_for(self._changed.wait(), max(seconds, 0.0))
        except TimeoutError:
            return
