"""Hosts that break the protocol, cannot go on, are lost or late: they end the run, or their own part in it where the others may go on."""

from __future__ import annotations

import math
from collections.abc import Sequence

from coterie.errors import ConfigError, CoterieError, RunError, StoppedError
from coterie.findings import Finding
from coterie.session.failures import finding_in, sentence_of
from coterie.v1 import session_pb2
from coterie.wire.assembler import Held
from coterie_server.session.attendance import Attendance
from coterie_server.session.duty import Duty, Shared
from coterie_server.session.refusal import short_name
from coterie_server.session.run_state import Host, Pending

NOT_SPARED = "; on_loss is skip, but "  # before the reason why the run cannot go on without a host
STOP_S = 10.0  # for the round under way, once the run is to stop; one that takes longer is repeated
_BREACH = Finding("R7")


class Strikes(Duty):
    """Decides what a host's mistake or failure does to the run."""

    def __init__(self, shared: Shared, attendance: Attendance) -> None:
        super().__init__(shared)
        self._attendance = attendance

    def malformed(self, host: Host, reason: str) -> None:
        """A frame of a host's stream was malformed or out of order. The stream is given up; the host may come back on another."""
        sentence = f"host {host.name!r} broke the protocol: {reason}"
        self._journal.turned_away(host.name, sentence)
        if self._state.has_started and self._rules.on_loss == "skip" and not self._why_not_spared(host):
            host.n_breaches += 1
            self._strike(host, "INVALID_ARGUMENT", sentence)

    def broke(self, host: Host, error: CoterieError) -> None:
        """A whole reply or a book is wrong: the end of the run, unless it has not begun or the others may go on alone."""
        if not isinstance(error, RunError):
            error = RunError(f"host {host.name!r} broke the protocol: {error}", _BREACH)
        self._journal.turned_away(host.name, str(error))
        if self._state.has_started and self._rules.on_loss == "skip":
            host.n_breaches += 1
            self._strike_or_fail(host, "INVALID_ARGUMENT", error)
        elif (self._roster.members is not None and not self._participation.skips_late) or self._state.is_over:
            self._state.fail(error)
        else:
            self._give_up(host, "INVALID_ARGUMENT", str(error))

    def said_failure(self, name: str, failure: session_pb2.Failure, host: Host | None) -> None:
        """A host says that it cannot go on. `host` is None for a peer that is not (yet) the host: this one or another may still join."""
        finding = finding_in(failure.finding)
        why, noun = f"{sentence_of(finding, self._shared.experiment)}; its own log names it", self._rules.noun
        if self._state.has_started and host is not None:
            family = ConfigError if failure.config else RunError
            self.has_failed(host, family(f"{noun} {name!r}: {why}", finding, below=Finding("R1")))
        else:
            self._journal.turned_away(name, f"{noun} {short_name(name)!r} cannot join: {why}", finding)

    def has_failed(self, host: Host, error: CoterieError) -> None:
        """A host of a run that has started cannot go on, or will never answer."""
        if self._rules.on_loss == "skip":
            self._journal.turned_away(host.name, error.public)
            self._strike_or_fail(host, "ABORTED", error)
        else:
            self._state.fail(error)

    def _give_up(self, host: Host, code: str, reason: str) -> None:
        if host.link is not None:
            host.link.close(code, reason)
            self._attendance.lost(host, reason)

    def _strike_or_fail(self, host: Host, code: str, error: CoterieError) -> None:
        """Ends the host's part in the run where the others may go on, and the run where they may not."""
        if why := self._why_not_spared(host):
            self._state.fail(type(error)(f"{error}{NOT_SPARED}{why}", error.finding, below=error.below))
        else:
            self._strike(host, code, error.public)

    def _why_not_spared(self, host: Host) -> str:
        """Why the run cannot go on without this host from now on, "" when it can."""
        # The run is over, or repeats decisions and does not wait for the host now. A later exchange that does will say what it misses.
        if self._state.is_over or not (self._participation.decides or self._state.awaits(host.name)):
            return ""
        return self._participation.why_not_without({host.name})

    def _strike(self, host: Host, code: str, reason: str) -> None:
        """Ends a host's stream, and goes on without its users at once. It is asked nothing more until it is back on another stream."""
        host.is_struck, host.held = True, Held()
        self._give_up(host, code, reason)
        pending = self._state.pending
        if self._state.is_over:
            return
        if pending is not None and host.name in pending.waiting:
            self._bookings.write_or_fail(lambda: self._participation.skip(pending, [host.name], reason))
        else:  # its answer is complete and checked, or was not waited for
            self._participation.go_on_without([host.name], self._state.seq + 1, reason)


