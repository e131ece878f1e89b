"""The coordinator: a run folder, a hub, an engine, and how a run begins, ends and is resumed.

runs/NAME/experiment.json    the frozen experiment
runs/NAME/start.npz          the outcome of another run that this one starts from
runs/NAME/run.db             ledger, figures, events, decisions
runs/NAME/models/STAGE.npz   users, models x (n, d) and clusters of each stage; the shared tensors of networks; moments; ties
runs/NAME/checkpoints/       what a resumed run starts from
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import secrets
import sqlite3
import time
import zipfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coterie import __version__
from coterie.errors import ConfigError, CoterieError, RunError
from coterie.experiment.config import Experiment, experiment_to_json
from coterie.experiment.features import Feature
from coterie.experiment.plugins import check_versions
from coterie.record.files import private_folder, written_whole
from coterie_server.interface.half import Facts, Members, Outcome
from coterie_server.record.run_file import FLUSH_S
from coterie_server.record.rundb import BETWEEN, DIRECT, OnEvent, RunDatabase, read_run
from coterie_server.run.engine import Engine, Observer, Point, best
from coterie_server.session.hub import Hub
from coterie_server.session.ports import Tracer

FINISHED = "the run has finished"  # what members say at the end
CHECKPOINTS = "checkpoints"
OVER = "over"  # in the run database: how the run has ended, before any host hears of it
START = "start.npz"
LOCK = "run.lock"  # held while a coordinator is at work
RUN_ID = "run_id"  # a file in the folder of checkpoints, with the id of their run
SHARED = "shared"  # in the file of a stage's models, a shared tensor is called shared/NAME
MOMENTS = "moments"  # likewise, of data for standard errors
TIES = "ties"  # likewise, of the graph of users
_START_AGAIN = "start again with another --output"


@dataclass(frozen=True)
class Finished:
    """A run that has ended well."""

    run_id: str
    folder: Path | None
    members: Members
    facts: Facts
    outcomes: Mapping[str, Outcome]
    final_stage: str
    database: RunDatabase  # closed when the run has a folder; still open, in memory, when it has none
    features: tuple[Feature, ...] = ()  # where the hosts' data has names


@dataclass(frozen=True)
class Options:
    """How a run is started, apart from its experiment."""

    folder: Path | None = None  # None: nothing is written, and nothing can be resumed
    resume: bool = False
    decisions_of: Path | None = None  # another run whose decisions are repeated
    observer: Observer | None = None
    stop: asyncio.Event | None = None  # set it to stop after the round under way
    start: Outcome | None = None  # the outcome of another run, to start from
    tracer: Tracer | None = None
    on_event: OnEvent | None = None


Connect = Callable[[Hub], AbstractAsyncContextManager[object]]


async def coordinate(experiment: Experiment, connect: Connect, options: Options) -> Finished:
    """Runs an experiment to its end. `connect(hub)` is the transport: while it is entered, hosts can join, and the hub's clock ticks.

    Raises ConfigError before anything has started, RunError when the run cannot go on; hosts learn the finding.
    """
    folder = options.folder
    check_versions(experiment.packages)
    with _locked(folder, resume=options.resume):
        _check_folder(experiment, folder, options.start, resume=options.resume)
        scope = BETWEEN if experiment.federation.is_two_tier else DIRECT
        database = RunDatabase(None if folder is None else folder / "run.db", scope=scope, on_event=options.on_event)
        with _closed_at_the_end(database) if folder is not None else contextlib.nullcontext():
            if folder is not None and options.resume:
                _check_database(folder, database)
            return await _run(experiment, connect, options, database)


@contextlib.contextmanager
def _closed_at_the_end(database: RunDatabase) -> Iterator[None]:
    """Closes the database. An error of the run is raised even where the disk has no room for the last rows."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(CoterieError):
            database.close()
        raise
    database.close()


