"""The parent's side of all sessions: who is there, what was sent to whom, who has answered.

No I/O and no clock of its own: transports report events (a hello, a frame, a lost stream) and carry what `Link` is told to send; time comes
in through `tick`. All calls are made on one event loop. It keeps the messages of each host since the host's last snapshot, so
that a host that comes back is sent what it missed.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from coterie.arrays import Indices
from coterie.errors import ConfigError, CoterieError, ProtocolError, RunError
from coterie.experiment.config import Experiment
from coterie.experiment.features import Feature, from_plain, named_columns, to_plain
from coterie.findings import Finding
from coterie.record.ledger import DOWN, SESSION, UP, Booked, Row, check_ranges, link_below, rows_of, unpack, unpack_own
from coterie.session.failures import finding_frame, finding_in, finding_of, sentence_of
from coterie.text.names import natural_key
from coterie.v1 import session_pb2
from coterie.wire.codec import Entry, Precision, Received, check_announced, encode, reheaded
from coterie.wire.messages import Message
from coterie_server.interface.half import Members, Replies
from coterie_server.interface.merge import Layout, check_finite, check_kinds, check_owners, merged, weights_of
from coterie_server.interface.wanted import Wanted, check_wanted
from coterie_server.session.admission import check_clusters, check_hello, missing_clusters
from coterie_server.session.schemas import schema_of
from coterie_server.session.sessions import (
    NOT_SPARED,
    Host,
    Link,
    Pending,
    Recorder,
    Refusal,
    Sent,
    Sparse,
    Tracer,
    packed,
    shortened,
    shown,
    unpacked,
)

HOST_BYTES = 1 << 19  # of replies that a host keeps, a small machine's memory; more only where they come in few exchanges
_MAX_REFUSED = 100  # hosts that were turned away and are remembered
_MAX_ROWS_ALONE = 1_000_000  # of a host's book that the parent has no counterpart of
_MAX_REASONS = 3  # of these, how many a sentence names
_LONGEST_FINISH_S = 60.0  # for the books of hosts that are heard
_MAX_WAITED_FOR = 3  # hosts, how many a sentence names
_BREACH = Finding("R7")
_UNSAID = Finding("R6")  # why a run has failed, where nobody says
_PREPARING = "the preparation needs every user"
_MAX_REPEATED = 100  # replies of a host beyond the tasks that it was asked to answer


class Hub:
    """All sessions of one parent, and the `Federation` that its method speaks to."""

    def __init__(
        self,
        experiment: Experiment,
        run_id: str,
        recorder: Recorder,
        clock: Callable[[], float],
        *,
        keep_log: bool = True,
        cluster: str | None = None,
    ) -> None:
        self.rules = experiment.federation
        self.experiment = experiment
        self.cluster = cluster  # whose users alone may join: this is the hub of an aggregator, and its parent numbers the users
        self.run_id = run_id
        self.precision = Precision.of_run(experiment)
        self.recorder = recorder
        self.tracer: Tracer | None = None
        self.hosts: dict[str, Host] = {}
        self.members: Members | None = None
        self.layout: Layout | None = None
        self.named = named_columns(experiment.data)
        self.schema: tuple[Feature, ...] = ()  # the features, where the hosts' data has names
        self._findings: dict[str, tuple[Finding, ...]] = {}  # what hosts have said of their data
        self.model = ""  # the tensors of the hosts' model, in runs with a network
        self.dims: dict[str, int] = {}  # extents that replies must have, once they are known
        self.attempt = 1
        self.seq = 0
        self.durable_seq = 0
        self.stage = 0
        self.round = 0
        self.log_bytes = 0
        self.may_skip = False  # whether a round goes on that can do without late hosts
        self.needs_everyone = _PREPARING  # why the run cannot go on without a lost host, "" where it can
        self.skips: dict[int, frozenset[str]] = {}  # decisions to repeat: exchange -> hosts whose answers are not waited for
        self.passes: dict[int, frozenset[str]] = {}  # and those that are not asked at all
        self.repeats_all = False  # another run's decisions are repeated: nothing is decided here
        self.furthest = 0  # the last exchange of an earlier attempt that any host has seen: up to it, decisions are repeated
        self._clock = clock
        self._keep_log = keep_log
        self.stage_json = ""  # the settings of the stage, for hosts that have not been told
        self._told: set[str] = set()  # hosts that have the settings of this stage
        self._pending: Pending | None = None
        self._failure: CoterieError | None = None
        self._changed = asyncio.Event()
        self._numerics: dict[str, str] = {}
        self._out: set[str] = set()  # the hosts that others go on without, until they have caught up
        self._said_at = -math.inf  # when it was last said who is waited for
        self.notice = ""  # the latest sentence on who is waited for, left out, or back
        self._stop_reason = ""  # why the run is to stop, once it is
        self.refused: dict[str, str] = {}  # why hosts that are not here were turned away: the latest reason of each, oldest host first
        self._reasons: dict[str, Finding] = {}  # what hosts that are not here have said of why
        self._has_started = False  # the join barrier has been passed in this attempt
        self._unbooked: deque[tuple[Host, tuple[int, int], Booked, bool]] = deque()  # stage and round, what was sent, whether it is useful
        self._put_off: Callable[[], None] | None = None  # what `meanwhile` was told
        self._finish: session_pb2.JoinResponse | None = None  # what hosts are told at the end
        self._have_brought_all: set[str] = set()  # hosts whose books are complete
        self._takes_books = True  # until the end has been waited for
        self._sparse = Sparse()

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, so that nobody can join any more."""
        return self._finish is not None

    # ---- joining

    def hello(self, hello: session_pb2.Hello, link: Link) -> None:
        """A host introduces itself. Raises Refusal."""
        try:
            check_hello(self, hello)
        except Refusal as refusal:
            self.turned_away(hello.host, refusal.public)
            raise
        host = self.hosts.get(hello.host)
        if host is None:
            host = self.hosts[hello.host] = Host(hello.host, tuple(u.name for u in hello.users), tuple(u.cluster for u in hello.users))
        elif host.link is not None:
            host.link.close("UNAVAILABLE", f"host {host.name!r} has opened a new stream")
        now = self._clock()
        if host.absent_since is not None:
            host.absent_s += now - host.absent_since
        host.link, host.instance, host.absent_since, host.heard_at, host.is_struck = link, hello.instance, None, now, False
        host.reached = hello.last_seq
        self.furthest = max(self.furthest, hello.last_seq)
        self.refused.pop(host.name, None)
        self._reasons.pop(host.name, None)
        self.schema = self.schema or schema_of(hello)
        self.model = self.model or hello.model
        self._compare_numerics(hello)
        n_here = sum(1 for other in self.hosts.values() if other.link is not None)
        self._note("join", host.name, f"host {host.name!r} joined with {len(host.users)} users", host=host.name, hosts_here=n_here)
        self._note_findings(host.name, hello)
        if self._is_numbered:
            self._welcome(host)
        if self._finish is not None:
            self._send_frame(host, self._finish)
        elif self._is_numbered:
            self._catch_up(host)
        self._changed.set()

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the features, where the hosts' data has names."""
        return tuple(feature.name for feature in self.schema)

    def _note_findings(self, name: str, hello: session_pb2.Hello) -> None:
        """Writes down what a host says of its data, once."""
        said = tuple(map(finding_of, hello.findings))
        found = tuple(finding for finding in said if finding is not None)
        if found == self._findings.get(name, ()):
            return
        self._findings[name] = found
        for finding in found:
            text = f"{self.rules.noun} {name!r}: {finding.sentence}"
            self._note("data", name, text, host=name, rule=finding.rule, count=finding.count)
        if n_unknown := len(said) - len(found):
            what = "a note on its data has a rule" if n_unknown == 1 else f"{n_unknown} notes on its data have rules"
            self._note("data", name, f"{self.rules.noun} {name!r}: {what} that this version does not know", host=name)

    def turned_away(self, name: str, reason: str) -> None:
        """A host could not join, or cannot stay; `name` is empty for who has not said it."""
        name, reason = shown(name) if name not in self.hosts else name, shortened(reason)
        self.refused.pop(name, None)
        if name:
            self.refused[name] = reason
        if len(self.refused) > _MAX_REFUSED:
            del self.refused[next(iter(self.refused))]
        self._note("refused", name, reason, host=name)

    def _note(self, kind: str, name: str, text: str, **data: Any) -> None:
        """An event that a host, or a stranger, can bring about as often as it likes: later ones are written down ever more seldom."""
        times = self._sparse.due(kind, name if name in self.hosts else "")
        if times:
            more = {"times": times} if times > 1 else {}
            self.recorder.event(kind, text, **data, **more)

    def _compare_numerics(self, hello: session_pb2.Hello) -> None:
        self._numerics[hello.host] = hello.numerics
        if len(set(self._numerics.values())) > 1:
            text = "; ".join(f"{host}: {numerics}" for host, numerics in sorted(self._numerics.items()))
            self._note("numerics", hello.host, f"hosts compute with different libraries, bits may differ: {shortened(text)}")

    def go_on(self) -> None:
        """Goes on with the members of an earlier attempt before their hosts are back: what these are asked waits for them."""
        self._has_started = True

    async def gather(self) -> Members:
        """The join barrier: waits for the hosts, fixes the member order and welcomes everyone. RunError when too few came."""
        rules = self.rules
        deadline = self._clock() + rules.join_timeout_s
        while len(self._connected()) < rules.hosts and self._clock() < deadline:
            self._raise_failure()
            self._changed.clear()
            await self._changed_within(min(0.5, deadline - self._clock()))
        self._raise_failure()
        here = self._connected()
        needed = rules.min_hosts or rules.hosts
        if self.members is None and len(here) < needed:
            names = ", ".join(sorted(host.name for host in here)) or "none"
            refused = "".join(f"; {reason}" for reason in list(self.refused.values())[-_MAX_REASONS:])
            waited = f"after {rules.join_timeout_s:g} s (federation.join_timeout_s)"
            state = f"need {needed} of {rules.hosts} {rules.noun}s, have {len(here)} {waited}: {names}"
            # An aggregator's parent hears what a host of it has found, if that is why it is not here.
            why = list(self._reasons.values())[-1] if self._reasons else Finding("R2")
            raise RunError(f"{state}{missing_clusters(rules, here)}{refused}", why, below=Finding("R2"))
        if self.members is None:
            self.hosts = {
                name: host for name, host in sorted(self.hosts.items(), key=lambda item: natural_key(item[0])) if host.link is not None
            }
            self._fix_members()
            for host in self.hosts.values() if self._is_numbered else ():
                self._welcome(host)
        assert self.members is not None  # noqa: S101 - set above
        self._has_started = True
        return self.members

    @property
    def _is_held_up(self) -> bool:
        """Whether the run waits for hosts that are not here."""
        waiting = () if self._pending is None else self._pending.waiting
        return not self._has_started or any(self.hosts[name].link is None for name in waiting)

    def stop(self, reason: str) -> None:
        """The run is to stop after its round: at once where that waits for hosts that are not here, now or later."""
        self._stop_reason = reason
        self._stop_if_held_up()

    def _stop_if_held_up(self) -> None:
        if self._stop_reason and self._finish is None and self._is_held_up:
            self.fail(RunError(f"stopped by {self._stop_reason} while waiting for {self.rules.noun}s", Finding("R4")))

    def _connected(self) -> list[Host]:
        return [host for host in self.hosts.values() if host.link is not None]

    async def _changed_within(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._changed.wait(), max(seconds, 0.0))
        except TimeoutError:
            return

    def _fix_members(self) -> None:
        clusters = {user: cluster for host in self.hosts.values() for user, cluster in zip(host.users, host.clusters, strict=True)}
        names = tuple(sorted(clusters, key=natural_key))
        if self.rules.users is not None and len(names) != self.rules.users:
            raise RunError(f"the hosts bring {len(names)} users together, wanted {self.rules.users}")
        self.members = Members(names, tuple(clusters[name] for name in names))
        if self.cluster is None:
            check_clusters(self.rules, self.members.cluster_names)
        self._lay_out(self.members)

    def number(self, numbers: Indices, clusters: Indices) -> None:
        """An aggregator learns the numbers of its users and of their clusters in the whole run, and welcomes its hosts."""
        assert self.members is not None  # noqa: S101 - an aggregator joins its parent after its hosts
        if self._is_numbered:
            return
        self.members = Members(self.members.names, self.members.clusters, numbers, clusters)
        self._lay_out(self.members)
        for host in self._connected():
            self._welcome(host)
            self._catch_up(host)

    @property
    def _is_numbered(self) -> bool:
        """Whether hosts can be welcomed."""
        return self.members is not None and (self.cluster is None or self.members.numbers is not None)

    def _lay_out(self, members: Members) -> None:
        place = {name: i for i, name in enumerate(members.names)}
        own = {name: np.array(sorted(place[user] for user in host.users), dtype=np.int64) for name, host in self.hosts.items()}
        self.layout = Layout(own, len(members), members.cluster_of)

    def _welcome(self, host: Host) -> None:
        assert self.members is not None  # noqa: S101 - callers check
        place = {name: i for i, name in enumerate(self.members.names)}
        indices = [place[user] for user in host.users]
        welcome = session_pb2.Welcome(
            run_id=self.run_id,
            member_indices=indices,
            n_members=len(self.members),
            heartbeat_s=self.rules.heartbeat_s,
            numbers=self.members.number_of[indices].tolist(),
            clusters=(self.members.cluster_of[indices] + 1).tolist(),
        )
        self._send_frame(host, session_pb2.JoinResponse(welcome=welcome))

    def _catch_up(self, host: Host) -> None:
        """Sends a returning host what it missed, and asks again for what it has not answered."""
        for sent in host.log:
            if sent.seq > host.reached or sent.seq > host.acked:
                self._send(host, sent, is_replay=sent.seq <= host.acked)
        self._settle_or_fail()
        if host.acked > host.reached:
            text = f"host {host.name!r} is sent tasks {host.reached + 1} to {host.acked} again"
            self._note("replay", host.name, text, host=host.name, reached=host.reached, acked=host.acked)

    # ---- exchange

    def begin_stage(self, number: int, stage_json: str) -> None:
        """The next exchange with each host carries the settings of this stage."""
        self.stage, self.round, self.stage_json = number, 0, stage_json
        self._told = set()

    async def exchange(self, *messages: Message, to: Indices | None = None, wanted: Sequence[Wanted] = ()) -> Replies:
        """See `Federation`."""
        if self.tracer is None:
            return await self._exchange(messages, to, wanted)
        with self.tracer.exchange(self.seq + 1, self.attempt, messages):
            return await self._exchange(messages, to, wanted)

    async def _exchange(self, messages: Sequence[Message], to: Indices | None, wanted: Sequence[Wanted]) -> Replies:
        layout = self._layout()
        self._raise_failure()
        self.seq += 1
        parts = {host: listed for host in layout.hosts_of(to) if (listed := self._parts(host, messages))}
        passed = self._passed_over(parts)
        for name in passed:
            del parts[name]
        loop = asyncio.get_running_loop()
        pending = self._pending = Pending(self.seq, set(parts), {}, loop.create_future(), self._clock(), wanted)
        if self.seq in self.skips:
            self._leave_out(self.skips[self.seq] & pending.waiting)
        reading = [name for name in parts if self.hosts[name].acked == self.hosts[name].asked]
        for name, listed in parts.items():
            self._ask(self.hosts[name], listed)
        link = self.hosts[reading[0]].link if len(reading) == len(parts) == 1 else None
        # A host that has taken all that was sent before takes one more small task without waiting; several are written side by side.
        if link is not None:
            await link.flush()
        elif pending.waiting:
            await self._written()
        self._settle_or_fail()
        if pending.done.done():
            await asyncio.sleep(0)  # where the transport answers at once, signals and deadlines get their turn here
        if pending.waiting or pending.done.done():
            await pending.done
        self._pending = None
        # Lost hosts were not sent anything either: should they come back, they are sent it too late.
        unasked = [*passed, *(name for name in parts if self.hosts[name].log and not self.hosts[name].log[-1].times)]
        answers = pending.answers
        answered = None if len(answers) == len(parts) and not passed else self._members_of(answers)
        return Replies(merged(answers, layout), answered, weights_of(answers, layout), self._members_of(unasked))

    async def _written(self) -> None:
        """Lets small frames go out before this turn goes on: writers are woken in one turn, and write in the next."""
        for _ in range(2):
            await asyncio.sleep(0)

    def _layout(self) -> Layout:
        if self.layout is None:
            raise RunError("no members yet: the join barrier has not been passed")
        return self.layout

    def _members_of(self, hosts: Iterable[str]) -> Indices:
        own = [self._layout().own[name] for name in hosts]
        return np.sort(np.concatenate(own)) if own else np.zeros(0, dtype=np.int64)

    def _parts(self, host: str, messages: Sequence[Message]) -> list[Message]:
        listed = (self._layout().part_for(host, message) for message in messages)
        return [message for message in listed if message is not None]

    def _ask(self, host: Host, messages: Sequence[Message]) -> None:
        task = session_pb2.Task(seq=self.seq, attempt=self.attempt, stage=self.stage, round=self.round)
        # A parent that keeps no log is never started again, so it asks for no reply twice.
        task.durable_seq = self.durable_seq if self._keep_log else host.acked
        if host.snapshot_due:
            task.snapshot, host.snapshot_due = 1, False
        if host.name not in self._told:
            task.stage_json = self.stage_json
            self._told.add(host.name)
        sent = Sent(self.seq, encode(task, messages, self.precision), 0)
        if not self._keep_log and host.log:
            host.forgotten = host.log[-1].seq
            host.log.clear()
        host.log.append(sent)
        host.asked = self.seq
        self.log_bytes += sent.encoded.n_bytes if self._keep_log else 0
        if host.link is not None:
            self._send(host, sent, is_replay=False)

    def _send(self, host: Host, sent: Sent, *, is_replay: bool) -> None:
        if host.link is None:
            return
        encoded = sent.encoded
        is_first = sent.times == 0 and not is_replay
        resent = sent.times
        if not is_first:
            frame = session_pb2.JoinResponse.FromString(encoded.head).task
            frame.replay, frame.resent, frame.attempt = int(is_replay), resent, self.attempt
            encoded = reheaded(frame, encoded)
        sent.times += 1
        host.n_sent += not is_replay
        is_late = self._pending is None or sent.seq != self._pending.seq  # the exchange went on without this host
        self._unbook(host, (encoded.entries, sent.seq, self.attempt, DOWN, resent), is_useful=is_first and not is_late)
        if self.tracer is not None:
            self.tracer.sent(host.name, sent.seq, encoded.entries)
        host.link.send(encoded)

    def meanwhile(self, work: Callable[[], None]) -> None:
        """What nobody needs to wait for: it is done once the next exchange is under way, while the hosts work, or at the next `settle`."""
        if self._put_off is not None:  # the round before asked nobody
            self.settle()
        self._put_off = work

    def settle(self) -> None:
        """Does what was put off: books what was sent and received, in this order, and does the work of `meanwhile`. RunError: full disk."""
        while self._unbooked:
            host, where, booked, is_useful = self._unbooked.popleft()
            self.recorder.book(host.name, where, _with_users(booked[0], rows_of(*booked)), is_useful)
            host.n_booked += len(booked[0])
        work, self._put_off = self._put_off, None
        if work is not None:
            work()

    def _settle_or_fail(self) -> None:
        """The same, where a full disk is the end of the run and not of the session in whose turn it is noticed."""
        self._record_or_fail(self.settle)

    def _record_or_fail(self, record: Callable[[], None]) -> None:
        try:
            record()
        except RunError as error:
            self.fail(error)

    def _unbook(self, host: Host, booked: Booked, *, is_useful: bool) -> None:
        """Puts off the booking of a message until what waits for it is under way."""
        self._unbooked.append((host, (self.stage, self.round), booked, is_useful))

    # ---- events from transports

    def received(self, name: str, received: Received) -> None:
        """A whole reply of a host has arrived. A malformed one ends the host's stream before the run, and then the run, naming the host."""
        host = self.hosts.get(name)
        if host is None or host.is_struck:  # its place, or its stream, was given up while the frame was read
            return
        host.heard_at = self._clock()
        reply = received.frame
        try:
            own = self._check_fences(host, reply)
            host.n_replies += 1
            messages, entries = received.decode(own.size, self.dims)
            pending = self._pending
            is_awaited = pending is not None and pending.seq == reply.seq and reply.attempt == self.attempt and name in pending.waiting
            wrong = self._wrong_with(host, messages, own) if is_awaited else None
            self._unbook(host, (entries, reply.seq, reply.attempt, UP, reply.resent), is_useful=is_awaited and wrong is None)
            if wrong is not None:  # it still owes this answer
                raise wrong
            host.replied_bytes += received.n_bytes
            host.reached = max(host.reached, reply.seq)
            host.acked = max(host.acked, reply.seq)
            host.absent_s = 0.0
            self._forget(host, reply.durable_seq)
            if pending is None or not is_awaited:
                self._settle_or_fail()  # only answers to an exchange wait to be booked, so they are never many
                self._note("late", name, f"host {name!r} answered task {reply.seq} too late or twice", host=name, seq=reply.seq)
                return
        except CoterieError as error:
            self._settle_or_fail()
            self._broke(host, error if isinstance(error, RunError) else RunError(f"host {name!r} broke the protocol: {error}", _BREACH))
            return
        if self.tracer is not None:
            self.tracer.answered(name, entries)
        pending.answers[name] = messages
        pending.waiting.discard(name)
        if not pending.waiting and not pending.done.done():
            pending.done.set_result(None)

    def _wrong_with(self, host: Host, messages: Sequence[Message], own: Indices) -> CoterieError | None:
        """Why an answer cannot be put together with those of the others; None when it can."""
        try:
            check_kinds(host.name, messages)
            if self._pending is not None and self._pending.wanted:
                check_wanted(messages, own, self._pending.wanted)
            for message in messages:
                check_owners(host.name, message, own, self._layout().clusters[host.name])
                check_finite(host.name, message, own, self.members.names if self.members else (), self.round)
        except CoterieError as error:
            return error
        return None

    def announced(self, name: str, frame: session_pb2.Task | session_pb2.Reply) -> None:
        """The first frame of a host's reply is here, and there will be memory for the rest. ProtocolError when it cannot be a right one."""
        host = self.hosts.get(name)
        if host is None:
            raise ProtocolError("it announced a large tensor, but is not a host of this run")
        check_announced(frame, self._check_fences(host, frame).size, self.dims)

    def _check_fences(self, host: Host, reply: session_pb2.Task | session_pb2.Reply) -> Indices:
        """The members of the host. ProtocolError when it was not asked for this reply, or has sent far more than it was asked for."""
        if self.layout is None:
            raise ProtocolError("it sent a reply before it was welcomed")
        if not isinstance(reply, session_pb2.Reply):
            raise ProtocolError("it sent a task, wanted a reply")
        if reply.seq > host.asked or reply.attempt > self.attempt or reply.durable_seq > reply.seq:
            fences = f"task {reply.seq}, attempt {reply.attempt}, snapshot {reply.durable_seq}"
            raise ProtocolError(f"a reply to {fences}, wanted at most task {host.asked}, attempt {self.attempt}, a snapshot before it")
        if host.n_replies >= host.n_sent + _MAX_REPEATED:
            raise ProtocolError(f"it has sent {host.n_replies + 1} replies, but was asked for {host.n_sent}")
        return self.layout.own[host.name]

    def broke(self, name: str, link: Link, reason: str) -> None:
        """A frame of a host's stream was malformed or out of order. The stream is given up; the host may come back on another."""
        host = self.hosts.get(name)
        if host is None or host.link is not link:
            return
        sentence = f"host {name!r} broke the protocol: {reason}"
        self.turned_away(name, sentence)
        if self._has_started and self.rules.on_loss == "skip" and not self._why_not_spared(host):
            host.n_breaches += 1
            self._strike(host, "INVALID_ARGUMENT", sentence)

    def _broke(self, host: Host, error: RunError) -> None:
        """A whole reply or a book is not what it must be: the end of the run, unless it has not begun or the others may go on alone."""
        self.turned_away(host.name, str(error))
        if self._has_started and self.rules.on_loss == "skip":
            host.n_breaches += 1
            self._strike_or_fail(host, "INVALID_ARGUMENT", error)
        elif (self.members is not None and not self._skips_late) or self._finish is not None:
            self.fail(error)
        elif host.link is not None:
            self._give_up(host, host.link, "INVALID_ARGUMENT", str(error))

    def _give_up(self, host: Host, link: Link, code: str, reason: str) -> None:
        link.close(code, reason)
        self.lost(host.name, link, reason)

    def _strike_or_fail(self, host: Host, code: str, error: CoterieError) -> None:
        """A host has broken the protocol or cannot go on, and `federation.on_loss` is skip: its own end, where the others may go on."""
        if why := self._why_not_spared(host):
            self.fail(type(error)(f"{error}{NOT_SPARED}{why}", error.finding, below=error.below))
        else:
            self._strike(host, code, error.public)

    def _why_not_spared(self, host: Host) -> str:
        """Why the run cannot go on without this host from now on, "" when it can."""
        # The run is over, or repeats decisions that do not wait for the host now; an exchange that does will say what it misses.
        if self._finish is not None or not (self.decides or self._is_awaited(host)):
            return ""
        return self._why_not_without({host.name})

    def _is_awaited(self, host: Host) -> bool:
        """Whether the exchange under way needs the host's answer."""
        return self._pending is not None and host.name in self._pending.waiting

    def _strike(self, host: Host, code: str, reason: str) -> None:
        """Ends a host's stream, and goes on without its users at once. Nothing more is asked of it until it is back on another stream."""
        host.is_struck = True
        if host.link is not None:
            self._give_up(host, host.link, code, reason)
        pending = self._pending
        if self._finish is not None:
            return
        if pending is not None and host.name in pending.waiting:
            self._record_or_fail(lambda: self._skip(pending, [host.name], reason))
        else:  # its answer, complete and checked, is there, or was not waited for
            self._say_out([host.name], self.seq + 1, reason)

    def _forget(self, host: Host, durable_seq: int) -> None:
        while host.log and host.log[0].seq <= durable_seq and host.log[0].seq <= host.acked:
            sent = host.log.popleft()
            host.forgotten = sent.seq
            self.log_bytes -= sent.encoded.n_bytes if self._keep_log else 0

    def heard(self, name: str) -> None:
        """Any frame has come from a host."""
        if name in self.hosts:
            self.hosts[name].heard_at = self._clock()

    def tally(self, name: str, direction: str, n_bytes: int) -> None:
        """Bytes of frames that are neither tasks nor replies."""
        if name in self.hosts:
            self.hosts[name].session_bytes[direction] += n_bytes

    def lost(self, name: str, link: Link, reason: str) -> None:
        """A host's stream has ended."""
        host = self.hosts.get(name)
        if host is None or host.link is not link:
            return
        host.link, host.absent_since = None, self._clock()
        if self.members is None:
            # Its place is free again, for it or for another: nothing was asked of it yet.
            del self.hosts[name]
            self._numerics.pop(name, None)
        if self._finish is None:
            self._note("lost", name, f"host {name!r} is gone: {shortened(reason)}", host=name, round=self.round)
        self._changed.set()

    def failed(self, name: str, failure: session_pb2.Failure, link: Link | None = None) -> None:
        """A host says that it cannot go on: the end of a run that has started with it; else it may come again, or another in its place.

        `link` is the stream of the host's session; whoever speaks on another one, or before a hello, is not (yet) the host.
        """
        finding = finding_in(failure.finding)
        why = f"{sentence_of(finding, self.experiment)}; its own log names it"
        if self._has_started and link is not None and name in self.hosts and self.hosts[name].link is link:
            family = ConfigError if failure.config else RunError
            self._has_failed(self.hosts[name], family(f"{self.rules.noun} {name!r}: {why}", finding, below=Finding("R1")))
        else:
            self.turned_away(name, f"{self.rules.noun} {shown(name)!r} cannot join: {why}")
            self._reasons = {**{who: said for who, said in self._reasons.items() if who in self.refused}, shown(name): finding}

    def ended(self, name: str, error: CoterieError) -> None:
        """The process of a host has ended, and is not started again: whoever has launched it says why."""
        host = self.hosts.get(name)
        if host is None or not self._has_started:
            self.fail(error)
        elif not host.is_struck:  # it has not said why itself
            self._has_failed(host, error)

    def _has_failed(self, host: Host, error: CoterieError) -> None:
        """A host of a run that has started cannot go on, or will never answer."""
        if self.rules.on_loss == "skip":
            self.turned_away(host.name, error.public)
            self._strike_or_fail(host, "ABORTED", error)
        else:
            self.fail(error)

    def book_of(self, name: str, book: session_pb2.Book) -> None:
        """A piece of a host's own ledger has arrived."""
        host = self.hosts.get(name)
        # Too late is as if lost: of a run that has ended nothing is still to be written.
        if host is None or host.is_struck or not self._takes_books:
            return
        try:
            if self._finish is None:
                raise ProtocolError("its book came before the end of the run")
            if name in self._have_brought_all:
                raise ProtocolError("it has brought its whole book already")
            if not book.ByteSize():
                self._have_brought_all.add(name)
                return
            if book.link or book.events:
                self._book_below(name, book)
                return
            rows = unpack(book)
            host.n_booked -= len(rows)
            # Rows of an attempt that was killed may be the host's alone.
            if host.n_booked < -_MAX_ROWS_ALONE:
                raise ProtocolError("its book has many more rows than messages were exchanged")
            self.recorder.book_host(name, rows)
        except ProtocolError as error:
            self._broke(host, RunError(f"host {name!r} broke the protocol: {error}", _BREACH))
        except RunError as error:  # of ours: a full disk
            self.fail(error)

    def _book_below(self, name: str, book: session_pb2.Book) -> None:
        """An aggregator brings the books of one of its own links, or what has happened there."""
        if not self.rules.is_two_tier:
            raise ProtocolError(f"its book is of a link to {book.link!r}, but it is a client host")
        link = link_below(name, book.link)
        if book.of_parent:
            sets = book.user_sets.split("\n")
            for users in sets:
                check_ranges(users, self._layout().own[name])
            self.recorder.book_within(link, unpack_own(book), sets)
        elif book.link:
            self.recorder.book_host(link, unpack(book))
        self.recorder.events_of(name, book.events)

    def fail(self, error: CoterieError) -> None:
        """The run cannot go on: whoever waits gets this error."""
        self._failure = self._failure or error
        if self._pending is not None and not self._pending.done.done():
            self._pending.done.set_exception(self._failure)
        self._changed.set()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # ---- time

    def tick(self) -> None:
        """Checks all deadlines; call it about twice a second."""
        try:
            self._tick()
        except RunError as error:  # a decision could not be written down
            self.fail(error)

    def _tick(self) -> None:
        now = self._clock()
        for host in self._connected():
            if now - host.heard_at > self.rules.silence_s and host.link is not None:
                link = host.link
                link.close("DEADLINE_EXCEEDED", f"nothing heard from host {host.name!r} for {self.rules.silence_s:g} s")
                self.lost(host.name, link, f"nothing heard for {self.rules.silence_s:g} s")
            else:
                self._send_frame(host, session_pb2.JoinResponse(heartbeat=session_pb2.Heartbeat(seq=self.seq)))
        self._stop_if_held_up()
        pending = self._pending
        if pending is None or pending.done.done():
            return
        is_late = now - pending.since > self.rules.late_after_s
        if self._skips_late and is_late and len(pending.answers) >= self._fewest:
            self._skip(pending, sorted(pending.waiting))
            return
        waiting = [self.hosts[name] for name in sorted(pending.waiting)]
        lost = [host for host in waiting if self._is_lost(host, now, pending.since)]
        if lost:
            self._lose(pending, lost, now)
        for host in (host for host in waiting if host not in lost):
            self._check_answering(host, pending, now)

    def _is_lost(self, host: Host, now: float, since: float) -> bool:
        """A host that comes and goes without ever answering is absent for as long as it was gone in all, unless one waits for ever."""
        is_for_now = self.rules.on_loss == "wait" and host.link is not None
        return not is_for_now and host.absence_s(now, since) > self.rules.absence_timeout_s

    def _lose(self, pending: Pending, lost: Sequence[Host], now: float) -> None:
        """These hosts have been absent for too long: what then is `federation.on_loss`."""
        if self.rules.on_loss == "wait":
            if now - self._said_at >= self.rules.absence_timeout_s:
                self._said_at = now
                seconds = max(host.absence_s(now, pending.since) for host in lost)
                text = f"waiting in round {self.round} for {_listed(lost, self.rules.noun)}, absent for {seconds:.0f} s"
                self._tell("wait", f"{text} (federation.on_loss is 'wait')", hosts=[host.name for host in lost])
            return
        why = self._why_not_without({host.name for host in lost}) if self.rules.on_loss == "skip" else ""
        if self.rules.on_loss == "skip" and not why:
            self._skip(pending, [host.name for host in lost])
        else:
            text = f"{self._state_without(lost[0])}{f'{NOT_SPARED}{why}' if why else ''}"
            self.fail(RunError(text, Finding("R3", len(lost))))

    def _state_without(self, host: Host) -> str:
        rules = self.rules
        needed = f"{len(self.hosts)} {rules.noun}{'s' if len(self.hosts) > 1 else ''}"
        state = f"need {needed}, have {len(self._connected())}: {_listed([host], rules.noun)}"
        why = f"; {self.refused[host.name]}" if host.name in self.refused else ""
        return f"{state} absent since round {self.round} for {rules.absence_timeout_s:g} s{why}"

    def _check_answering(self, host: Host, pending: Pending, now: float) -> None:
        """A host that is here has so long to answer."""
        rules = self.rules
        if now - pending.since - host.absence_s(now, pending.since) <= rules.task_timeout_s or host.link is None:
            return
        if not (rules.is_two_tier and rules.on_loss == "wait"):
            reason = f"{rules.noun} {host.name!r} has not answered task {pending.seq} for {rules.task_timeout_s:g} s"
            self._has_failed(host, RunError(reason, Finding("R3")))
        elif self._stop_reason:  # an aggregator may itself wait for a lost host, for as long as that takes
            text = f"stopped by {self._stop_reason} while {rules.noun} {host.name!r} works on task {pending.seq}"
            self.fail(RunError(text, Finding("R4")))

    # ---- going on without some

    @property
    def _skips_late(self) -> bool:
        return self.rules.late == "skip" and self.may_skip and self.decides

    @property
    def decides(self) -> bool:
        """Whether what depends on the clock is decided here and now, rather than repeated from an earlier attempt or another run.

        Hosts answer exchanges that they have seen in an earlier attempt from what they stored, so these must be the same exchanges.
        """
        return not self.repeats_all and self.seq >= self.furthest

    @property
    def _fewest(self) -> int:
        """How many hosts must take part for the others to be left out."""
        return self.rules.min_hosts or 1

    def _why_not_without(self, names: set[str]) -> str:
        """Why the exchange under way cannot go on without these hosts, "" when it can."""
        if self.needs_everyone:
            return self.needs_everyone
        if not self.decides:
            return f"exchange {self.seq} is repeated from an attempt or a run in which it answered"
        n_left = len(self.hosts) - len(self._out | names)
        return f"{n_left} of the at least {self._fewest} hosts wanted are left" if n_left < self._fewest else ""

    def _passed_over(self, names: Iterable[str]) -> list[str]:
        """Those of the hosts that are not asked: they still owe the answer to an exchange that went on without them.

        Asked again, a slow host would only fall further behind, and the messages for a lost one would pile up.
        """
        if self.repeats_all or self.seq <= self.furthest:
            return sorted(self.passes.get(self.seq, frozenset()).intersection(names))
        self._take_back()
        behind = sorted(name for name in names if self._can_pass(self.hosts[name]))
        if not behind or len(self.hosts) - len(self._out.union(behind)) < self._fewest:
            return []
        self.recorder.decide(self.seq, "pass", behind)
        self._say_out(behind, self.seq)
        return behind

    def _can_pass(self, host: Host) -> bool:
        if not (host.owes or host.is_struck) or "skip" not in (self.rules.late, self.rules.on_loss):
            return False
        is_lost = self.rules.on_loss == "skip" and not self.needs_everyone and host.link is None
        return self.may_skip or is_lost

    def _take_back(self) -> None:
        """Hosts that have caught up take part again."""
        for name in sorted(name for name in self._out if self.hosts[name].has_caught_up) if self._out else ():
            self._out.discard(name)
            self._tell("back", f"host {name!r} takes part again from exchange {self.seq} on", host=name, seq=self.seq)

    def _skip(self, pending: Pending, names: Sequence[str], why: str = "") -> None:
        """The exchange under way goes on without the answers of these hosts."""
        self.recorder.decide(pending.seq, "skip", list(names))
        self._say_out(names, pending.seq, why)
        self._leave_out(names)
        if not pending.waiting and not pending.done.done():
            pending.done.set_result(None)

    def _say_out(self, names: Sequence[str], seq: int, why: str = "") -> None:
        if not self._out.issuperset(names):
            text = f"going on without {', '.join(names)} from exchange {seq} on"
            self._tell("skip", f"{text}: {shortened(why)}" if why else text, seq=seq)
        self._out.update(names)

    def _tell(self, kind: str, text: str, **data: Any) -> None:
        self.notice = text
        self.recorder.event(kind, text, **data)

    def _leave_out(self, names: Iterable[str]) -> None:
        if self._pending is not None:
            self._pending.waiting.difference_update(names)

    # ---- the end, and the memory of a resumed run

    def _send_frame(self, host: Host, frame: session_pb2.JoinResponse) -> None:
        if host.link is not None:
            host.session_bytes[DOWN] += frame.ByteSize()
            host.link.send_frame(frame)

    async def finish(self, outcome: str, *, failed: bool, finding: Finding = _UNSAID, timeout_s: float = 10.0) -> None:
        """Tells every host that the run is over, and waits for their books: for those that are silent no longer than `timeout_s`.

        Of a run that has failed hosts receive the finding alone, since a sentence may name other hosts, their users, or a path here.

        RunError when the run has not failed, but a book is not what it should be, a host cannot bring its own, or the last rows cannot be
        written.
        """
        self._failure = None  # what kept the run from going on is in `finding`, or came when there was nothing left to do
        self._settle_or_fail()
        end = session_pb2.Finish(failed=True, finding=finding_frame(finding)) if failed else session_pb2.Finish(outcome=outcome)
        self._finish = session_pb2.JoinResponse(finish=end)
        for host in self._connected():
            self._send_frame(host, self._finish)
        await self._written()
        self._record_or_fail(self.recorder.flush)  # while the hosts fetch their books
        start = self._clock()
        # Who is waiting for its own hosts, or is one of very many on its machine, is slow but not silent. One that was skipped may compute.
        limit_s = timeout_s if failed or self.rules.late == "skip" else max(timeout_s, _LONGEST_FINISH_S)
        while self._is_heard_since(start, timeout_s) and self._clock() - start < limit_s:
            self._changed.clear()
            await self._changed_within(min(0.5, timeout_s))
        self._takes_books = False
        for name in sorted(self.hosts.keys() - self._have_brought_all) if not failed else ():
            self.recorder.event("lost", f"host {name!r} has not brought its whole book", host=name, book=True)
        own = {} if self.layout is None else self.layout.own
        for host in self.hosts.values():
            users = own.get(host.name)  # all behind the link: of the hosts of an aggregator, nothing else in the books says who they are
            rows = [(Row(0, self.attempt, 0, way, SESSION, 0, 0, 0, host.session_bytes[way], 0), users) for way in (UP, DOWN)]
            self.recorder.book(host.name, (0, 0), rows, True)
        if not failed:
            self._raise_failure()

    def _is_heard_since(self, start: float, seconds: float) -> bool:
        """Whether a connected host has been heard in the last seconds, or `start` is no longer ago."""
        return any(self._clock() - max(host.heard_at, start) < seconds for host in self._connected())

    def request_snapshots(self) -> None:
        """The next task of each host asks it to write its state down."""
        for host in self.hosts.values():
            host.snapshot_due = True

    @property
    def replied_bytes(self) -> int:
        """Bytes of the replies of the host that has sent the most."""
        return max((host.replied_bytes for host in self.hosts.values()), default=0)

    def memory(self) -> dict[str, Any]:
        """What a resumed parent needs to know, as a snapshot tree."""
        return {
            "seq": self.seq,
            "features": to_plain(self.schema),
            "model": self.model,
            "numbers": self.members.numbers if self.members else None,
            "cluster_numbers": self.members.cluster_numbers if self.members else None,
            "hosts": [
                {
                    "name": host.name,
                    "users": list(host.users),
                    "clusters": list(host.clusters),
                    "acked": host.acked,
                    "forgotten": host.forgotten,
                    "told": host.name in self._told,
                    "breaches": host.n_breaches,
                    "log": packed(host.log),
                }
                for host in self.hosts.values()
            ],
        }

    def restore(self, memory: Mapping[str, Any], attempt: int) -> None:
        """Takes up the memory of an earlier attempt; the hosts have yet to come back."""
        self.seq, self.attempt = memory["seq"], attempt
        self.schema, self.model = from_plain(memory["features"]), memory["model"]
        now = self._clock()
        for entry in memory["hosts"]:
            host = Host(entry["name"], tuple(entry["users"]), tuple(entry["clusters"]), absent_since=now)
            host.acked, host.forgotten, host.n_breaches = entry["acked"], entry["forgotten"], entry.get("breaches", 0)
            host.log.extend(unpacked(entry["log"], len(host.users)))
            host.asked = max([host.acked, *(sent.seq for sent in host.log)])
            self.log_bytes += sum(sent.encoded.n_bytes for sent in host.log)
            self.hosts[host.name] = host
            if host.owes:
                self._out.add(host.name)
            if entry["told"]:
                self._told.add(host.name)
        self._fix_members()
        if memory["numbers"] is not None:
            self.number(memory["numbers"], memory["cluster_numbers"])

    def resume_stage(self, number: int, round_number: int, stage_json: str) -> None:
        """Goes on in the middle of a stage: hosts that were told its settings are not told again."""
        self.stage, self.round, self.stage_json = number, round_number, stage_json


def _listed(hosts: Sequence[Host], noun: str) -> str:
    """The hosts with their users, for a sentence."""
    named = [f"{noun} {host.name!r} (users {host.users[0]}{f' to {host.users[-1]}' if len(host.users) > 1 else ''})" for host in hosts]
    more = [f"{len(named) - _MAX_WAITED_FOR} more"] if len(named) > _MAX_WAITED_FOR else []
    return " and ".join(named[:_MAX_WAITED_FOR] + more)


def _with_users(entries: Iterable[Entry], rows: Iterable[Row]) -> Iterable[tuple[Row, Indices | None]]:
    return zip(rows, [entry.users for entry in entries], strict=True)
