"""The parent's side of all sessions: the `Federation` that a method speaks to, and what transports report to.

It has no I/O and no clock of its own. Transports report events (a hello, a frame, a lost stream) and send what a `Link` receives; time
comes in through `tick`. All calls are made on one event loop. Each duty is an object of its own, with its own state. This module passes
events to the duties, and makes exchanges.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coterie.arrays import Indices
from coterie.errors import ConfigError, CoterieError, ProtocolError, RunError
from coterie.experiment.config import Experiment
from coterie.findings import Finding
from coterie.v1 import session_pb2
from coterie.wire.assembler import Held
from coterie.wire.codec import Received
from coterie.wire.messages import Message
from coterie.wire.precision import Precision
from coterie_server.interface.half import Replies
from coterie_server.interface.totals import Sum, Totals, total
from coterie_server.interface.wanted import Wanted
from coterie_server.session import memory
from coterie_server.session.answers import Answers
from coterie_server.session.arrivals import Arrivals
from coterie_server.session.attendance import Attendance
from coterie_server.session.bookings import Bookings
from coterie_server.session.closing import Closing
from coterie_server.session.duty import Shared
from coterie_server.session.echoes import Echoes
from coterie_server.session.journal import Journal
from coterie_server.session.masking import Collected, Masking
from coterie_server.session.outbox import Outbox
from coterie_server.session.participation import Participation
from coterie_server.session.ports import Link, Recorder, Tracer
from coterie_server.session.roster import Roster
from coterie_server.session.run_state import Pending, RunState
from coterie_server.session.strikes import Deadlines, Strikes
from coterie_server.session.thinning import Thinning

_BLOCK = 1000  # exchanges that are numbered between two writes to the disk
_LINGER_S = 0.3  # for hosts to read why they must wait: a connection that breaks discards what its peer has not read
_UNKNOWN = Finding("R6")  # why a run has failed, where nobody says


class Hub:
    """All sessions of one parent. `cluster`: this is the hub of the aggregator of that cluster, and only its users may join.

    The recorder reserves a block of exchange numbers before any of them is used; `reserved` is the end of the last block of earlier
    attempts. So a host that comes back cannot claim to have seen an exchange that never was.
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
        self.rules, self.experiment, self.cluster, self.run_id = experiment.federation, experiment, cluster, run_id
        self.recorder, self._clock = recorder, clock
        self.state = state = RunState(attempt, reserved, tracer)
        self.roster = roster = Roster(experiment, run_id, cluster)
        self.journal = journal = Journal(recorder, roster.hosts)
        self.bookings = bookings = Bookings(state, recorder)
        self.thinning = thinning = Thinning(experiment, roster)
        self.outbox = outbox = Outbox(state, bookings, Precision.of_run(experiment), thinning, keeps_log=keep_log)
        self.participation = participation = Participation(state, self.rules, roster.hosts, recorder, journal)
        shared = Shared(experiment, state, roster, recorder, journal, bookings, outbox, participation, clock)
        attendance = Attendance(shared)
        self._attendance, self._strikes = attendance, Strikes(shared, attendance)
        self._arrivals = Arrivals(shared, self._strikes)
        self.answers, self._closing = Answers(shared, self._strikes, self._arrivals, thinning), Closing(shared, self._strikes)
        self._deadlines = Deadlines(shared, attendance, self._strikes)
        self.masking = Masking(shared, self.collect)
        self._echoes = Echoes(recorder, Precision.of_run(experiment))
        # Calls that one duty alone answers.
        self.hello, self.gather, self.number = attendance.hello, attendance.gather, attendance.number
        self.meanwhile, self.settle = bookings.meanwhile, bookings.settle
        self.turned_away, self.stop, self.fail = journal.turned_away, self._deadlines.stop, state.fail

    @property
    def seq(self) -> int:
        """The number of the latest exchange."""
        return self.state.seq

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, so that nobody can join any more."""
        return self.state.is_over

    def begin_stage(self, number: int, stage_json: str) -> None:
        """The next exchange with each host carries the settings of this stage."""
        self.resume_stage(number, 0, stage_json)
        self.outbox.with_settings = {}

    def resume_stage(self, number: int, round_number: int, stage_json: str) -> None:
        """Goes on in the middle of a stage: its settings are not sent again to hosts that have them."""
        self.state.stage, self.state.round, self.state.stage_json = number, round_number, stage_json

    async def exchange(
        self, *messages: Message, to: Indices | None = None, wanted: Sequence[Wanted] = (), within: int | None = None
    ) -> Replies:
        """See `Federation`."""
        return (await self.collect(messages, to, wanted, within)).replies(self.roster.layout)

    async def collect(
        self,
        messages: Sequence[Message],
        to: Indices | None,
        wanted: Sequence[Wanted],
        within: int | None = None,
        own: Mapping[str, Message] | None = None,
    ) -> Collected:
        """As `exchange`, with the hosts' answers by host. `own` has a message more for each of these hosts, which are asked too."""
        if self.state.tracer is None:
            return await self._collect(messages, to, wanted, within, own or {})
        with self.state.tracer.exchange(self.seq + 1, self.state.attempt, (*messages, *(own or {}).values())):
            return await self._collect(messages, to, wanted, within, own or {})

    async def total(self, *messages: Message, of: Sequence[Sum], to: Indices | None = None, wanted: Sequence[Wanted] = ()) -> Totals:
        """See `Federation`."""
        n_members, precision = len(self.roster.fixed), Precision.of_run(self.experiment)
        exchange = self.masking.exchange if of and self.experiment.masks_sums else self.exchange
        return await total(exchange, messages, of, to, wanted, n_members, precision, is_exact=self.experiment.exact_sums)

    async def _collect(
        self, messages: Sequence[Message], to: Indices | None, wanted: Sequence[Wanted], within: int | None, own: Mapping[str, Message]
    ) -> Collected:
        state, roster, hosts = self.state, self.roster, self.roster.hosts
        state.raise_failure()
        if state.seq == state.reserved:
            self.recorder.reserve(state.seq + _BLOCK)
            state.reserved += _BLOCK
        state.seq += 1
        parts = roster.parts(messages, to)
        for name, message in own.items():
            parts.setdefault(name, []).append(message)
        for name in (passed := self.participation.passed_over(parts)):
            del parts[name]
        pending = Pending(state.seq, set(parts), {}, asyncio.get_running_loop().create_future(), self._clock(), wanted)
        state.pending = pending
        if state.seq in self.participation.skips:
            pending.leave_out(self.participation.skips[state.seq])
        if within is not None and self.thinning.remembered is not None:
            raise RunError("federation.compress.up.against is 'last', but the method takes answers of several tasks: want against 'task'")
        if within is not None:
            self._arrivals.begin(pending, parts, within)
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
        answers = pending.answers if within is None else self._arrivals.taken(pending)
        self._echoes.look(messages, answers, state.round)
        answered = None if within is None and len(answers) == len(parts) and not passed else roster.users_of(answers)
        return Collected(answers, answered, roster.users_of(unasked))

    def request_snapshots(self) -> None:
        """The next task of each host asks it to save its state."""
        for host in self.roster.hosts.values():
            host.snapshot_due = True

    def memory(self, seq: int | None = None) -> dict[str, Any]:
        """What a resumed parent needs to know, as a snapshot tree; with `seq`, as it was after that exchange."""
        until = self.seq if seq is None else seq
        for host in self.roster.hosts.values():
            host.taken = {task: took for task, took in host.taken.items() if took > until}
        return {**memory.memory_of(until, self.roster, self.outbox), "masking": self.masking.memory(until), **self.thinning.memory(until)}

    @property
    def errands(self) -> dict[str, int]:
        """By host, the task whose answer is to be taken by a later exchange."""
        return {name: host.errand.seq for name, host in self.roster.hosts.items() if host.errand is not None}

    def settled(self, seq: int | None = None) -> int:
        """The last exchange, up to `seq`, before which every answer has been taken: the parent never needs one of these again."""
        until = self.seq if seq is None else seq
        return min([until, *(task - 1 for host in self.roster.hosts.values() if (task := host.open_after(until)) is not None)])

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Takes up the memory of an earlier attempt; the hosts have yet to come back."""
        memory.restore(tree, self.state, self.roster, self.outbox, self._clock())
        self.participation.restore()
        self.masking.restore(tree.get("masking", {}))
        self.thinning.restore(tree)

    async def finish(self, outcome: str, *, failed: bool, finding: Finding = _UNKNOWN, timeout_s: float = 10.0) -> None:
        """Tells every host that the run is over, and waits for the books of hosts that are silent no longer than `timeout_s`.

        When the run has failed, hosts receive the finding alone: a sentence may name other hosts, their users, or a path of this machine.
        RunError when the run has not failed, but a book is wrong, a host cannot bring its own, or the last rows cannot be written.
        """
        await self._closing.finish(outcome, finding if failed else None, timeout_s)

    async def end(self, error: CoterieError) -> None:
        """The run cannot go on. Hosts of a run that has begun learn it, and end; others wait for a parent that comes back."""
        if self.state.has_started or isinstance(error, ConfigError):
            await self.finish("", failed=True, finding=error.below)
            return
        links = [(host.name, host.link) for host in self.roster.connected if host.link is not None]
        for name, link in links:
            link.close("UNAVAILABLE", f"{self.rules.noun} {name!r} must wait: {error.below.sentence}")
        if links:
            await asyncio.sleep(_LINGER_S)

    def announced(self, name: str, frame: session_pb2.Task | session_pb2.Reply) -> None:
        """See `Answers.announced`."""
        host = self.roster.hosts.get(name)
        if host is None:
            raise ProtocolError("it announced a large tensor, but is not a host of this run")
        self.answers.announced(host, frame)

    def held(self, name: str) -> Held:
        """What is held of a host's replies. A stream that is not the host's any more gets an empty one."""
        host = self.roster.hosts.get(name)
        return Held() if host is None else host.held

    def received(self, name: str, received: Received) -> None:
        """See `Answers.received`."""
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
            self._deadlines.stop_if_held_up()  # at once: its process may be stopped too, and its launcher must not take that for a failure

    def broke(self, name: str, link: Link, reason: str) -> None:
        """A frame of a host's stream was malformed or out of order. The stream is given up; the host may come back on another."""
        if (host := self.roster.on(name, link)) is not None:
            self._strikes.malformed(host, reason)

    def failed(self, name: str, failure: session_pb2.Failure, link: Link | None = None) -> None:
        """A host says that it cannot go on. That ends a run that has started with it; before, it or another host may still join.

        `link` is the stream of the host's session; a peer on another stream, or before its hello, is not (yet) the host.
        """
        self._strikes.said_failure(name, failure, self.roster.on(name, link))

    def ended(self, name: str, error: CoterieError) -> None:
        """The process of a host has ended, and is not started again; `error` of its launcher says why."""
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
