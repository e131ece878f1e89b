"""Decides which hosts take part in an exchange: some are not waited for, some are not asked at all.

A choice that depends on the clock is a decision. It is written down before anything follows from it, so that a later attempt can repeat it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from coterie.experiment.federation import FederationRules
from coterie_server.session.journal import Journal
from coterie_server.session.ports import Recorder
from coterie_server.session.refusal import shortened
from coterie_server.session.run_state import Host, Pending, RunState

_PREPARING = "the preparation needs every user"


class Participation:
    """Decides whether a run goes on without some hosts."""

    def __init__(self, state: RunState, rules: FederationRules, hosts: Mapping[str, Host], recorder: Recorder, journal: Journal) -> None:
        self.may_skip = False  # whether the round under way can leave late hosts out
        self.needs_everyone = _PREPARING  # why the run cannot go on without a lost host, "" where it can
        self.skips: dict[int, frozenset[str]] = {}  # decisions to repeat: exchange -> hosts whose answers are not waited for
        self.passes: dict[int, frozenset[str]] = {}  # and those that are not asked at all
        self.arrivals: dict[int, frozenset[str]] = {}  # and those whose answers an exchange with `within` has taken
        self.repeats_all = False  # all decisions are those of another run, and none is made here
        self.furthest = 0  # the last exchange of an earlier attempt that any host has seen: up to it, decisions are repeated
        self._state, self._rules, self._hosts = state, rules, hosts
        self._recorder, self._journal = recorder, journal
        self._out: set[str] = set()  # hosts that are left out until they have caught up

    def restore(self) -> None:
        """After a resume: the hosts that owe an answer are those that the earlier attempt had left out."""
        self._out.update(name for name, host in self._hosts.items() if host.owes and host.errand is None)

    @property
    def skips_late(self) -> bool:
        """Whether late hosts can be left out now."""
        return self._rules.late == "skip" and self.may_skip and self.decides

    @property
    def decides(self) -> bool:
        """Whether decisions are made now, and not repeated from an earlier attempt or another run.

        Hosts answer exchanges of an earlier attempt from their stores, so these must be the same exchanges.
        """
        return not self.repeats_all and self._state.seq >= self.furthest

    @property
    def fewest(self) -> int:
        """How many hosts must take part for the others to be left out."""
        return self._rules.min_hosts or 1

    def why_not_without(self, names: set[str]) -> str:
        """Why the exchange under way cannot go on without these hosts, "" when it can."""
        if self.needs_everyone:
            return self.needs_everyone
        if not self.decides:
            return f"exchange {self._state.seq} is repeated from an attempt or a run in which it answered"
        n_left = len(self._hosts) - len(self._out | names)
        return f"{n_left} of the at least {self.fewest} hosts wanted are left" if n_left < self.fewest else ""

    def passed_over(self, names: Iterable[str]) -> list[str]:
        """The hosts of `names` that are not asked, since they still owe the answer to an exchange that went on without them.

        Asked again, a slow host would only fall further behind, and the messages for a lost one would pile up.
        """
        seq = self._state.seq
        if self.repeats_all or seq <= self.furthest:
            return sorted(self.passes.get(seq, frozenset()).intersection(names))
        for name in sorted(name for name in self._out if not (self._hosts[name].owes or self._hosts[name].is_struck)):
            self._out.discard(name)
            self._journal.announce("back", f"host {name!r} takes part again from exchange {seq} on", host=name, seq=seq)
        behind = sorted(name for name in names if self._can_pass(self._hosts[name]))
        if not behind or len(self._hosts) - len(self._out.union(behind)) < self.fewest:
            return []
        self._recorder.decide(seq, "pass", behind)
        self.go_on_without(behind, seq)
        return behind

    def _can_pass(self, host: Host) -> bool:
        if not (host.owes or host.is_struck) or "skip" not in (self._rules.late, self._rules.on_loss):
            return False
        is_lost = self._rules.on_loss == "skip" and not self.needs_everyone and host.link is None
        return self.may_skip or is_lost

    def skip(self, pending: Pending, names: Sequence[str], why: str = "") -> None:
        """The exchange under way goes on without the answers of these hosts."""
        self._recorder.decide(pending.seq, "skip", list(names))
        self.go_on_without(names, pending.seq, why)
        pending.leave_out(names)

    def go_on_without(self, names: Sequence[str], seq: int, why: str = "") -> None:
        """Leaves hosts out from exchange `seq` on, until they have caught up."""
        if not self._out.issuperset(names):
            text = f"going on without {', '.join(names)} from exchange {seq} on"
            self._journal.announce("skip", f"{text}: {shortened(why)}" if why else text, seq=seq)
        self._out.update(names)
