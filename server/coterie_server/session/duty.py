"""What the duties of a hub have in common: the objects that all of them work on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from coterie.experiment.config import Experiment
from coterie_server.session.bookings import Bookings
from coterie_server.session.journal import Journal
from coterie_server.session.outbox import Outbox
from coterie_server.session.participation import Participation
from coterie_server.session.ports import Recorder
from coterie_server.session.roster import Roster
from coterie_server.session.run_state import RunState


@dataclass(frozen=True)
class Shared:
    """The objects of one hub that its duties share."""

    experiment: Experiment
    state: RunState
    roster: Roster
    recorder: Recorder
    journal: Journal
    bookings: Bookings
    outbox: Outbox
    participation: Participation
    clock: Callable[[], float]


class Duty:
    """One duty of a hub."""

    def __init__(self, shared: Shared) -> None:
        self._shared, self._rules, self._clock = shared, shared.experiment.federation, shared.clock
        self._state, self._roster, self._journal = shared.state, shared.roster, shared.journal
        self._bookings, self._outbox, self._participation = shared.bookings, shared.outbox, shared.participation
