"""Several runs one after the other, each in a folder of its own: finished ones are kept, one that was interrupted goes on where it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from coterie.config import Experiment
from coterie.errors import RunError
from coterie_deploy.folders import is_finished, nothing_left_of_a_failed_start
from coterie_deploy.launch import Launch, Transport, launch
from coterie_deploy.server import with_advice
from coterie_deploy.shipped import FROZEN
from coterie_deploy.signals import Stop
from coterie_server.engine import Progress


@dataclass(frozen=True)
class How:
    """How each run is started."""

    transport: Transport = "grpc"
    data: Path | None = None


@dataclass(frozen=True)
class Wanted:
    """A run that there is to be."""

    name: str
    folder: Path
    experiment: Callable[[], Experiment]


class Shown(Protocol):
    """What is told how far the runs are; numbers count from 1."""

    def skip(self, number: int) -> None:
        """A run was finished before."""

    def begin(self, number: int) -> None:
        """A run comes next."""

    def __call__(self, progress: Progress) -> None:
        """A round of it has been made."""


async def run_all(runs: Sequence[Wanted], how: How, shown: Shown, stop: Stop, advice: str) -> None:
    """Makes the runs that are not finished. Raises CoterieError; of one that was asked to stop, with `advice` on how to go on."""
    for number, wanted in enumerate(runs, start=1):
        place = wanted.folder
        if is_finished(place):
            shown.skip(number)
            continue
        if stop.is_set():
            raise RunError(f"stopped by {stop.by} before {wanted.name}: {advice}")
        shown.begin(number)
        launched = Launch(how.transport, place, how.data, (place / FROZEN).is_file(), observer=shown, stop=stop)
        try:
            with nothing_left_of_a_failed_start(place):
                await launch(wanted.experiment(), launched)
        except RunError as error:
            raise with_advice(error, stop, advice) from None
