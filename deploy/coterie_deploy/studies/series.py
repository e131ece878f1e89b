"""A series of runs, each in a folder of its own. It keeps finished runs, and resumes one that was interrupted."""

import asyncio
import contextlib
import copy
import gc
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from rich.console import Console

from coterie.errors import ConfigError, CoterieError, ProtocolError, RunError, StoppedError
from coterie.experiment.config import Experiment, experiment_from, experiment_to_json
from coterie_client.hosting.host import Host
from coterie_deploy.engines.launch import Launch, Transport, launch
from coterie_deploy.read.folders import is_finished, nothing_left_of_a_failed_start
from coterie_deploy.read.shipped import FROZEN, difference
from coterie_deploy.read.tabular import write_text
from coterie_deploy.roles.server import with_advice
from coterie_deploy.studies.progress import At, SeriesDisplay, series_display
from coterie_deploy.studies.side_by_side import GRACE_S, Pool, cores, here, named
from coterie_deploy.terminal.signals import Stop, stopping_on_signals
from coterie_deploy.view.progress import DRAWS_PER_S
from coterie_server.run.engine import Observer, Progress

ENDED = "ended.txt"  # in the folder of a run of a drill that could not go on: why
T = TypeVar("T")  # a dataclass of what JSON can hold


@dataclass(frozen=True)
class How:
    """How each run is started."""

    transport: Transport = "grpc"
    data: Path | None = None
    jobs: int | None = 1  # runs at a time; None: what suits them
    disguise: Callable[[Host], None] | None = None  # see `Launch`; a run may then end as one that cannot go on, and is done with


@dataclass(frozen=True)
class Wanted:
    """A run that there is to be."""

    name: str
    folder: Path
    experiment: Callable[[], Experiment]
    disguise: Callable[[Host], None] | None = None  # plain data, since it goes to a process