async def _run(experiment: Experiment, connect: Connect, options: Options, database: RunDatabase) -> Finished:
    run_id = database.get("run_id") or secrets.token_hex(8)
    if options.folder is not None:
        _write_text(options.folder / CHECKPOINTS / RUN_ID, run_id + "\n")
    attempt = int(database.get("attempt") or 0) + 1
    about = {"run_id": run_id, "name": experiment.name, "attempt": str(attempt), "status": "running", OVER: "", "version": __version__}
    for key, value in {**about, "experiment": experiment_to_json(experiment)}.items():
        database.put(key, value)
    database.event("start", f"attempt {attempt} starts", attempt=attempt)
    tracer, keeps_log = options.tracer, options.folder is not None
    hub = Hub(experiment, run_id, database, time.monotonic, attempt=attempt, reserved=database.reserved, keep_log=keeps_log, tracer=tracer)
    if tracer is not None:
        tracer.begin_run(run_id, attempt, experiment.name, experiment.method.name)
    start = _kept_start(options.folder) if options.resume and options.folder is not None else options.start
    engine = Engine(experiment, hub, database, options.folder, options.observer, start=start)
    if options.decisions_of is not None:
        with read_run(options.decisions_of) as connection:
            _repeat_decisions(connection, hub, engine)
        hub.participation.repeats_all = True
    elif options.resume:
        _repeat_decisions(database.connection, hub, engine)
    point = engine.load_checkpoint(attempt) if options.resume else None
    async with _failures_written(database), connect(hub), _beside(_stop_when_set(options.stop, engine)), _beside(_flush(database, hub)):
        try:
            last = await engine.run(point)
            finished = _finished(hub, engine, last, options.folder, database)
        except CoterieError as error:
            if engine.stop_requested is None:
                await hub.end(error)
            raise
        hub.settle()
        database.flush()
        database.put(OVER, FINISHED)  # first: hosts that have heard it are gone, and no later attempt finds them
        await hub.finish(FINISHED, failed=False)
        _close(database)
    return finished


def _close(database: RunDatabase) -> None:
    database.event("finished", FINISHED)
    database.flush()
    database.put("status", "finished")  # last: a finished run has all its rows


def close_record(folder: Path) -> None:
    """Closes the record of a run that is over, whose coordinator was ended before it could: hosts may have left with their books."""
    with _locked(folder, resume=True):
        database = RunDatabase(folder / "run.db")
        with _closed_at_the_end(database):
            database.check()
            for host in database.hosts():
                text = f"host {host!r} may not have brought its whole book: the coordinator was ended meanwhile"
                database.event("lost", text, host=host, book=True)
            _close(database)


@contextlib.asynccontextmanager
async def _failures_written(database: RunDatabase) -> AsyncIterator[None]:
    """Records why a run failed, if the disk has room."""
    try:
        yield
    except CoterieError as error:
        with contextlib.suppress(CoterieError):
            database.put("status", f"failed: {error.public}")
            database.event("failed", error.public)
        raise


def _finished(hub: Hub, engine: Engine, last: Point, folder: Path | None, database: RunDatabase) -> Finished:
    if last.facts is None:
        raise RunError("the run ended without members")
    final = best(tuple(stage.name for stage in engine.stages if stage.is_result), last.outcomes)
    database.put("final_stage", final)
    if folder is not None:
        _save_models(folder, hub, last.facts, last.outcomes)
    return Finished(hub.run_id, folder, hub.roster.fixed, last.facts, last.outcomes, final, database, hub.roster.schema)


def _save_models(folder: Path, hub: Hub, facts: Facts, outcomes: Mapping[str, Outcome]) -> None:
    names, features = np.array(hub.roster.fixed.names, dtype=np.str_), np.array(hub.roster.features, dtype=np.str_)
    for stage, outcome in outcomes.items():
        found = {"x": outcome.models, "labels": outcome.labels, "mean": facts.mean, "scale": facts.scale, "fill": facts.fill}
        arrays = {key: array for key, array in found.items() if array is not None}
        arrays |= {f"{SHARED}/{name}": array for name, array in outcome.shared.items()}
        arrays |= {f"{MOMENTS}/{name}": array for name, array in outcome.moments.items()}
        arrays |= {f"{TIES}/{name}": array for name, array in outcome.ties.items()}
        with written_whole(folder / "models" / f"{stage}.npz", "the models") as file:
            np.savez(file, users=names, features=features, **arrays)  # type: ignore[arg-type]


def _kept_start(folder: Path) -> Outcome | None:
    path = folder / START
    if not path.exists():
        return None
    try:
        with np.load(path) as arrays:
            shared = {name: arrays[name] for name in arrays.files if name.startswith(f"{SHARED}/")}
            constants = {name: arrays[name] for name in arrays.files if name not in shared}
            return Outcome(None, shared={name.removeprefix(f"{SHARED}/"): found for name, found in shared.items()}, constants=constants)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path} is damaged ({error}): {_START_AGAIN}") from None


