"""The parent's side of all sessions: the `Federation` that a method speaks to, and what transports report to.

No I/O and no clock of its own: transports report events (a hello, a frame, a lost stream) and carry what `Link` is told to send; time comes
in through `tick`. All calls are made on one event loop. Each duty is an object of its own, with its own state: this module only says
which event is whose, and makes an exchange of their parts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coterie.arrays import Indices
from coterie.errors import CoterieError, ProtocolError, RunError
from coterie.experiment.config import Experiment
from coterie.findings import Finding
from coterie.v1 import session_pb2
from coterie.wire.codec import Received
from coterie.wire.messages import Message
from coterie.wire.precision import Precision
from coterie_server.interface.half import Members, Replies
from coterie_server.interface.merge import merged, weights_of
from coterie_server.interface.wanted import Wanted
from coterie_server.session import memory
from coterie_server.session.answers import Answers
from coterie_server.session.attendance import Attendance
from coterie_server.session.bookings import Bookings
from coterie_server.session.closing import Closing
from coterie_server.session.deadlines import Deadlines
from coterie_server.session.journal import Journal
from coterie_server.session.outbox import Outbox
from coterie_server.session.participation import Participation
from coterie_server.session.ports import Link, Recorder, Tracer
from coterie_server.session.roster import Roster
from coterie_server.session.run_state import Pending, RunState
from coterie_server.session.strikes import Strikes

_BLOCK = 1000  # exchanges that are numbered between two writes to the disk
_UNSAID = Finding("R6")  # why a run has failed, where nobody says


class Hub:
    """All sessions of one parent. `cluster`: this is the hub of the aggregator of that cluster, whose users alone may join.

    Exchanges are numbered in blocks that the recorder has written down before: `reserved` is the end of the last block of earlier attempts.
    So a host that comes back cannot claim to have seen an exchange that there never was.
    """

    def __init__(
        self,
        experiment: Experiment,
        run_id: str,
        recorder: Recorder,
        clock: Callable[[], float],
        *,
        attempt: int = 1,
        reserved: int = 0,
        keep_log: bool = True,
        cluster: str | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.rules = experiment.federation
        self.experiment = experiment
        self.cluster = cluster
        self.run_id = run_id
        self.recorder = recorder
        self.state = state = RunState(attempt, reserved, tracer)
        self.roster = roster = Roster(experiment, run_id, cluster)
        self.journal = journal = Journal(recorder, roster.hosts)
        self.bookings = bookings = Bookings(state, recorder)
        self.outbox = outbox = Outbox(state, bookings, Precision.of_run(experiment), keeps_log=keep_log)
        self.participation = participation = Participation(state, self.rules, roster.hosts, recorder, journal)
        self._attendance = attendance = Attendance(state, roster, journal, outbox, participation, clock)
        self._strikes = strikes = Strikes(experiment, state, roster, journal, bookings, participation, attendance)
        self.answers = Answers(state, roster, journal, bookings, outbox, strikes, clock)
        self._closing = Closing(state, roster, recorder, bookings, outbox, strikes, clock)
        self._deadlines = Deadlines(state, roster, journal, outbox, participation, attendance, strikes, clock)
        self._clock = clock

    @property
    def seq(self) -> int:
        """The number of the latest exchange."""
        return self.state.seq

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, so that nobody can join any more."""
        return self.state.is_over

    # ---- the run

    def go_on(self) -> None:
        """Goes on with the members of an earlier attempt before their hosts are back: what these are asked waits for them."""
        self.state.has_started = True

    async def gather(self) -> Members:
        """The join barrier: waits for the hosts, fixes the member order and welcomes everyone. RunError when too few came."""
        return await self._attendance.gather()

    def number(self, numbers: Indices, clusters: Indices) -> None:
        """An aggregator learns the numbers of its users and of their clusters in the whole run, and welcomes its hosts."""
        self._attendance.number(numbers, clusters)

    def begin_stage(self, number: int, stage_json: str) -> None:
        """The next exchange with each host carries the settings of this stage."""
        self.resume_stage(number, 0, stage_json)
        self.outbox.told = set()

    def resume_stage(self, number: int, round_number: int, stage_json: str) -> None:
        """Goes on in the middle of a stage: hosts that were told its settings are not told again."""
        self.state.stage, self.state.round, self.state.stage_json = number, round_number, stage_json

    async def exchange(self, *messages: Message, to: Indices | None = None, wanted: Sequence[Wanted] = ()) -> Replies:
        """See `Federation`."""
        if self.state.tracer is None:
            return await self._exchange(messages, to, wanted)
        with self.state.tracer.exchange(self.seq + 1, self.state.attempt, messages):
            return await self._exchange(messages, to, wanted)

    async def _exchange(self, messages: Sequence[Message], to: Indices | None, wanted: Sequence[Wanted]) -> Replies:
        state, roster, hosts = self.state, self.roster, self.roster.hosts
        layout = roster.layout
        state.raise_failure()
        if state.seq == state.reserved:
            self.recorder.reserve(state.seq + _BLOCK)
            state.reserved += _BLOCK
        state.seq += 1
        parts = roster.parts(messages, to)
        passed = self.participation.passed_over(parts)
        for name in passed:
            del parts[name]
        pending = Pending(state.seq, set(parts), {}, asyncio.get_running_loop().create_future(), self._clock(), wanted)
        state.pending = pending
        if state.seq in self.participation.skips:
            pending.leave_out(self.participation.skips[state.seq])
        reading = [name for name in parts if not hosts[name].owes]
        for name, listed in parts.items():
            self.outbox.ask(hosts[name], listed)
        link = hosts[reading[0]].link if len(reading) == len(parts) == 1 else None
        # A host that has taken all that was sent before takes one more small task without waiting; several are written side by side.
        if link is not None:
            await link.flush()
        elif pending.waiting:
            await self.outbox.written()
        self.bookings.settle_or_fail()
        if pending.done.done():
            await asyncio.sleep(0)  # where the transport answers at once, signals and deadlines get their turn here
        if pending.waiting or pending.done.done():
            await pending.done
        state.pending = None
        # Lost hosts were not sent anything either: should they come back, they are sent it too late.
        unasked = [*passed, *(name for name in parts if hosts[name].log and not hosts[name].log[-1].times)]
        answers = pending.answers
        answered = None if len(answers) == len(parts) and not passed else roster.users_of(answers)
        return Replies(merged(answers, layout), answered, weights_of(answers, layout), roster.users_of(unasked))

    def meanwhile(self, work: Callable[[], None]) -> None:
        """What nobody needs to wait for: it is done once the next exchange is under way, while the hosts work, or at the next `settle`."""
        self.bookings.meanwhile(work)

    def settle(self) -> None:
        """Does what was put off: books what was sent and received, in this order, and does the work of `meanwhile`. RunError: full disk."""
        self.bookings.settle()

    def request_snapshots(self) -> None:
        """The next task of each host asks it to write its state down."""
        for host in self.roster.hosts.values():
            host.snapshot_due = True

    def memory(self) -> dict[str, Any]:
        """What a resumed parent needs to know, as a snapshot tree."""
        return memory.memory_of(self.state, self.roster, self.outbox)

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Takes up the memory of an earlier attempt; the hosts have yet to come back."""
        memory.restore(tree, self.state, self.roster, self.outbox, self._clock())
        self.participation.restore()

    def stop(self, reason: str) -> None:
        """The run is to stop after its round: at once where that waits for hosts that are not here, now or later."""
        self._deadlines.stop(reason)

    def fail(self, error: CoterieError) -> None:
        """The run cannot go on: whoever waits gets this error."""
        self.state.fail(error)

    async def finish(self, outcome: str, *, failed: bool, finding: Finding = _UNSAID, timeout_s: float = 10.0) -> None:
        """Tells every host that the run is over, and waits for their books: for those that are silent no longer than `timeout_s`.

        Of a run that has failed hosts receive the finding alone, since a sentence may name other hosts, their users, or a path here.

        RunError when the run has not failed, but a book is not what it should be, a host cannot bring its own, or the last rows cannot be
        written.
        """
        await self._closing.finish(outcome, finding if failed else None, timeout_s)

    # ---- events from transports

    def hello(self, hello: session_pb2.Hello, link: Link) -> None:
        """A host introduces itself. Raises Refusal."""
        self._attendance.hello(hello, link)

    def turned_away(self, name: str, reason: str) -> None:
        """A host could not join, or cannot stay; `name` is empty for who has not said it."""
        self.journal.turned_away(name, reason)

    def announced(self, name: str, frame: session_pb2.Task | session_pb2.Reply) -> None:
        """The first frame of a host's reply is here, and there will be memory for the rest. ProtocolError when it cannot be a right one."""
        host = self.roster.hosts.get(name)
        if host is None:
            raise ProtocolError("it announced a large tensor, but is not a host of this run")
        self.answers.announced(host, frame)

    def received(self, name: str, received: Received) -> None:
        """A whole reply of a host has arrived. A malformed one ends the host's stream before the run, and then the run, naming the host."""
        host = self.roster.hosts.get(name)
        if host is not None and not host.is_struck:  # otherwise its place, or its stream, was given up while the frame was read
            self.answers.received(host, received)

    def book_of(self, name: str, book: session_pb2.Book) -> None:
        """A piece of a host's own ledger has arrived."""
        host = self.roster.hosts.get(name)
        if host is not None and not host.is_struck:
            self._closing.book_of(host, book)

    def heard(self, name: str) -> None:
        """Any frame has come from a host."""
        if name in self.roster.hosts:
            self.roster.hosts[name].heard_at = self._clock()

    def tally(self, name: str, direction: str, n_bytes: int) -> None:
        """Bytes of frames that are neither tasks nor replies."""
        if name in self.roster.hosts:
            self.roster.hosts[name].session_bytes[direction] += n_bytes

    def lost(self, name: str, link: Link, reason: str) -> None:
        """A host's stream has ended."""
        if (host := self.roster.on(name, link)) is not None:
            self._attendance.lost(host, reason)

    def broke(self, name: str, link: Link, reason: str) -> None:
        """A frame of a host's stream was malformed or out of order. The stream is given up; the host may come back on another."""
        if (host := self.roster.on(name, link)) is not None:
            self._strikes.malformed(host, reason)

    def failed(self, name: str, failure: session_pb2.Failure, link: Link | None = None) -> None:
        """A host says that it cannot go on: the end of a run that has started with it; else it may come again, or another in its place.

        `link` is the stream of the host's session; whoever speaks on another one, or before a hello, is not (yet) the host.
        """
        self._strikes.said_failure(name, failure, self.roster.on(name, link))

    def ended(self, name: str, error: CoterieError) -> None:
        """The process of a host has ended, and is not started again: whoever has launched it says why."""
        host = self.roster.hosts.get(name)
        if host is None or not self.state.has_started:
            self.fail(error)
        elif not host.is_struck:  # it has not said why itself
            self._strikes.has_failed(host, error)

    def tick(self) -> None:
        """Checks all deadlines; call it about twice a second."""
        try:
            self._deadlines.tick()
        except RunError as error:  # a decision could not be written down
            self.fail(error)
