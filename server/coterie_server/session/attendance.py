"""Hosts that come and go: hellos, the join barrier, and the ends of streams."""

from __future__ import annotations

from collections.abc import Callable

from coterie.arrays import Indices
from coterie.errors import RunError
from coterie.findings import Finding
from coterie.session.failures import finding_of
from coterie.v1 import session_pb2
from coterie_server.interface.half import Members
from coterie_server.session.admission import check_hello
from coterie_server.session.hosts import Host
from coterie_server.session.journal import Journal
from coterie_server.session.outbox import Outbox
from coterie_server.session.participation import Participation
from coterie_server.session.ports import Link
from coterie_server.session.refusal import Refusal, shortened
from coterie_server.session.roster import Roster, missing_clusters
from coterie_server.session.run_state import RunState


class Attendance:
    """Lets hosts in, welcomes them, sends them what they missed, and notes when they are gone."""

    def __init__(
        self, state: RunState, roster: Roster, journal: Journal, outbox: Outbox, participation: Participation, clock: Callable[[], float]
    ) -> None:
        self._state, self._roster, self._journal = state, roster, journal
        self._outbox, self._participation, self._clock = outbox, participation, clock
        self._numerics: dict[str, str] = {}  # the libraries that hosts compute with
        self._findings: dict[str, tuple[Finding, ...]] = {}  # what hosts have said of their data

    def hello(self, hello: session_pb2.Hello, link: Link) -> None:
        """A host introduces itself. Raises Refusal."""
        state, roster = self._state, self._roster
        try:
            check_hello(roster, hello, state.furthest if hello.run_id else state.seq)
        except Refusal as refusal:
            self._journal.turned_away(hello.host, refusal.public)
            raise
        host = roster.connect(hello, link, self._clock())
        self._participation.furthest = max(self._participation.furthest, hello.last_seq)
        self._journal.joined(host.name)
        self._compare_numerics(hello)
        text, n_here = f"host {host.name!r} joined with {len(host.users)} users", len(roster.connected)
        self._journal.event_of("join", host.name, text, host=host.name, hosts_here=n_here)
        self._note_findings(host.name, hello)
        if roster.is_numbered:
            self._outbox.send_frame(host, roster.welcome(host))
        if state.finish is not None:
            self._outbox.send_frame(host, state.finish)
        elif roster.is_numbered:
            self._catch_up(host)
        state.changed()

    def lost(self, host: Host, reason: str) -> None:
        """A host's stream has ended."""
        self._roster.disconnect(host, self._clock())
        if self._roster.members is None:
            self._numerics.pop(host.name, None)
        if not self._state.is_over:
            text = f"host {host.name!r} is gone: {shortened(reason)}"
            self._journal.event_of("lost", host.name, text, host=host.name, round=self._state.round)
        self._state.changed()

    async def gather(self) -> Members:
        """The join barrier: waits for the hosts, fixes the member order and welcomes everyone. RunError when too few came."""
        state, roster, rules = self._state, self._roster, self._roster.rules
        deadline = self._clock() + rules.join_timeout_s
        while len(roster.connected) < rules.hosts and self._clock() < deadline:
            state.raise_failure()
            await state.change_within(min(0.5, deadline - self._clock()))
        state.raise_failure()
        if roster.members is None:
            self._check_number(roster.connected)
            roster.fix()
            for host in roster.connected if roster.is_numbered else ():
                self._outbox.send_frame(host, roster.welcome(host))
        assert roster.members is not None  # noqa: S101 - set above
        state.has_started = True
        return roster.members

    def number(self, numbers: Indices, clusters: Indices) -> None:
        """An aggregator learns the numbers of its users and of their clusters in the whole run, and welcomes its hosts."""
        if self._roster.is_numbered:
            return
        self._roster.number(numbers, clusters)
        for host in self._roster.connected:
            self._outbox.send_frame(host, self._roster.welcome(host))
            self._catch_up(host)

    def _check_number(self, here: list[Host]) -> None:
        """RunError when too few hosts are here."""
        rules = self._roster.rules
        needed = rules.min_hosts or rules.hosts
        if len(here) < needed:
            names = ", ".join(sorted(host.name for host in here)) or "none"
            waited = f"after {rules.join_timeout_s:g} s (federation.join_timeout_s)"
            text = f"need {needed} of {rules.hosts} {rules.noun}s, have {len(here)} {waited}: {names}"
            # An aggregator's parent hears what a host of it has found, if that is why it is not here.
            why = self._journal.latest_finding(Finding("R2"))
            raise RunError(f"{text}{missing_clusters(rules, here)}{self._journal.latest_reasons()}", why, below=Finding("R2"))

    def _catch_up(self, host: Host) -> None:
        self._outbox.catch_up(host)
        if host.acked > host.reached:
            text = f"host {host.name!r} is sent tasks {host.reached + 1} to {host.acked} again"
            self._journal.event_of("replay", host.name, text, host=host.name, reached=host.reached, acked=host.acked)

    def _compare_numerics(self, hello: session_pb2.Hello) -> None:
        self._numerics[hello.host] = hello.numerics
        if len(set(self._numerics.values())) > 1:
            text = "; ".join(f"{host}: {numerics}" for host, numerics in sorted(self._numerics.items()))
            self._journal.event_of("numerics", hello.host, f"hosts compute with different libraries, bits may differ: {shortened(text)}")

    def _note_findings(self, name: str, hello: session_pb2.Hello) -> None:
        """Writes down what a host says of its data, once."""
        said = tuple(map(finding_of, hello.findings))
        found = tuple(finding for finding in said if finding is not None)
        if found == self._findings.get(name, ()):
            return
        self._findings[name] = found
        whose = f"{self._roster.rules.noun} {name!r}"
        for finding in found:
            self._journal.event_of("data", name, f"{whose}: {finding.sentence}", host=name, rule=finding.rule, count=finding.count)
        if n_unknown := len(said) - len(found):
            what = "a note on its data has a rule" if n_unknown == 1 else f"{n_unknown} notes on its data have rules"
            self._journal.event_of("data", name, f"{whose}: {what} that this version does not know", host=name)
