"""Several runs one after the other, each in a folder of its own: finished ones are kept, one that was interrupted goes on where it was."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from coterie.errors import ConfigError, RunError
from coterie.experiment.config import Experiment
from coterie_deploy.engines.launch import Launch, Transport, launch
from coterie_deploy.read.folders import is_finished, nothing_left_of_a_failed_start
from coterie_deploy.read.shipped import FROZEN
from coterie_deploy.roles.server import with_advice
from coterie_deploy.terminal.signals import Stop
from coterie_server.run.engine import Progress

T = TypeVar("T")  # a dataclass of what JSON can hold


@dataclass(frozen=True)
class Memory(Generic[T]):
    """The file in the folder of several runs that says what they are: `--resume` needs no more."""

    noun: str  # what the runs are together
    file: str
    of: Callable[..., T]
    runs: str  # a pattern of the runs' folders

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

    def write(self, what: Any, folder: Path) -> None:
        """Remembers it in its folder."""
        write_whole(folder / self.file, json.dumps(asdict(what), indent=2) + "\n")

    def forget_unless_begun(self, folder: Path) -> None:
        """Takes the folder away when no run has left anything in it: the corrected command finds it free."""
        if not any(folder.glob(self.runs)):
            with contextlib.suppress(OSError):
                (folder / self.file).unlink()
                folder.rmdir()


def write_whole(path: Path, text: str) -> None:
    """Whoever reads the file finds all of it or what was there before. Raises RunError when it cannot be written."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error


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
        except ConfigError as error:
            raise ConfigError(f"{wanted.name}: {error}") from None
        except RunError as error:
            raise with_advice(error, stop, advice) from None
