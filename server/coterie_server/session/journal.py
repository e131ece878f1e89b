"""The events of a hub, and why hosts that are not connected were turned away."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from coterie.findings import Finding
from coterie_server.session.ports import Recorder
from coterie_server.session.refusal import short_name, shortened

_FIRST_FEW = 20  # events of one kind that are all written down; after them, one whenever their number has doubled
_MAX_REFUSED = 100  # hosts that were turned away and are remembered
_MAX_REASONS = 3  # of these, how many a sentence names


class Sparse:
    """Selects which of many similar events are written down. A host can cause some again and again, and must not fill the disk."""

    def __init__(self) -> None:
        self._times: dict[tuple[str, str], int] = {}

    def due(self, kind: str, who: str) -> int:
        """How many events of this kind there were, if this one is to be written down, else 0. `who`: one of a bounded number of names."""
        times = self._times[kind, who] = self._times.get((kind, who), 0) + 1
        doublings, rest = divmod(times, _FIRST_FEW)
        return times if times <= _FIRST_FEW or (not rest and not doublings & (doublings - 1)) else 0


class Journal:
    """Writes events; `known` are the names of the hosts of the run."""

    def __init__(self, recorder: Recorder, known: Collection[str]) -> None:
        self.refused: dict[str, str] = {}  # the latest reason why each unconnected host was turned away, oldest host first
        self.notice = ""  # the latest sentence on hosts that the run waits for, leaves out, or takes back
        self._recorder, self._known, self._sparse = recorder, known, Sparse()
        self._findings: dict[str, Finding] = {}  # what unconnected hosts have said about the reason

    def announce(self, kind: str, text: str, **data: Any) -> None:
        """An event that is shown as the latest notice, too."""
        self.notice = text
        self._recorder.event(kind, text, **data)

    def event_of(self, kind: str, name: str, text: str, **data: Any) -> None:
        """An event that a peer can cause as often as it likes: later ones are written down ever more rarely."""
        times = self._sparse.due(kind, name if name in self._known else "")
        if times:
            more = {"times": times} if times > 1 else {}
            self._recorder.event(kind, text, **data, **more)

    def turned_away(self, name: str, reason: str, finding: Finding | None = None) -> None:
        """A host could not join, or cannot stay. `name` is empty for a peer that has not said it; `finding` is what the host has said."""
        name, reason = short_name(name) if name not in self._known else name, shortened(reason)
        self.refused.pop(name, None)
        if name:
            self.refused[name] = reason
        if len(self.refused) > _MAX_REFUSED:
            del self.refused[next(iter(self.refused))]
        if finding is not None:
            self._findings = {**{who: said for who, said in self._findings.items() if who in self.refused}, name: finding}
        self.event_of("refused", name, reason, host=name)

    def joined(self, name: str) -> None:
        """The host is connected: why it was turned away is forgotten."""
        self.refused.pop(name, None)
        self._findings.pop(name, None)

    def latest_reasons(self) -> str:
        """The end of a sentence on why hosts are missing. A reason that several hosts share is said once."""
        alike: dict[str, list[str]] = {}  # by reason without the host's name: the reasons, latest last
        for name, reason in self.refused.items():
            without = reason.replace(repr(name), "")
            alike[without] = [*alike.pop(without, ()), reason]
        said = [reasons[-1] + (f" ({len(reasons)} hosts)" if len(reasons) > 1 else "") for reasons in alike.values()]
        return "".join(f"; {reason}" for reason in said[-_MAX_REASONS:])

    def latest_finding(self, otherwise: Finding) -> Finding:
        """What the last host that was turned away has said of why."""
        return next(reversed(self._findings.values()), otherwise)
