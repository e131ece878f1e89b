"""Deadlines of a hub: silent hosts, late answers, lost hosts, and a request to stop while the run waits for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from coterie.errors import RunError
from coterie.findings import Finding
from coterie.v1 import session_pb2
from coterie_server.session.attendance import Attendance
from coterie_server.session.hosts import Host
from coterie_server.session.journal import Journal
from coterie_server.session.outbox import Outbox
from coterie_server.session.participation import Participation
from coterie_server.session.roster import Roster
from coterie_server.session.run_state import Pending, RunState
from coterie_server.session.strikes import NOT_SPARED, Strikes


class Deadlines:
    """Compares the clock with what is waited for. Time comes in through `tick`."""

    def __init__(
        self,
        state: RunState,
        roster: Roster,
        journal: Journal,
        outbox: Outbox,
        participation: Participation,
        attendance: Attendance,
        strikes: Strikes,
        clock: Callable[[], float],
    ) -> None:
        self._state, self._roster, self._rules, self._journal = state, roster, roster.rules, journal
        self._outbox, self._participation, self._attendance, self._strikes = outbox, participation, attendance, strikes
        self._clock = clock
        self._said_at = -math.inf  # when it was last said who is waited for
        self._stop_reason = ""  # why the run is to stop, once it is

    def stop(self, reason: str) -> None:
        """The run is to stop after its round: at once where that waits for hosts that are not here, now or later."""
        self._stop_reason = reason
        self._stop_if_held_up()

    def tick(self) -> None:
        """Checks all deadlines. RunError when a decision could not be written down."""
        now, rules = self._clock(), self._rules
        for host in self._roster.connected:
            if now - host.heard_at > rules.silence_s and host.link is not None:
                host.link.close("DEADLINE_EXCEEDED", f"nothing heard from host {host.name!r} for {rules.silence_s:g} s")
                self._attendance.lost(host, f"nothing heard for {rules.silence_s:g} s")
            else:
                self._outbox.send_frame(host, session_pb2.JoinResponse(heartbeat=session_pb2.Heartbeat(seq=self._state.seq)))
        self._stop_if_held_up()
        pending = self._state.pending
        if pending is None or pending.done.done():
            return
        is_late = now - pending.since > rules.late_after_s
        if self._participation.skips_late and is_late and len(pending.answers) >= self._participation.fewest:
            self._participation.skip(pending, sorted(pending.waiting))
            return
        waiting = [self._roster.hosts[name] for name in sorted(pending.waiting)]
        lost = [host for host in waiting if self._is_lost(host, now, pending.since)]
        if lost:
            self._lose(pending, lost, now)
        for host in (host for host in waiting if host not in lost):
            self._check_answering(host, pending, now)

    def _stop_if_held_up(self) -> None:
        state, hosts = self._state, self._roster.hosts
        waiting = () if state.pending is None else state.pending.waiting
        is_held_up = not state.has_started or any(hosts[name].link is None for name in waiting)
        if self._stop_reason and not state.is_over and is_held_up:
            state.fail(RunError(f"stopped by {self._stop_reason} while waiting for {self._rules.noun}s", Finding("R4")))

    def _is_lost(self, host: Host, now: float, since: float) -> bool:
        """A host that comes and goes without ever answering is absent for as long as it was gone in all, unless one waits for ever."""
        is_for_now = self._rules.on_loss == "wait" and host.link is not None
        return not is_for_now and host.absence_s(now, since) > self._rules.absence_timeout_s

    def _lose(self, pending: Pending, lost: Sequence[Host], now: float) -> None:
        """These hosts have been absent for too long: what then is `federation.on_loss`."""
        rules = self._rules
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
        else:
            text = f"{self._state_without(lost[0])}{f'{NOT_SPARED}{why}' if why else ''}"
            self._state.fail(RunError(text, Finding("R3", len(lost))))

    def _state_without(self, host: Host) -> str:
        rules, roster = self._rules, self._roster
        needed = f"{len(roster.hosts)} {rules.noun}{'s' if len(roster.hosts) > 1 else ''}"
        text = f"need {needed}, have {len(roster.connected)}: {roster.listed([host])}"
        why = f"; {self._journal.refused[host.name]}" if host.name in self._journal.refused else ""
        return f"{text} absent since round {self._state.round} for {rules.absence_timeout_s:g} s{why}"

    def _check_answering(self, host: Host, pending: Pending, now: float) -> None:
        """A host that is here has so long to answer."""
        rules = self._rules
        if now - pending.since - host.absence_s(now, pending.since) <= rules.task_timeout_s or host.link is None:
            return
        if not (rules.is_two_tier and rules.on_loss == "wait"):
            reason = f"{rules.noun} {host.name!r} has not answered task {pending.seq} for {rules.task_timeout_s:g} s"
            self._strikes.has_failed(host, RunError(reason, Finding("R3")))
        elif self._stop_reason:  # an aggregator may itself wait for a lost host, for as long as that takes
            text = f"stopped by {self._stop_reason} while {rules.noun} {host.name!r} works on task {pending.seq}"
            self._state.fail(RunError(text, Finding("R4")))
