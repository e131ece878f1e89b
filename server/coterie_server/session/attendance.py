"""Hosts that come and go: hellos, the join barrier, and the ends of streams."""

from __future__ import annotations

import math
from collections.abc import Iterable

from coterie.arrays import Indices
from coterie.errors import RunError
from coterie.findings import Finding
from coterie.session.failures import finding_of
from coterie.v1 import session_pb2
from coterie_server.interface.half import Members
from coterie_server.session.admission import check_hello
from coterie_server.session.duty import Duty, Shared
from coterie_server.session.ports import Link
from coterie_server.session.refusal import Refusal, shortened
from coterie_server.session.roster import missing_clusters
from coterie_server.session.run_state import Host

_SAY_S = 60.0  # of waiting at the barrier before it is said for whom; then twice as long, and so on


class Attendance(Duty):
    """Admits hosts, welcomes them, sends them tasks that they missed, and records when they are gone."""

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
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
        self._numerics[host.name] = hello.numerics
        if len(set(self._numerics.values())) > 1:
            text = shortened("; ".join(f"{name}: {numerics}" for name, numerics in sorted(self._numerics.items())))
            self._journal.event_of("numerics", host.name, f"hosts compute with different libraries, bits may differ: {text}")
        text, n_here = f"host {host.name!r} joined with {len(host.users)} users", len(roster.connected)
        self._journal.event_of("join", host.name, text, host=host.name, hosts_here=n_here)
        self._note_findings(host.name, hello)
        if roster.is_numbered:
            self._outbox.send_frame(host, roster.welcome(host))
            self._tell_peers()
        if state.finish is not None:
            finish = session_pb2.Finish(books_held=host.n_books)
            finish.MergeFrom(state.finish.finish)
            self._outbox.send_frame(host, session_pb2.JoinResponse(finish=finish))
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
        state, roster, rules = self._state, self._roster, self._rules
        start, patience_s, seen, said_s = self._clock(), self._join_timeout_s(), 0, _SAY_S
        deadline = start + patience_s
        while len(here := roster.connected) < rules.hosts and (now := self._clock()) < deadline:
            state.raise_failure()
            if len(roster.hosts) > seen:  # a host has joined that was never here: others may be on their way
                deadline, seen = now + patience_s, len(roster.hosts)
            if now - start >= said_s:
                text = f"waiting for {rules.hosts - len(here)} of {rules.hosts} {rules.noun}s for {now - start:.0f} s, have {_names(here)}"
                self._journal.announce("wait", f"{text}{missing_clusters(rules, here)}{self._journal.latest_reasons()}")
                said_s *= 2
            await state.change_within(min(0.5, deadline - now))
        state.raise_failure()
        if roster.members is None:
            self._check_number(roster.connected)
            roster.fix()
            for host in roster.connected if roster.is_numbered else ():
                self._outbox.send_frame(host, roster.welcome(host))
            self._tell_peers()
        state.has_started = True
        return roster.fixed

    def _tell_peers(self) -> None:
        """Tells the aggregators where the others are, one of which may have moved."""
        if self._rules.has_peers:
            frame = self._roster.peers()
            for host in self._roster.connected:
                self._outbox.send_frame(host, frame)

    def _join_timeout_s(self) -> float:
        """How long the barrier waits for one more host."""
        rules = self._rules
        if rules.join_timeout_s != "none":
            return rules.join_timeout_s
        # A run that goes on may be without hosts that it had left out before.
        return rules.absence_timeout_s if self._roster.members is not None and rules.on_loss == "skip" else math.inf

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
        rules = self._rules
        needed = rules.min_hosts or rules.hosts
        if len(here) < needed:
            waited = f"after {self._join_timeout_s():g} s{' without another' if here else ''} (federation.join_timeout_s)"
            text = f"need {needed} of {rules.hosts} {rules.noun}s, have {len(here)} {waited}: {_names(here)}"
            # If a host of an aggregator has said why it is not here, the aggregator tells its own parent.
            why = self._journal.latest_finding(Finding("R2"))
            raise RunError(f"{text}{missing_clusters(rules, here)}{self._journal.latest_reasons()}", why, below=Finding("R2"))

    def _catch_up(self, host: Host) -> None:
        self._outbox.catch_up(host)
        if host.acked > host.reached:
            text = f"host {host.name!r} is sent tasks {host.reached + 1} to {host.acked} again"
            self._journal.event_of("replay", host.name, text, host=host.name, reached=host.reached, acked=host.acked)

    def _note_findings(self, name: str, hello: session_pb2.Hello) -> None:
        """Records what a host says of its data, once."""
        said = tuple(map(finding_of, hello.findings))
        found = tuple(finding for finding in said if finding is not None)
        if found == self._findings.get(name, ()):
            return
        self._findings[name], whose = found, f"{self._rules.noun} {name!r}"
        for finding in found:
            self._journal.event_of("data", name, f"{whose}: {finding.sentence}", host=name, rule=finding.rule, count=finding.count)
        if n_unknown := len(said) - len(found):
            what = "a note on its data has a rule" if n_unknown == 1 else f"{n_unknown} notes on its data have rules"
            self._journal.event_of("data", name, f"{whose}: {what} that this version does not know", host=name)


def _names(hosts: Iterable[Host]) -> str:
    return ", ".join(sorted(host.name for host in hosts)) or "none"
