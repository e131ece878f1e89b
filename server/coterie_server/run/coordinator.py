"""The coordinator: a run folder, a hub, an engine, and how a run begins, ends and is taken up again.

runs/NAME/experiment.json    the frozen experiment
runs/NAME/start.npz          what the run starts from, where another has left it
runs/NAME/run.db             ledger, figures, events, decisions
runs/NAME/models/STAGE.npz   users, models x (n, d) and clusters of each stage; the shared tensors of networks
runs/NAME/checkpoints/       where a killed run goes on
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
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coterie import __version__
from coterie.errors import ConfigError, CoterieError, RunError
from coterie.experiment.config import Experiment, experiment_to_json
from coterie.experiment.features import Feature
from coterie.experiment.plugins import check_versions
from coterie.record.files import written_whole
from coterie_server.interface.half import Facts, Members, Outcome
from coterie_server.record.run_file import FLUSH_S
from coterie_server.record.rundb import BETWEEN, DIRECT, OnEvent, RunDatabase, read_run
from coterie_server.run.engine import Engine, Observer, Point, best
from coterie_server.session.hub import Hub
from coterie_server.session.ports import Tracer

CHECKPOINTS = "checkpoints"
START = "start.npz"
LOCK = "run.lock"  # held while a coordinator is at work
RUN_ID = "run_id"  # beside the checkpoints: whose they are
SHARED = "shared"  # before a slash and the name of a shared tensor, in the file of a stage's models
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
    """How a run is started, beside the experiment itself."""

    folder: Path | None = None  # None: nothing is written, and nothing can be resumed
    resume: bool = False
    decisions_of: Path | None = None  # another run whose decisions are repeated
    observer: Observer | None = None
    stop: asyncio.Event | None = None  # set it to stop after the round under way
    start: Outcome | None = None  # what another run has left, to start from
    tracer: Tracer | None = None
    on_event: OnEvent | None = None


Connect = Callable[[Hub], AbstractAsyncContextManager[object]]


async def coordinate(experiment: Experiment, connect: Connect, options: Options) -> Finished:
    """Runs an experiment to its end. `connect(hub)` is the transport: while it is entered, hosts can
    join, and the hub's clock ticks.

    Raises ConfigError before anything has started, RunError when the run cannot go on; hosts are told why.
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
    """Closes the database; why the run has failed is said even where the disk has no room for the last rows."""
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
    for key, value in _facts_of_run(experiment, run_id, attempt).items():
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
    async with _failures_written(database), connect(hub), _stopping(options.stop, engine), _flushing(database, hub):
        try:
            last = await engine.run(point)
            finished = _finished(hub, engine, last, options.folder, database)
        except CoterieError as error:
            if engine.stop_requested is None:
                await hub.finish("", failed=True, finding=error.below)
            raise
        await hub.finish("the run has finished", failed=False)
        database.event("finished", "the run has finished")
        database.flush()
        database.put("status", "finished")  # only now: a run that says so has all its rows
    return finished


@contextlib.asynccontextmanager
async def _failures_written(database: RunDatabase) -> AsyncIterator[None]:
    """Leaves in the database why a run failed, if the disk lets it."""
    try:
        yield
    except CoterieError as error:
        with contextlib.suppress(CoterieError):
            database.put("status", f"failed: {error.public}")
            database.event("failed", error.public)
        raise


def _facts_of_run(experiment: Experiment, run_id: str, attempt: int) -> dict[str, str]:
    return {
        "run_id": run_id,
        "name": experiment.name,
        "attempt": str(attempt),
        "status": "running",
        "version": __version__,
        "experiment": experiment_to_json(experiment),
    }


def _finished(hub: Hub, engine: Engine, last: Point, folder: Path | None, database: RunDatabase) -> Finished:
    if hub.roster.members is None or last.facts is None:
        raise RunError("the run ended without members")
    final = best(tuple(stage.name for stage in engine.stages if stage.is_result), last.outcomes)
    database.put("final_stage", final)
    if folder is not None:
        _save_models(folder, hub, last.facts, last.outcomes)
    return Finished(hub.run_id, folder, hub.roster.members, last.facts, last.outcomes, final, database, hub.roster.schema)


