"""A marker is planted in every place where a value of a host can stand; nothing but the host itself may ever see it.

Frames are listened to where they leave and reach the members, in both directions; then the run's folder, its events, metrics and spans, and
what other members and the coordinator say.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import grpc
import numpy as np
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import generate_latest

from coterie.errors import CoterieError, RunError
from coterie.experiment.config import Experiment, experiment_from, experiment_to_json
from coterie.record.snapshot import SnapshotFile
from coterie.session.dial import serve_member
from coterie_client.hosting.build import build_host
from coterie_client.hosting.host import Host
from coterie_deploy.cli import app as cli
from coterie_deploy.containers.certs import Asked, init, issue
from coterie_deploy.roles.client import store_of
from coterie_deploy.telemetry.metrics import Subject, registry_of
from coterie_server.record.tracing import RunTracer
from coterie_server.run.coordinator import Options, coordinate
from coterie_server.session.hub import Hub
from coterie_server.transport.serve import serving
from tests.commands import Command, commands_in
from tests.two_tier import free_port

MARKER = "SECRET-MARKER"
NUMBER = "48151623"  # the same where only a number can stand
QUICK = {"heartbeat_s": 0.2, "silence_s": 10.0, "join_timeout_s": 30.0, "hosts": 2}
CSV: Mapping[str, Any] = {
    "source": "csv",
    "path": "rows.csv",
    "user_column": "school",
    "target_column": "score",
    "feature_columns": ["ses", "hours"],
}


# ---- what is listened to


class Tape:
    """Stands in for gRPC's channels at the members: keeps all that is written to and read from them."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def channel(self, *args: Any, **options: Any) -> _Channel:
        return _Channel(_OPEN(*args, **options), self)


_OPEN = grpc.aio.insecure_channel


class _Channel:
    def __init__(self, channel: Any, tape: Tape) -> None:
        self._channel, self._tape = channel, tape

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    def stream_stream(self, path: str) -> Callable[[], _Call]:
        call = self._channel.stream_stream(path)
        return lambda: _Call(call(), self._tape)

    def unary_unary(self, path: str, request_serializer: Any = bytes, response_deserializer: Any = bytes) -> Any:
        def heard(part: bytes) -> bytes:
            self._tape.pieces.append(part)
            return part

        return self._channel.unary_unary(
            path,
            request_serializer=lambda request: heard(request_serializer(request)),
            response_deserializer=lambda data: response_deserializer(heard(data)),
        )


class _Call:
    def __init__(self, call: Any, tape: Tape) -> None:
        self._call, self._tape = call, tape

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    async def write(self, frame: bytes) -> None:
        self._tape.pieces.append(bytes(frame))
        await self._call.write(frame)

    async def read(self) -> Any:
        try:
            data = await self._call.read()
        except grpc.aio.AioRpcError as error:
            self._tape.pieces.append((error.details() or "").encode())
            raise
        if isinstance(data, bytes):
            self._tape.pieces.append(data)
        return data


@dataclass
class Seen:
    """What others than the host have seen, by where; and what the host says itself."""

    where: dict[str, bytes] = field(default_factory=dict)
    own: str = ""

    def has_only_the_host(self, *markers: str) -> None:
        """Nobody else has seen any of the markers, as text or as it stands in JSON."""
        for marker in markers:
            leaks = [where for where, data in self.where.items() if marker.encode() in data]
            assert not leaks, f"{marker} is in {', '.join(leaks)}"

    def text(self, where: str) -> str:
        return self.where[where].decode()


@dataclass
class Plant:
    """An experiment, the data of host 'e' with the marker, and that of host 'a' without."""

    data: Mapping[str, Any]
    folder: Path
    honest: Path
    says: str = ""  # a piece of what the coordinator says; "" for a run that ends well
    problem: Mapping[str, Any] = field(default_factory=lambda: {"loss": "least_squares", "l2": 0.1})
    more: Mapping[str, Any] = field(default_factory=dict)
    users: list[str] | None = None  # of host 'e'
    store: Callable[[], SnapshotFile | None] = lambda: None
    markers: tuple[str, ...] = (MARKER,)
    is_told_by_host: bool = True  # whether the host's own sentence has the marker
    is_everywhere: bool = False  # whether the other host runs the code that has it, too

    @property
    def experiment(self) -> Experiment:
        content = {"name": "marked", "seed": 3, "data": dict(self.data), "problem": dict(self.problem), "stop": {"rounds": 3}}
        method = {"name": "pdmm", "penalty": 0.05}
        return experiment_from({**content, "method": method, "federation": QUICK, **self.more})


