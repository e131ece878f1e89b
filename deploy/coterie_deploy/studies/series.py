"""A series of runs, each in a folder of its own: finished ones are kept, one that was interrupted goes on where it was."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from coterie.errors import ConfigError, RunError
from coterie.experiment.config import Experiment, experiment_from
from coterie_deploy.engines.launch import Launch, Transport, launch
from coterie_deploy.read.folders import is_finished, nothing_left_of_a_failed_start
from coterie_deploy.read.shipped import FROZEN, difference
from coterie_deploy.read.tabular import write_text
from coterie_deploy.roles.server import with_advice
from coterie_deploy.terminal.signals import Stop
from coterie_server.run.engine import Progress

T = TypeVar("T")  # a dataclass of what JSON can hold


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


@dataclass(frozen=True)
class Series(Generic[T]):
    """A kind of series. A file in its folder says what its runs are: `--resume` needs no more."""

    noun: str  # what the runs are together
    command: str  # of `coterie`, which makes them
    file: str
    of: Callable[..., T]
    runs: str  # a pattern of the runs' folders

    def folder_named(self, named: Any, *, resume: bool) -> Path | None:
        """The folder of such a series, where a command names one instead of an experiment; ConfigError unless it is to be resumed."""
        if not isinstance(named, str | os.PathLike) or not (Path(named) / self.file).is_file():
            return None
        if not resume:
            raise ConfigError(f"{named} is the folder of a {self.noun}, want --resume to go on with it, or an experiment to {self.command}")
        return Path(named)

    def started(self, folder: Path, *, resume: bool) -> T | None:
        """What a folder remembers; ConfigError where it remembers something and should not, or nothing and should."""
        if (folder / FROZEN).is_file():
            raise ConfigError(f"the folder {folder} is that of a run: choose another one with --output")
        if not (folder / self.file).is_file():
            if resume:
                raise ConfigError(f"there is no {self.noun} to resume in {folder}: it has no {self.file}")
            return None
        if not resume:
            used = f"the folder {folder} is used by another {self.noun}"
            raise ConfigError(f"{used}: choose another one with --output, or go on with it with --resume")
        return self.read(folder)

    def read(self, folder: Path) -> T:
        """What a folder remembers. ConfigError when it is damaged."""
        path = folder / self.file
        try:
            return self.of(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise ConfigError(f"{path} is damaged ({error}): start again with another --output") from None

    def check_same(self, experiment: Experiment, started: Experiment | None, place: Path, folder: Path) -> None:
        """ConfigError when the experiment is not the one that a run at `place` of the series in `folder` was started with."""
        found = None if started is None else difference(experiment, started)
        if found is not None:
            key, old, new = found
            again = f"go on with `coterie {self.command} {folder} --resume`"
            raise ConfigError(f"{key} is {new}, but {place} was started with {old}: {again}")

    async def make(self, what: Any, folder: Path, runs: Sequence[Wanted], how: How, shown: Shown, stop: Stop) -> None:
        """Remembers what the series is, and makes the runs that are not finished.

        Raises CoterieError; of one that was asked to stop, with advice on how to go on. A folder in which no run has begun is taken away
        when the experiment is wrong: the corrected command finds it free.
        """
        write_text(folder / self.file, json.dumps(asdict(what), indent=2) + "\n")
        try:
            await self._make(folder, runs, how, shown, stop)
        except ConfigError:
            if not any(folder.glob(self.runs)):
                with contextlib.suppress(OSError):
                    (folder / self.file).unlink()
                    folder.rmdir()
            raise

    async def _make(self, folder: Path, runs: Sequence[Wanted], how: How, shown: Shown, stop: Stop) -> None:
        advice = f"coterie {self.command} {folder} --resume"
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
            except ConfigError as error:
                raise ConfigError(f"{wanted.name}: {error}") from None
            except RunError as error:
                raise with_advice(error, stop, advice) from None


def federation_of(
    content: Mapping[str, Any], given: Mapping[str, Any], transport: Transport, default_hosts: Callable[[Experiment], int]
) -> dict[str, Any]:
    """Who runs an experiment, where that is not what its content says: as given, and else as many hosts as is usual."""
    own, found = content.get("federation", {}), dict(given)
    if transport == "loopback" and own.get("topology") == "clusters":
        found.setdefault("topology", "flat")  # one process has one tier; the bits are the same
    if "hosts" not in {**own, **found}:
        found["hosts"] = default_hosts(experiment_from({**content, "federation": {**own, **found}}))
    return found