@dataclass(frozen=True)
class Series(Generic[T]):
    """A kind of series. A file in its folder describes its runs, so `--resume` needs nothing else."""

    noun: str
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
        """What the folder's file says, None for a new folder. ConfigError for a used one without `resume`, or with it for a new one."""
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
        """What the folder's file says. ConfigError when it is damaged."""
        path = folder / self.file
        try:
            return self.of(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise ConfigError(f"{path} is damaged ({error}): start again with another --output") from None

    def check_same(self, experiment: Experiment, started: Experiment | None, place: Path, folder: Path) -> None:
        """ConfigError when the experiment is not the one that a run at `place` of the series in `folder` was started with."""
        if started is not None and (found := difference(experiment, started)) is not None:
            key, old, new = found
            again = f"go on with `coterie {self.command} {folder} --resume`"
            raise ConfigError(f"{key} is {new}, but {place} was started with {old}: {again}")

    def make_here(
        self, what: Any, folder: Path, runs: Sequence[Wanted], how: How, err: Console, names: Sequence[str], **of_display: Any
    ) -> None:
        """As `make`, with a display of the runs under these names, until a signal asks to stop."""

        how, note = _with_jobs(how, runs)
        if note and not of_display.get("quiet"):
            print(note, file=err.file, flush=True)

        async def made() -> None:
            with stopping_on_signals() as stop, series_display(err, names, **of_display) as shown:
                await self.make(what, folder, runs, how, shown, stop)

        asyncio.run(made())

    async def make(self, what: Any, folder: Path, runs: Sequence[Wanted], how: How, shown: SeriesDisplay, stop: Stop) -> None:
        """Writes the folder's file, and makes the runs that are not finished.

        Raises CoterieError. If it was asked to stop, the error says how to go on. If the experiment is wrong and no run has begun, the
        folder is removed, so that the corrected command can use it.
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

    async def _make(self, folder: Path, runs: Sequence[Wanted], how: How, shown: SeriesDisplay, stop: Stop) -> None:
        advice, left = f"coterie {self.command} {folder} --resume", {}
        for number, wanted in enumerate(runs, start=1):
            if is_done(wanted.folder):
                shown.skip(number)
            else:
                left[number] = wanted
        try:
            if (jobs := min(how.jobs or 1, len(left))) > 1:
                await _side_by_side(jobs, left, how, shown, stop)
                return
            for number, wanted in left.items():
                if stop.is_set():
                    raise StoppedError(f"stopped by {stop.by} before {wanted.name}")
                shown.begin(number)
                try:
                    disguise = copy.copy(wanted.disguise)  # it keeps models of hosts, which go with the copy
                    await _one(wanted.experiment(), wanted.folder, replace(how, disguise=disguise), shown, stop)
                except CoterieError as error:
                    raise named(error, wanted.name) from None
                shown.end(number)
        except RunError as error:
            raise with_advice(error, stop, advice) from None


async def _one(experiment: Experiment, place: Path, how: How, observer: Observer, stop: Stop) -> None:
    """Makes a run, or goes on with it."""
    is_resumed = (place / FROZEN).is_file()
    with nothing_left_of_a_failed_start(place):
        try:
            await launch(
                experiment, Launch(how.transport, place, how.data, is_resumed, observer=observer, stop=stop, disguise=how.disguise)
            )
        except (RunError, ProtocolError) as error:
            if how.disguise is None or isinstance(error, StoppedError):
                raise
            write_text(place / ENDED, f"{error}\n")
    if how.disguise is not None:
        gc.collect()  # hosts in disguise are in cycles, with their users' rows and models


def is_done(folder: Path) -> bool:
    """Whether a run has finished, or has ended under an attack."""
    return is_finished(folder) or (folder / ENDED).is_file()


async def _side_by_side(jobs: int, left: Mapping[int, Wanted], how: How, shown: SeriesDisplay, stop: Stop) -> None:
    """Makes these runs, so many at a time."""
    calls = {}
    for number, wanted in left.items():
        try:
            calls[number] = (experiment_to_json(wanted.experiment()), wanted.folder, replace(how, disguise=wanted.disguise))
        except ConfigError as error:
            raise named(error, wanted.name) from None
    pool = Pool(jobs, _in_a_process, lambda number, at: shown.begin(number) if at is None else shown.has_come(number, at), shown.end)
    await pool.results(calls, {number: wanted.name for number, wanted in left.items()}, stop, GRACE_S)


def _in_a_process(content: str, place: Path, how: How) -> None:
    """A run in a process of the pool."""
    told_at = 0.0

    def tell(progress: Progress) -> None:
        nonlocal told_at
        if time.monotonic() - told_at > 1 / DRAWS_PER_S:
            told_at = time.monotonic()
            here.tell(At.of(progress))

    async def made() -> None:
        with here.stopping() as stop:
            await _one(experiment_from(json.loads(content)), place, how, tell, stop)

    asyncio.run(made())


def _with_jobs(how: How, runs: Sequence[Wanted]) -> tuple[How, str]:
    """How many runs are made at a time, and a sentence that says so where there is a choice."""
    left = [wanted for wanted in runs if not is_done(wanted.folder)]
    n = min(cores(), len(left))
    if how.jobs is not None or n < 2:
        return replace(how, jobs=how.jobs or 1), ""
    why = "" if how.transport == "loopback" else "since each has processes of its own over gRPC"
    if not why and any(wanted.experiment().stop.wall_time_s is not None for wanted in left):
        why = "since stop.wall_time_s ends them by the clock"
    if why:
        return replace(how, jobs=1), f"runs are made one after another, {why} (--jobs {n}: {n} at a time)"
    return replace(how, jobs=n), f"{n} runs are made at a time, each on a core (--jobs 1: one after another)"


def federation_of(
    content: Mapping[str, Any], before: Mapping[str, Any], given: Mapping[str, Any], transport: Transport, usual: Callable[..., int]
) -> dict[str, Any]:
    """Settings of the federation besides the experiment's: those of the series `before`, those `given` that are not None, and else as many
    hosts as is `usual` for the experiment."""
    own, found = content.get("federation", {}), {**before, **{key: value for key, value in given.items() if value is not None}}
    if transport == "loopback" and own.get("topology", "flat") != "flat":
        found.setdefault("topology", "flat")  # one process has one tier; the bits are the same
    if "hosts" not in {**own, **found}:
        found["hosts"] = usual(experiment_from({**content, "federation": {**own, **found}}))
    return found
