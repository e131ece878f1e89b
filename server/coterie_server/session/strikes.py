"""Hosts that break the protocol or cannot go on: the end of the run, or, where the others may go on, of the host's part in it."""

from __future__ import annotations

from coterie.errors import ConfigError, CoterieError, RunError
from coterie.experiment.config import Experiment
from coterie.findings import Finding
from coterie.session.failures import finding_in, sentence_of
from coterie.v1 import session_pb2
from coterie_server.session.attendance import Attendance
from coterie_server.session.bookings import Bookings
from coterie_server.session.hosts import Host
from coterie_server.session.journal import Journal
from coterie_server.session.participation import Participation
from coterie_server.session.refusal import short_name
from coterie_server.session.roster import Roster
from coterie_server.session.run_state import RunState

NOT_SPARED = "; on_loss is skip, but "  # before the reason for which a run ends that might have gone on without a host
_BREACH = Finding("R7")


class Strikes:
    """Decides what a host's mistake or failure does to the run."""

    def __init__(
        self,
        experiment: Experiment,
        state: RunState,
        roster: Roster,
        journal: Journal,
        bookings: Bookings,
        participation: Participation,
        attendance: Attendance,
    ) -> None:
        self._experiment, self._rules = experiment, experiment.federation
        self._state, self._roster, self._journal, self._bookings = state, roster, journal, bookings
        self._participation, self._attendance = participation, attendance

    def malformed(self, host: Host, reason: str) -> None:
        """A frame of a host's stream was malformed or out of order. The stream is given up; the host may come back on another."""
        sentence = f"host {host.name!r} broke the protocol: {reason}"
        self._journal.turned_away(host.name, sentence)
        if self._state.has_started and self._rules.on_loss == "skip" and not self._why_not_spared(host):
            host.n_breaches += 1
            self._strike(host, "INVALID_ARGUMENT", sentence)

    def broke(self, host: Host, error: CoterieError) -> None:
        """A whole reply or a book is not what it must be: the end of the run, unless it has not begun or the others may go on alone."""
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
        """A host says that it cannot go on. `host` is None for who is not (yet) the host: it may come again, or another in its place."""
        finding = finding_in(failure.finding)
        why, noun = f"{sentence_of(finding, self._experiment)}; its own log names it", self._rules.noun
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
        """A host has broken the protocol or cannot go on, and `federation.on_loss` is skip: its own end, where the others may go on."""
        if why := self._why_not_spared(host):
            self._state.fail(type(error)(f"{error}{NOT_SPARED}{why}", error.finding, below=error.below))
        else:
            self._strike(host, code, error.public)

    def _why_not_spared(self, host: Host) -> str:
        """Why the run cannot go on without this host from now on, "" when it can."""
        # The run is over, or repeats decisions that do not wait for the host now; an exchange that does will say what it misses.
        if self._state.is_over or not (self._participation.decides or self._state.awaits(host.name)):
            return ""
        return self._participation.why_not_without({host.name})

    def _strike(self, host: Host, code: str, reason: str) -> None:
        """Ends a host's stream, and goes on without its users at once. Nothing more is asked of it until it is back on another stream."""
        host.is_struck = True
        self._give_up(host, code, reason)
        pending = self._state.pending
        if self._state.is_over:
            return
        if pending is not None and host.name in pending.waiting:
            self._bookings.write_or_fail(lambda: self._participation.skip(pending, [host.name], reason))
        else:  # its answer, complete and checked, is there, or was not waited for
            self._participation.go_on_without([host.name], self._state.seq + 1, reason)