class Deadlines(Duty):
    """Checks the deadlines of hosts and answers. Time comes in through `tick`."""

    def __init__(self, shared: Shared, attendance: Attendance, strikes: Strikes) -> None:
        super().__init__(shared)
        self._attendance, self._strikes = attendance, strikes
        self._said_at = -math.inf  # when the run last said whom it waits for
        self._stop_reason = ""  # why the run is to stop, once it is
        self._stop_at = math.inf  # when it is not waited for any longer

    def stop(self, reason: str) -> None:
        """Stops the run after its round, at the latest in `STOP_S`, and at once if the round waits for hosts that are not connected."""
        self._stop_reason, self._stop_at = reason, self._clock() + STOP_S
        self.stop_if_held_up()

    def tick(self) -> None:
        """Checks all deadlines. RunError when a decision could not be written down."""
        now, rules = self._clock(), self._rules
        for host in self._roster.connected:
            if now - host.heard_at > rules.silence_s and host.link is not None:
                host.link.close("DEADLINE_EXCEEDED", f"nothing heard from host {host.name!r} for {rules.silence_s:g} s")
                self._attendance.lost(host, f"nothing heard for {rules.silence_s:g} s")
            else:
                self._outbox.send_frame(host, session_pb2.JoinResponse(heartbeat=session_pb2.Heartbeat(seq=self._state.seq)))
        self.stop_if_held_up()
        pending = self._state.pending
        if pending is None or pending.done.done():
            return
        is_late = now - pending.since > rules.late_after_s
        if self._participation.skips_late and is_late and len(pending.answers) >= self._participation.fewest:
            self._participation.skip(pending, sorted(pending.waiting))
            return
        waiting = [self._roster.hosts[name] for name in sorted(pending.waiting)]
        # A host that comes and goes without ever answering is absent for the sum of its absences, unless the run waits for ever.
        lost = [
            host
            for host in waiting
            if (rules.on_loss != "wait" or host.link is None) and host.absence_s(now, pending.since) > rules.absence_timeout_s
        ]
        if lost:
            self._lose(pending, lost, now)
        for host in (host for host in waiting if host not in lost):
            self._check_answering(host, pending, now)

    def stop_if_held_up(self) -> None:
        """Ends a run that is to stop and waits for hosts that are not connected, or has had its time."""
        state, hosts = self._state, self._roster.hosts
        if not self._stop_reason or state.is_over:
            return
        waiting = () if state.pending is None else state.pending.waiting
        if not state.has_started or any(hosts[name].link is None for name in waiting):
            state.fail(StoppedError(f"stopped by {self._stop_reason} while waiting for {self._rules.noun}s", Finding("R4")))
        elif waiting and self._clock() >= self._stop_at:
            text = f"stopped by {self._stop_reason} in round {state.round}, which would have taken longer than {STOP_S:g} s more"
            state.fail(StoppedError(text, Finding("R4")))

    def _lose(self, pending: Pending, lost: Sequence[Host], now: float) -> None:
        """These hosts have been absent for too long: `federation.on_loss` says what then."""
        rules, hosts = self._rules, self._roster.hosts
        if rules.on_loss == "wait":
            if now - self._said_at >= rules.absence_timeout_s:
                self._said_at = now
                seconds = max(host.absence_s(now, pending.since) for host in lost)
                text = f"waiting in round {self._state.round} for {self._roster.listed(lost)}, absent for {seconds:.0f} s"
                self._journal.announce("wait", f"{text} (federation.on_loss is 'wait')", hosts=[host.name for host in lost])
            return
        why = self._participation.why_not_without({host.name for host in lost}) if rules.on_loss == "skip" else ""
        if rules.on_loss == "skip" and not why:
            self._participation.skip(pending, [host.name for host in lost])
            return
        needed = f"{len(hosts)} {rules.noun}{'s' if len(hosts) > 1 else ''}"
        text = f"need {needed}, have {len(self._roster.connected)}: {self._roster.listed(lost[:1])}"
        text += f" absent since round {self._state.round} for {rules.absence_timeout_s:g} s"
        refused = self._journal.refused.get(lost[0].name)
        text += (f"; {refused}" if refused else "") + (f"{NOT_SPARED}{why}" if why else "")
        self._state.fail(RunError(text, Finding("R3", len(lost))))

    def _check_answering(self, host: Host, pending: Pending, now: float) -> None:
        """A connected host has `federation.task_timeout_s` to answer."""
        rules = self._rules
        if now - pending.since - host.absence_s(now, pending.since) <= rules.task_timeout_s or host.link is None:
            return
        if not (rules.is_two_tier and rules.on_loss == "wait"):  # an aggregator may itself wait for a lost host, however long
            reason = f"{rules.noun} {host.name!r} has not answered task {pending.seq} for {rules.task_timeout_s:g} s"
            self._strikes.has_failed(host, RunError(reason, Finding("R3")))