def _save_models(folder: Path, hub: Hub, facts: Facts, outcomes: Mapping[str, Outcome]) -> None:
    names = np.array(hub.roster.members.names if hub.roster.members else (), dtype=np.str_)
    features = np.array(hub.roster.features, dtype=np.str_)
    for stage, outcome in outcomes.items():
        found = {"x": outcome.models, "labels": outcome.labels, "mean": facts.mean, "scale": facts.scale, "fill": facts.fill}
        arrays = {key: array for key, array in found.items() if array is not None}
        arrays |= {f"{SHARED}/{name}": array for name, array in outcome.shared.items()}
        with written_whole(folder / "models" / f"{stage}.npz", "the models") as file:
            np.savez(file, users=names, features=features, **arrays)  # type: ignore[arg-type]


def _keep_start(folder: Path, start: Outcome) -> None:
    """For a resumed run, which must start from the same."""
    with written_whole(folder / START) as file:
        shared = {f"{SHARED}/{name}": array for name, array in start.shared.items()}
        np.savez(file, **shared, **start.constants)  # type: ignore[arg-type]


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
    """Prepares an empty run folder, or checks that an old one is of the same experiment."""
    if folder is None:
        if resume:
            raise ConfigError("a run without a folder cannot be resumed")
        return
    frozen = folder / "experiment.json"
    text = experiment_to_json(experiment)
    if not resume:
        if frozen.exists():
            raise ConfigError(f"the run folder {folder} is already used: choose another one, or --resume the run in it")
        if start is not None:
            _keep_start(folder, start)
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
    """Refuses to resume with a run database that is damaged, or is not that of the checkpoints."""
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
    """One coordinator for one folder: an advisory lock that goes away with the process."""
    if folder is None:
        yield
        return
    try:
        if resume and not folder.is_dir():
            raise ConfigError(f"there is no run to resume: {folder} does not exist")
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("w")
    except OSError as error:
        raise RunError(f"cannot write the run folder {folder}: {error.strerror or error}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            raise ConfigError(f"the run folder {folder} is in use by another coordinator") from None
        yield


def is_held(folder: Path) -> bool:
    """Whether a coordinator is at work in the run folder; True too where nobody can tell."""
    try:
        with (folder / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


@contextlib.asynccontextmanager
async def _stopping(stop: asyncio.Event | None, engine: Engine) -> AsyncIterator[None]:
    """Passes a request to stop on to the engine."""
    if stop is None:
        yield
        return

    async def wait() -> None:
        await stop.wait()
        engine.request_stop("a signal")

    task = asyncio.create_task(wait())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@contextlib.asynccontextmanager
async def _flushing(database: RunDatabase, hub: Hub) -> AsyncIterator[None]:
    """Rounds write what happened, but one may wait for hosts for long: who reads the database is to know for whom."""

    async def flush() -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            try:
                database.flush_if_due()
            except RunError as error:
                hub.fail(error)

    task = asyncio.create_task(flush())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _repeat_decisions(connection: sqlite3.Connection, hub: Hub, engine: Engine) -> None:
    """Makes the time-dependent decisions of an earlier attempt, or of another run, the decisions of this one."""
    rows = [(seq, kind, json.loads(value)) for seq, kind, value in connection.execute("SELECT * FROM decisions ORDER BY rowid")]
    for kind, decided in (("skip", hub.participation.skips), ("pass", hub.participation.passes)):
        for seq, _, hosts in (row for row in rows if row[1] == kind):
            decided[seq] = decided.get(seq, frozenset()).union(hosts)
    engine.wall_stops = frozenset((value[0], value[1]) for _, kind, value in rows if kind == "wall_time")