def _check_folder(experiment: Experiment, folder: Path | None, start: Outcome | None, *, resume: bool) -> None:
    """Prepares an empty run folder, or checks that an existing one is of the same experiment."""
    if folder is None:
        if resume:
            raise ConfigError("a run without a folder cannot be resumed")
        return
    frozen = folder / "experiment.json"
    text = experiment_to_json(experiment)
    if not resume:
        if frozen.exists():
            raise ConfigError(f"the run folder {folder} is already used: choose another one, or --resume the run in it")
        if start is not None:  # a resumed run must start from the same
            with written_whole(folder / START) as file:
                np.savez(file, **{f"{SHARED}/{name}": array for name, array in start.shared.items()}, **start.constants)  # type: ignore[arg-type]
        _write_text(frozen, json.dumps(json.loads(text), indent=2) + "\n")
        return
    if not frozen.exists():
        raise ConfigError(f"there is no run to resume in {folder}: it has no experiment.json")
    try:
        started = json.loads(frozen.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"the frozen experiment {frozen} is damaged ({error}): {_START_AGAIN}") from None
    if started != json.loads(text):
        raise ConfigError(f"the experiment differs from the one that {folder} was started with; resume it as it was frozen in {frozen}")


def _check_database(folder: Path, database: RunDatabase) -> None:
    """ConfigError or RunError for a run database that is damaged, or is not that of the checkpoints."""
    path, checkpoints = folder / "run.db", folder / CHECKPOINTS
    database.check()
    run_id = database.get("run_id")
    if run_id is None and any(checkpoints.glob("*.snapshot*")):
        raise ConfigError(f"the run database {path} is missing or empty, but there are checkpoints: {_START_AGAIN}")
    try:
        started = (checkpoints / RUN_ID).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {checkpoints / RUN_ID} ({error}): {_START_AGAIN}") from None
    if run_id is not None and run_id != started:
        raise ConfigError(f"the run database {path} is of run {run_id!r}, but the checkpoints are of run {started!r}: {_START_AGAIN}")


def _write_text(path: Path, text: str) -> None:
    with written_whole(path) as file:
        file.write(text.encode())


@contextlib.contextmanager
def _locked(folder: Path | None, *, resume: bool) -> Iterator[None]:
    """One coordinator for each folder: an advisory lock that ends with the process."""
    if folder is None:
        yield
        return
    try:
        if resume and not folder.is_dir():
            raise ConfigError(f"there is no run to resume: {folder} does not exist")
        private_folder(folder)
        lock = (folder / LOCK).open("w")
    except OSError as error:
        raise RunError(f"cannot write the run folder {folder}: {error.strerror or error}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            # Not for good: the other one may be on its way out, as where a supervisor has moved it.
            raise RunError(f"the run folder {folder} is in use by another coordinator") from None
        yield


def is_held(folder: Path) -> bool:
    """Whether a coordinator is at work in the run folder; True too where that cannot be found out."""
    try:
        with (folder / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


@contextlib.asynccontextmanager
async def _beside(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Works while the block runs."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _stop_when_set(stop: asyncio.Event | None, engine: Engine) -> None:
    if stop is not None:
        await stop.wait()
        engine.request_stop("a signal")


async def _flush(database: RunDatabase, hub: Hub) -> None:
    """Writes events also while a round waits for hosts, so that readers of the database see for whom."""
    while True:
        await asyncio.sleep(FLUSH_S)
        try:
            database.flush_if_due()
        except RunError as error:
            hub.fail(error)


def _repeat_decisions(connection: sqlite3.Connection, hub: Hub, engine: Engine) -> None:
    """Takes over the time-dependent decisions of an earlier attempt, or of another run."""
    rows = [(seq, kind, json.loads(value)) for seq, kind, value in connection.execute("SELECT * FROM decisions ORDER BY rowid")]
    ours = hub.participation
    for kind, decided in (("skip", ours.skips), ("pass", ours.passes), ("arrive", ours.arrivals)):
        for seq, _, hosts in (row for row in rows if row[1] == kind):
            decided[seq] = decided.get(seq, frozenset()).union(hosts)
    engine.wall_stops = frozenset((value[0], value[1]) for _, kind, value in rows if kind == "wall_time")
