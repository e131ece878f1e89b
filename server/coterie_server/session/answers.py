"""Checks the replies of hosts, and hands those that are awaited to the exchange under way."""

from __future__ import annotations

from coterie.arrays import Indices
from coterie.errors import CoterieError, ProtocolError, RunError
from coterie.record.ledger import UP
from coterie.v1 import session_pb2
from coterie.wire.codec import Received, check_announced
from coterie.wire.messages import Message
from coterie_server.interface.merge import check_finite, check_kinds, check_owners
from coterie_server.interface.wanted import check_wanted
from coterie_server.session.arrivals import Arrivals
from coterie_server.session.duty import Duty, Shared
from coterie_server.session.run_state import Host
from coterie_server.session.strikes import Strikes
from coterie_server.session.thinning import Thinning

_MAX_REPEATED = 100  # replies of a host beyond the tasks that it was asked to answer


class Answers(Duty):
    """Takes replies. `dims` are the extents that they must have, once these are known."""

    def __init__(self, shared: Shared, strikes: Strikes, arrivals: Arrivals, thinning: Thinning) -> None:
        super().__init__(shared)
        self.dims: dict[str, int] = {}
        self._strikes, self._arrivals, self._thinning = strikes, arrivals, thinning

    def received(self, host: Host, received: Received) -> None:
        """A whole reply of a host has arrived. A malformed one ends the host's stream before the run, and then the run, naming the host."""
        host.heard_at = self._clock()
        try:
            self._take(host, received)
        except CoterieError as error:
            self._bookings.settle_or_fail()
            self._strikes.broke(host, error)

    def announced(self, host: Host, frame: session_pb2.Task | session_pb2.Reply) -> None:
        """The first frame of a host's reply has arrived; if it can be right, memory is set aside for the rest. Raises ProtocolError."""
        check_announced(frame, self._check_fences(host, frame).size, self.dims)
        self._thinning.check_announced(frame)

    def _take(self, host: Host, received: Received) -> None:
        """Takes a reply that counts as an answer whole, or not at all. Raises CoterieError."""
        reply, pending, roster = received.frame, self._state.pending, self._roster
        own = self._check_fences(host, reply)
        host.n_replies += 1
        messages, entries = received.decode(own.size, self.dims)
        is_current = pending is not None and reply.seq == pending.seq and reply.attempt == self._state.attempt
        errand = host.errand if host.errand is not None and host.errand.awaits(reply.seq) and reply.attempt == self._state.attempt else None
        is_awaited, wrong = errand is not None or (is_current and self._state.awaits(host.name)), None
        if is_awaited:
            try:
                messages = self._thinning.answer(host, reply.seq, messages)
                check_kinds(host.name, messages)
                if pending is not None and pending.wanted:
                    check_wanted(messages, own, pending.wanted)
                judged = () if pending is None else tuple(one.kind for one in pending.wanted if one.is_judged)
                for message in messages:
                    check_owners(host.name, message, own, roster.layout.clusters[host.name])
                    self._check_finite(host, message, own, is_judged=isinstance(message, judged))
            except CoterieError as error:
                wrong = error
        for place, (sending, resent) in enumerate(received.sendings(entries)):
            is_useful = place == 0 and is_awaited and wrong is None
            self._bookings.add(host, (sending, reply.seq, reply.attempt, UP, resent), is_useful=is_useful)
        if wrong is not None:  # the host still owes this answer
            raise wrong
        host.replied_bytes += received.n_bytes
        host.reached, host.acked = max(host.reached, reply.seq), max(host.acked, reply.seq)
        host.absent_s = 0.0
        self._outbox.forget(host, reply.durable_seq)
        if errand is not None and not self._arrivals.come(host, errand, messages):
            self._bookings.settle_or_fail()
            return  # a later exchange takes it
        if pending is None or not is_awaited:
            self._bookings.settle_or_fail()  # only answers to an exchange wait to be booked, so they are never many
            text = f"host {host.name!r} answered task {reply.seq} too late or twice"
            self._journal.event_of("late", host.name, text, host=host.name, seq=reply.seq)
            return
        if self._state.tracer is not None:
            self._state.tracer.answered(host.name, entries)
        pending.answer(host.name, messages)

    def _check_finite(self, host: Host, message: Message, own: Indices, *, is_judged: bool) -> None:
        """RunError for a NaN or an infinity, or an event where a rule leaves such an answer out."""
        try:
            check_finite(host.name, message, own, self._roster.members.names if self._roster.members else (), self._state.round)
        except RunError as error:
            if not is_judged:
                raise
            text = f"{error}; federation.robust leaves such answers out"
            self._journal.event_of("warning", host.name, text, host=host.name)

    def _check_fences(self, host: Host, reply: session_pb2.Task | session_pb2.Reply) -> Indices:
        """The members of the host. ProtocolError when it was not asked for this reply, or has sent far more than it was asked for."""
        if self._roster.members is None:
            raise ProtocolError("it sent a reply before it was welcomed")
        if not isinstance(reply, session_pb2.Reply):
            raise ProtocolError("it sent a task, wanted a reply")
        attempt = self._state.attempt
        if reply.seq > host.asked or reply.attempt > attempt or reply.durable_seq > reply.seq:
            fences = f"task {reply.seq}, attempt {reply.attempt}, snapshot {reply.durable_seq}"
            raise ProtocolError(f"a reply to {fences}, wanted at most task {host.asked}, attempt {attempt}, a snapshot before it")
        if host.n_replies >= host.n_sent + _MAX_REPEATED:
            raise ProtocolError(f"it has sent {host.n_replies + 1} replies, but was asked for {host.n_sent}")
        return self._roster.layout.own[host.name]
