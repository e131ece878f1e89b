"""Exchanges that wait for nobody: they take the answers that have come, of the tasks of this exchange or of earlier ones.

Which answers an exchange takes depends on the clock. It is a decision, written down when the exchange ends and before anything follows from
it. A replay waits for the answers of exactly these hosts; the others' are kept for the exchange that took them.
"""

from __future__ import annotations

from collections.abc import Iterable

from coterie.errors import CoterieError, RunError
from coterie.wire.messages import Message
from coterie_server.interface.wanted import check_wanted
from coterie_server.session.duty import Duty, Shared
from coterie_server.session.run_state import Errand, Host, Pending
from coterie_server.session.strikes import Strikes


class Arrivals(Duty):
    """Keeps the answers that no exchange has taken yet, and says which ones end an exchange."""

    def __init__(self, shared: Shared, strikes: Strikes) -> None:
        super().__init__(shared)
        self._strikes = strikes

    def begin(self, pending: Pending, asked: Iterable[str], within: int) -> None:
        """The exchange `pending` asks these hosts. RunError where one owes an answer, or where the arrivals to repeat cannot be had."""
        hosts, ours = self._roster.hosts, self._participation
        for name in asked:
            if hosts[name].errand is not None:
                raise RunError(f"host {name!r} is asked in exchange {pending.seq}, but owes an earlier answer, want hosts that owe nothing")
            hosts[name].errand = Errand(pending.seq)
        errands = {name: host.errand for name, host in hosts.items() if host.errand is not None}
        decided = ours.arrivals.get(pending.seq)
        if decided is None and ours.repeats_all:
            raise RunError(f"exchange {pending.seq} is not among the arrivals to repeat: the recorded run took none in it")
        if decided is not None and (strange := sorted(decided - errands.keys())):
            raise RunError(f"the arrivals to repeat name host {strange[0]!r} in exchange {pending.seq}, which owes no answer")
        self._check(pending, errands)
        if decided is None:
            pending.needed = frozenset(name for name, errand in errands.items() if pending.seq - errand.seq >= within)
        for name, errand in errands.items():
            if errand.answer is not None and (decided is None or name in decided):
                pending.answers[name] = errand.answer
        must = decided if decided is not None else pending.needed if pending.answers else errands.keys()
        pending.waiting = {name for name in must or () if name not in pending.answers}

    def _check(self, pending: Pending, errands: dict[str, Errand]) -> None:
        """Checks answers that came between two exchanges. What is wrong ends the run, which cannot go on without the host."""
        for name, errand in errands.items():
            if errand.answer is not None and not errand.is_checked:
                try:
                    check_wanted(errand.answer, self._roster.layout.own[name], pending.wanted)
                except CoterieError as error:
                    self._strikes.broke(self._roster.hosts[name], error)
                errand.is_checked = True
        self._state.raise_failure()

    def come(self, host: Host, errand: Errand, messages: list[Message]) -> bool:
        """The answer of an errand has come; whether the exchange under way may take it."""
        pending = self._state.pending
        errand.answer, errand.is_checked = messages, pending is not None
        return pending is not None and (pending.needed is not None or host.name in pending.waiting)

    def taken(self, pending: Pending) -> dict[str, list[Message]]:
        """The answers that this exchange takes. RunError when that cannot be written down."""
        names = [name for name in self._roster.hosts if name in pending.answers]  # in the order of the roster
        if pending.needed is not None:
            self._shared.recorder.decide(pending.seq, "arrive", names)
        for name in names:
            host = self._roster.hosts[name]
            if host.errand is not None:
                if host.errand.seq < pending.seq:
                    host.taken[host.errand.seq] = pending.seq
                host.errand = None
        return {name: pending.answers[name] for name in names}