def watched(plant: Plant, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Seen:
    """The run of both hosts, over gRPC, and what was seen of it."""
    tape, seen, events = Tape(), Seen(), list[str]()
    monkeypatch.setattr(grpc.aio, "insecure_channel", tape.channel)
    exporter = InMemorySpanExporter()
    tracer = RunTracer(SimpleSpanProcessor(exporter), "coordinator")
    experiment, run = plant.experiment, folder / "run"

    def maker(name: str, data: Path, users: list[str] | None, store: Callable[[], SnapshotFile | None]) -> Callable[[Any, str], Host]:
        return lambda described, run_id: build_host(name, described, run_id, users, data_dir=data, store=store())

    @contextlib.asynccontextmanager
    async def connect(hub: Hub) -> AsyncIterator[None]:
        members: dict[str, asyncio.Task[str | None]] = {}

        def end_early(_: object) -> None:
            if hub.roster.members is None:  # no other host replaces one that could not join
                hub.fail(RunError("; ".join(hub.journal.refused.values())))

        try:
            async with serving(hub, experiment_to_json(experiment), "127.0.0.1:0") as server:
                address = f"127.0.0.1:{server.port}"
                makers = {"a": maker("a", plant.honest, None, lambda: None), "e": maker("e", plant.folder, plant.users, plant.store)}
                for name, make in makers.items():  # the other host waits a little for another attempt of the coordinator
                    members[name] = asyncio.create_task(serve_member(make, address, name=name, patience_s=0.5))
                members["e"].add_done_callback(end_early)
                yield
        finally:
            ends = await asyncio.gather(*members.values(), return_exceptions=True)
            said = dict(zip(members, map(_full, ends), strict=True))
            seen.own, seen.where["the other host"] = said["e"], said["a"].encode()
            text = generate_latest(registry_of(Subject(hub, run, "coordinator", "marked")))
            seen.where["the metrics"] = text

    async def whole() -> None:
        options = Options(run, tracer=tracer, on_event=lambda kind, text, data: events.append(f"{kind} {text} {data!r}"))
        error: CoterieError | None = None
        try:
            async with asyncio.timeout(40):
                await coordinate(experiment, connect, options)
        except CoterieError as caught:
            error = caught
        tracer.end_run(error)
        seen.where["the coordinator"] = _full(error).encode()

    asyncio.run(whole())
    seen.where |= {"frames": b"\n".join(tape.pieces), "events": "\n".join(events).encode(), "run.db": _tables(run / "run.db").encode()}
    seen.where["spans"] = "\n".join(span.to_json() for span in exporter.get_finished_spans()).encode()
    seen.where |= {f"the file {path.name}": path.read_bytes() for path in run.rglob("*") if path.is_file()}
    return seen


def _full(end: object) -> str:
    return "".join(traceback.format_exception(end)) if isinstance(end, BaseException) else str(end)


def _tables(path: Path) -> str:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")]
        return "\n".join(repr(connection.execute(f'SELECT * FROM "{name}"').fetchall()) for name in names)


# ---- where it is planted


def table(
    folder: Path, *, users: tuple[str, ...] = ("s0", "s1"), header: str = "school,ses,hours,score", bad: Mapping[int, str] | None = None
) -> Path:
    """Six rows of each user; `bad` are lines that replace others."""
    folder.mkdir(parents=True)
    draws = np.random.default_rng(len(header))
    lines = [f"{user},{draws.random():.3f},{draws.random():.3f},{draws.random():.3f}" for user in users for _ in range(6)]
    for place, line in (bad or {}).items():
        lines[place] = line
    (folder / "rows.csv").write_text("\n".join([header, *lines, ""]))
    return folder


def arrays(folder: Path, users: tuple[str, ...] = ("s0", "s1"), **changes: Any) -> Path:
    folder.mkdir(parents=True)
    n = 6 * len(users)
    draws = np.random.default_rng(1)
    found = {"user": np.repeat(users, 6), "features": draws.random((n, 2)), "target": draws.random(n), **changes}
    np.savez(folder / "rows.npz", **{name: array for name, array in found.items() if array is not None})
    return folder


NPZ: Mapping[str, Any] = {"source": "npz", "path": "rows.npz"}


def of_csv(place: int, cells: str, says: str, **more: Any) -> Callable[[Path], Plant]:
    def plant(folder: Path) -> Plant:
        return Plant(CSV, table(folder / "e", bad={place: cells}), table(folder / "a", users=("s2", "s3")), says, **more)

    return plant


def of_two_cells(folder: Path) -> Plant:
    bad = {2: f"s0,{MARKER},.2,.3", 8: f"s1,.1,{MARKER},.3"}
    return Plant(
        CSV, table(folder / "e", bad=bad), table(folder / "a", users=("s2", "s3")), "2 cells of a feature are not numbers (rule T3)"
    )


def of_a_name(folder: Path) -> Plant:
    """A host that is started for users that it does not have says which it has: to itself."""
    found = table(folder / "e", users=("s0", MARKER))
    return Plant(CSV, found, table(folder / "a", users=("s2", "s3")), "rule J2", users=[MARKER.replace("MARKER", "MAKER")])


def of_two_clusters(folder: Path) -> Plant:
    data = {**CSV, "feature_columns": ["ses"], "cluster_column": "hours"}
    bad = table(folder / "e", bad={n: f"s0,.1,{MARKER if n else 'x'},.2" for n in range(6)})
    return Plant(data, bad, table(folder / "a", users=("s2",), bad={n: f"s2,.{n},x,.{n}" for n in range(6)}), "host 'e' cannot join")


def of_a_header(folder: Path) -> Plant:
    found = table(folder / "e", header=f"school,{MARKER},hours,score")
    return Plant(CSV, found, table(folder / "a", users=("s2", "s3")), "data.feature_columns[0]: 'ses'")


def of_no_header(folder: Path) -> Plant:
    found = table(folder / "e", header=f"{MARKER},.1,.2,.3")
    return Plant(CSV, found, table(folder / "a", users=("s2", "s3")), "host 'e' cannot join")


def of_a_path(folder: Path) -> Plant:
    (folder / MARKER).mkdir()
    return Plant({**CSV, "path": "other.csv"}, folder / MARKER / "none", table(folder / "a"), "data.path: 'other.csv'")


def of_a_file_name(folder: Path) -> Plant:
    """Files that name their users, one of which cannot be read."""
    for name, users in (("e", ("s0", MARKER)), ("a", ("s2", "s3"))):
        for user in users:
            found = table(folder / name / user, users=(user,), header="x,ses,hours,score")
            (found / "rows.csv").rename(folder / name / f"{user}.csv")
            (found).rmdir()
    (folder / "e" / f"{MARKER}.csv").write_bytes(b"\xff\xfe\xff")
    data = {"source": "csv", "path": "{user}.csv", "target_column": "score", "feature_columns": ["ses", "hours"]}
    return Plant(data, folder / "e", folder / "a", "host 'e' cannot join")


def of_state(folder: Path) -> Plant:
    found, blocked = table(folder / "e"), folder / MARKER

    def store() -> SnapshotFile:
        blocked.write_text("no folder")
        return store_of(blocked, "e", "run")

    more = {"snapshots": {"every_rounds": 1}}
    return Plant(CSV, found, table(folder / "a", users=("s2", "s3")), "a file cannot be written (rule R5)", more=more, store=store)


def of_a_damaged_state(folder: Path) -> Plant:
    found, state = table(folder / "e"), folder / MARKER

    def store() -> SnapshotFile:
        state.mkdir(exist_ok=True)
        (state / "e.snapshot").write_bytes(b"no snapshot")
        return SnapshotFile(state, "e")

    return Plant(CSV, found, table(folder / "a", users=("s2", "s3")), "rule J5", store=store)


def of_an_array_name(folder: Path) -> Plant:
    found = arrays(folder / "e", features=None, **{MARKER: np.ones((12, 2))})
    return Plant(NPZ, found, arrays(folder / "a", ("s2", "s3")), "an array that the experiment names is missing (rule N1)")


def of_a_dtype(folder: Path) -> Plant:
    odd = np.zeros(12, dtype=[(MARKER, np.float64)])
    return Plant(NPZ, arrays(folder / "e", features=odd), arrays(folder / "a", ("s2", "s3")), "rule N2")


def of_a_label(folder: Path) -> Plant:
    signs = np.where(np.arange(12) % 2, 1.0, -1.0)
    wrong = np.where(np.arange(12) < 3, float(NUMBER), signs)
    problem = {"loss": "logistic", "l2": 0.1}
    says = "labels do not suit the loss (problem.loss: 'logistic') (rule L6)"
    found, honest = arrays(folder / "e", ("s0",) * 2, target=wrong), arrays(folder / "a", ("s2", "s3"), target=signs)
    return Plant(NPZ, found, honest, says, problem, markers=(NUMBER, f"{float(NUMBER):g}"))


def of_parquet(folder: Path) -> Plant:
    import pyarrow as arrow
    from pyarrow import parquet

    for name, users in (("e", ["s0", "s1"]), ("a", ["s2", "s3"])):
        (folder / name).mkdir()
        ses = ["0.5"] * 11 + [MARKER] if name == "e" else [0.1 * n for n in range(12)]
        columns = {"school": users * 6, "ses": ses, "hours": [0.2 * n for n in range(12)], "score": [0.3 * n for n in range(12)]}
        found = arrow.table({**columns, f"{MARKER}-column": ["x"] * 12}).replace_schema_metadata({"note": MARKER})
        parquet.write_table(found if name == "e" else found.drop_columns([f"{MARKER}-column"]), folder / name / "rows.parquet")
    return Plant(
        {**CSV, "source": "parquet", "path": "rows.parquet"}, folder / "e", folder / "a", "host 'e' cannot join", is_told_by_host=False
    )


CODE = """
import os
from coterie_client.data import UserData, user_source
from coterie_client.problems.losses import LeastSquares
import numpy as np

class Users(LeastSquares):
    def check_targets(self, y, user):
        from coterie.errors import ConfigError
        if user == "s0":
            raise ConfigError(os.environ["COTERIE_TEST_SECRET"])

class Slope(LeastSquares):
    def slope(self, s, y):
        if (y == 2.0).any():
            raise ValueError(os.environ["COTERIE_TEST_SECRET"])
        return super().slope(s, y)

@user_source
def users(options, seed):
    class Record:
        name, features = "s9", np.ones((4, 2))
        @property
        def target(self):
            raise KeyError(os.environ["COTERIE_TEST_SECRET"])
    yield Record()

def build(**options):
    raise RuntimeError(os.environ["COTERIE_TEST_SECRET"])
"""


def of_code(problem: str, says: str, *, target: float | None = None) -> Callable[[Path], Plant]:
    """A loss of the experiment's own code, that raises at host 'e'."""

    def plant(folder: Path) -> Plant:
        found = arrays(folder / "e", **({} if target is None else {"target": np.full(12, target)}))
        return Plant(NPZ, found, arrays(folder / "a", ("s2", "s3")), says, {"loss": problem, "l2": 0.1})

    return plant


def of_a_source(folder: Path) -> Plant:
    (folder / "any").mkdir()
    says = "the data source of the experiment raised an error (data.path: 'marked_code:users') (rule L3)"
    return Plant({"source": "python", "path": "marked_code:users"}, folder / "any", folder / "any", says, is_everywhere=True)


def of_a_model(folder: Path) -> Plant:
    more = {"model": {"name": "custom", "build": "marked_code:build", "head": ["head"]}, "method": {"name": "fedavg", "epochs": 1}}
    labels = np.arange(12.0) % 2
    found, honest = arrays(folder / "e", target=labels), arrays(folder / "a", ("s2", "s3"), target=labels)
    return Plant(NPZ, found, honest, "rule L2", {"loss": "cross_entropy"}, more, is_everywhere=True)


def of_what_is_not_used(folder: Path) -> Plant:
    """Nothing fails: a column without a role, a note in the environment, an array that nobody asks for."""
    found = table(folder / "e", header=f"school,ses,hours,score,{MARKER}", bad={})
    text = (found / "rows.csv").read_text().splitlines()
    (found / "rows.csv").write_text("\n".join([text[0], *(f"{line},{MARKER}-cell" for line in text[1:]), ""]))
    return Plant(CSV, found, table(folder / "a", users=("s2", "s3")))


PLANTS: dict[str, Callable[[Path], Plant]] = {
    "a cell of a feature": of_csv(4, f"s0,{MARKER},.2,.3", "1 cell of a feature is not a number (rule T3)"),
    "cells of two features": of_two_cells,
    "a cell of the target": of_csv(4, f"s0,.1,.2,{MARKER}", "1 cell of a target is not a number (rule T3)"),
    "a name with a line break": of_csv(4, f'"{MARKER}\t\n",.1,.2,.3', "host 'e' cannot join"),
    "a row of another length": of_csv(4, f"s0,.1,.2,.3,{MARKER}", "host 'e' cannot join", is_told_by_host=False),
    "the name of another user": of_a_name,
    "the cluster of a user": of_two_clusters,
    "a header": of_a_header,
    "no header": of_no_header,
    "the path of the data": of_a_path,
    "the name of a file": of_a_file_name,
    "the path of the state": of_state,
    "the path of a damaged state": of_a_damaged_state,
    "the name of an array": of_an_array_name,
    "the type of an array": of_a_dtype,
    "a label": of_a_label,
    "metadata of Parquet": of_parquet,
    "a loss that refuses targets": of_code("marked_code:Users", "1 target does not suit the loss"),
    "a loss that raises in a round": of_code("marked_code:Slope", "the loss of the experiment raised an error", target=2.0),
    "a data source that raises": of_a_source,
    "a model that raises": of_a_model,
    "what is not used": of_what_is_not_used,
}


@pytest.fixture(autouse=True)
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Code that an experiment may name, and that tells what it should not."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "marked_code.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    monkeypatch.setenv("COTERIE_TEST_SECRET", MARKER)
    yield
    sys.modules.pop("marked_code", None)


@pytest.mark.parametrize("name", PLANTS)
def test_what_stands_in_a_host_s_data_is_seen_by_the_host_alone(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "planted"
    folder.mkdir()
    plant = PLANTS[name](folder)
    seen = watched(plant, tmp_path, monkeypatch)
    if plant.is_everywhere:
        del seen.where["the other host"]
    seen.has_only_the_host(*plant.markers)
    assert plant.says in seen.text("events")
    assert plant.says in seen.text("the coordinator")
    if plant.says:
        assert not plant.is_told_by_host or any(marker in seen.own for marker in plant.markers), seen.own
    else:
        assert seen.text("the coordinator") == "None", seen.text("the coordinator")


def test_other_hosts_do_not_hear_of_users_of_a_host_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator knows the users of its hosts; the frames to another host, and what that says, have none of them."""
    plant = of_state(tmp_path)
    table(tmp_path / "named", users=(MARKER, f"{MARKER}-2"))
    named = Plant(plant.data, tmp_path / "named", plant.honest, plant.says, more=plant.more, store=plant.store)
    seen = watched(named, tmp_path / "second", monkeypatch)
    assert MARKER in seen.text("run.db"), "the coordinator knows them by design"
    assert MARKER not in seen.text("the other host")
    assert "the run has failed: another member cannot go on" in seen.text("the other host")


EXPERIMENT = """
name: marked
seed: 3
data: {source: csv, path: rows.csv, user_column: school, target_column: score, feature_columns: [ses, hours]}
problem: {loss: "marked_code:Slope", l2: 0.1}
method: {name: pdmm, penalty: 0.05}
stop: {rounds: 3}
"""


@pytest.mark.parametrize("transport", ["loopback", "grpc"])
def test_the_terminal_of_a_run_has_the_host_s_sentence_and_its_books_have_none(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The person at the terminal owns the data; the run's folder may be shown to others."""
    monkeypatch.chdir(table(tmp_path / "here", bad={3: "s0,.1,.2,2.0"}))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'code'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    Path("marked.yaml").write_text(EXPERIMENT)
    code = cli._run(["run", "marked.yaml", "--transport", transport, "--output", "run", "--set", "federation.hosts=2"])
    said = capfd.readouterr().err
    assert code == 3
    sentence = next(line for line in said.splitlines() if line.startswith("error: "))
    assert f"ValueError: {MARKER}" in sentence
    assert ("(run/hosts/host-1/log.txt)" in sentence) == (transport == "grpc")
    books = _tables(Path("run/run.db"))
    assert "host 'host-1': the loss of the experiment raised an error (problem.loss: 'marked_code:Slope') (rule L1)" in books
    assert [path for path in Path("run").rglob("*") if path.is_file() and MARKER.encode() in path.read_bytes()] == (
        [Path("run/hosts/host-1/log.txt")] if transport == "grpc" else []
    )
    if transport == "grpc":
        assert "Traceback (most recent call last)" in Path("run/hosts/host-1/log.txt").read_text()
    for command in (["show", "run"], ["report", "run"]):
        cli._run(command)
    captured = capfd.readouterr()
    assert MARKER not in captured.out + captured.err


def test_an_adapted_run_says_what_is_wrong_with_the_new_rows_at_the_terminal_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(table(tmp_path / "here", users=("s0", "s1", "s2")))
    shared = EXPERIMENT.replace("marked_code:Slope", "least_squares").replace("name: pdmm, penalty: 0.05", "name: fedrep_linear, k: 1")
    Path("marked.yaml").write_text(shared.replace("l2: 0.1", "intercept: false"))
    assert cli._run(["run", "marked.yaml", "--transport", "loopback", "--quiet", "--output", "run"]) == 0, capfd.readouterr().err
    new = table(tmp_path / "new", users=("s7",), bad={2: f"s7,.1,{MARKER},.2"}) / "rows.csv"
    assert cli._run(["adapt", "run", "--data", str(new), "--output", "adapted"]) == 2
    assert MARKER in capfd.readouterr().err
    assert not [path for path in Path("adapted").rglob("*") if path.is_file() and MARKER.encode() in path.read_bytes()]


TIERS = """
name: tiers
seed: 4
data: {source: csv, path: rows.csv, user_column: school, cluster_column: region, target_column: score, feature_columns: [ses, hours]}
problem: {loss: least_squares, l2: 0.1, intercept: false}
method: {name: async_l2gd, iterations: 30, gamma: 1.0, alpha: 0.4, p0: 0.3, p: 0.3, collect_models: true}
federation: {topology: clusters, hosts: 2, join_timeout_s: 8}
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_with_mutual_tls_and_two_aggregators_the_logs_of_all_others_have_no_marker(tmp_path: Path) -> None:
    """Five processes elsewhere, as five machines would be; the coordinator says how many cells there are, and which rule they break."""
    authority = tmp_path / "ca"
    init(authority)
    local = ("127.0.0.1",)
    issue(authority, Asked("coordinator", "coordinator", local))
    for cluster in ("north", "south"):
        issue(authority, Asked("aggregator", cluster, local, cluster=cluster))
        issue(authority, Asked("host", f"of-{cluster}", cluster=cluster))
    header = "school,ses,hours,score,region"
    for cluster, bad in (("north", {}), ("south", {1: f"s1,{MARKER},.2,.3,south", 2: f"s1,.1,{MARKER},.3,south"})):
        users = (cluster[0] + "0", cluster[0] + "1")
        lines = [f"{user},.{n + 1},.{9 - n},.{n * 3 % 7},{cluster}" for user in users for n in range(6)]
        for place, line in bad.items():
            lines[place] = line
        (tmp_path / cluster).mkdir()
        (tmp_path / cluster / "rows.csv").write_text("\n".join([header, *lines, ""]))
    (tmp_path / "tiers.yaml").write_text(TIERS)
    top = f"127.0.0.1:{free_port()}"
    with commands_in(tmp_path) as start:
        commands: dict[str, Command] = {
            "coordinator": start("server", "tiers.yaml", "--listen", top, "--output", "run", "--tls", "ca/coordinator")
        }
        for cluster in ("north", "south"):
            below = f"127.0.0.1:{free_port()}"
            joins = ("--server", top, "--cluster", cluster, "--listen", below, "--hosts", "1")
            commands[cluster] = start("aggregator", *joins, "--state", f"state-{cluster}", "--tls", f"ca/{cluster}")
            who = ("--name", f"of-{cluster}", "--data", cluster, "--state", f"state-of-{cluster}", "--tls", f"ca/of-{cluster}")
            commands[f"of-{cluster}"] = start("client", "--server", below, *who)
        ends = {name: command.process.communicate(timeout=90) for name, command in commands.items()}
    said = {name: "".join(end) for name, end in ends.items()}
    assert MARKER in said.pop("of-south")
    assert not [name for name, text in said.items() if MARKER in text]
    found = [path for path in tmp_path.rglob("*") if path.is_file() and MARKER.encode() in path.read_bytes()]
    assert [path.parent.name for path in found] == ["south"]
    cells = "2 cells of a feature are not numbers (rule T3)"
    assert f"aggregator 'south' cannot join: {cells}; its own log names it" in said["coordinator"]
    assert f"host 'of-south' cannot join: {cells}; its own log names it" in said["south"]
