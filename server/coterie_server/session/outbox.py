"""Sends tasks and session frames to hosts. Tasks are kept until no host can need them again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from coterie.record.ledger import DOWN
from coterie.v1 import session_pb2
from coterie.wire.codec import continued, encode
from coterie.wire.messages import Message
from coterie.wire.precision import Precision
from coterie_server.session.bookings import Bookings
from coterie_server.session.run_state import Host, RunState, Sent
from coterie_server.session.thinning import Thinning


class Outbox:
    """Sends to the hosts. With `keeps_log` it keeps tasks for hosts that come back; a parent without a log is never resumed."""

    def __init__(self, state: RunState, bookings: Bookings, precision: Precision, thinning: Thinning, *, keeps_log: bool) -> None:
        self.log_bytes = 0  # of tasks that are kept
        self.durable_seq = 0  # answers up to this task may be forgotten by their hosts
        self.with_settings: dict[str, int] = {}  # hosts that have received the settings of this stage, and in which task
        self._state, self._bookings = state, bookings
        self._precision, self._thinning, self._keeps_log = precision, thinning, keeps_log

    def send_frame(self, host: Host, frame: session_pb2.JoinResponse) -> None:
        """Sends a frame of the session to a host that is connected."""
        if host.link is not None:
            host.session_bytes[DOWN] += frame.ByteSize()
            host.link.send_frame(frame)

    async def written(self) -> None:
        """Lets small frames go out before the caller goes on: writers are woken in one turn of the loop, and write in the next."""
        for _ in range(2):
            await asyncio.sleep(0)

    def ask(self, host: Host, messages: Sequence[Message]) -> None:
        """Sends the next task to a host; one that is not connected gets it when it is back."""
        state = self._state
        task = session_pb2.Task(seq=state.seq, attempt=state.attempt, stage=state.stage, round=state.round)
        task.durable_seq = self.durable_seq if self._keeps_log else host.acked
        if host.snapshot_due:
            task.snapshot, host.snapshot_due = 1, False
        if host.name not in self.with_settings:
            task.stage_json = state.stage_json
            self.with_settings[host.name] = state.seq
        parts, seen = self._thinning.task(host.name, messages, at := (state.stage, state.round))
        sent = Sent(state.seq, encode(task, parts, self._precision), 0, at=at, seen=seen)
        if not self._keeps_log and host.log:
            host.forgotten = host.log[-1].seq
            host.log.clear()
        host.log.append(sent)
        host.asked = state.seq
        self.log_bytes += sent.encoded.n_bytes if self._keeps_log else 0
        if host.link is not None:
            self._send(host, sent, is_replay=False)

    def catch_up(self, host: Host) -> None:
        """Sends a host that is back the tasks that it missed or has not answered."""
        for sent in tuple(host.log):  # a host in this process answers at once, and then tasks are forgotten
            if sent.seq > host.reached or sent.seq > host.acked:
                self._send(host, sent, is_replay=sent.seq <= host.acked)
        self._bookings.settle_or_fail()

    def forget(self, host: Host, durable_seq: int) -> None:
        """Forgets tasks up to `durable_seq` that the host has answered: it will not need them again."""
        open_tasks = [*host.taken, *([host.errand.seq] if host.errand else [])]  # a resumed parent may need their answers again
        taken = min([host.acked, *(task - 1 for task in open_tasks)])
        while host.log and host.log[0].seq <= durable_seq and host.log[0].seq <= taken:
            sent = host.log.popleft()
            host.forgotten = sent.seq
            self.log_bytes -= sent.encoded.n_bytes if self._keeps_log else 0

    def _send(self, host: Host, sent: Sent, *, is_replay: bool) -> None:
        if host.link is None:
            return
        state, encoded, resent = self._state, sent.encoded, sent.times
        is_first = resent == 0 and not is_replay
        if not is_first:
            frame = session_pb2.JoinResponse.FromString(encoded.head).task
            frame.replay, frame.resent, frame.attempt = int(is_replay), resent, state.attempt
            frame.reply_held = host.held.bytes_of(sent.seq, state.attempt)
            held = host.holds.bytes if (host.holds.seq, host.holds.attempt) == (sent.seq, state.attempt) else 0
            encoded = continued(frame, encoded, held)
            if (n_through := encoded.held + frame.reply_held) > sent.n_through:  # it comes and goes, but something gets through
                sent.n_through, host.absent_s = n_through, 0.0
        sent.times += 1
        host.n_sent += not is_replay
        is_awaited = host.errand is not None and host.errand.seq == sent.seq
        is_late = not is_awaited and (state.pending is None or sent.seq != state.pending.seq)  # the exchange went on without this host
        self._bookings.add(host, (encoded.entries, sent.seq, state.attempt, DOWN, resent), is_useful=is_first and not is_late)
        if state.tracer is not None:
            state.tracer.sent(host.name, sent.seq, encoded.entries)
        host.link.send(encoded)
