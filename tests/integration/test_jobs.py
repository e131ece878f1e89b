"""`--jobs`: runs of a comparison or a tune, and seeds of a reproduction, side by side in processes, with the bits of one after another."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from rich.console import Console

import coterie
from coterie.errors import ConfigError, RunError, StoppedError
from coterie.experiment.config import experiment_from
from coterie_deploy.engines.launch import Transport
from coterie_deploy.studies import reproduce as papers
from coterie_deploy.studies import series, side_by_side
from coterie_deploy.studies.progress import At, series_display
from coterie_deploy.studies.reproduce import fedrep_linear
from coterie_deploy.studies.side_by_side import Pool
from coterie_deploy.studies.side_by_side import here as in_a_process
from coterie_deploy.terminal.signals import Stop
from tests.commands import Command
from tests.networks import CLASSES, write_users
from tests.said import refused, said, without_plots
from tests.small_runs import write_experiment

SMALL = ("compare", "small.yaml", "--methods", "pdmm,fedavg", "--seeds", "0:2", "--set", "stop.rounds=5")
BITS = (
    "SELECT stage, round, name, value FROM figures ORDER BY 1, 2, 3",
    "SELECT * FROM user_results ORDER BY 1, 2, 3",
    "SELECT seq, link, kind, direction, vectors, scalars, payload_bytes FROM ledger WHERE useful AND seq > 0 ORDER BY 1, 2, 3, 4",
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    without_plots(monkeypatch)
    write_experiment(tmp_path)
    return tmp_path


def bits(folder: Path) -> list[Any]:
    """Figures, what users found, the final models, and what was sent."""
    models = [(path.name, {name: array.tobytes() for name, array in np.load(path).items()}) for path in sorted(folder.glob("models/*.npz"))]
    with contextlib.closing(sqlite3.connect(folder / "run.db")) as connection:
        figures, found, sent = (connection.execute(question).fetchall() for question in BITS)
        return [figures, found, models, sent]


# ---- runs


def test_runs_side_by_side_leave_the_bits_of_runs_one_after_another(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    said(capsys, *SMALL, "--jobs", "1", "--quiet", "--output", "one")
    said(capsys, *SMALL, "--jobs", "2", "--output", "two")
    for run in ("pdmm-0", "fedavg-0", "pdmm-1", "fedavg-1"):
        assert all(bits(here / "one" / run))
        assert bits(here / "two" / run) == bits(here / "one" / run)


@pytest.mark.slow
def test_networks_and_processes_over_grpc_have_the_same_bits_side_by_side(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    write_users(here / "users.npz")
    net = {
        "name": "net",
        "data": {"source": "npz", "path": "users.npz", "test_fraction": 0.3},
        "model": {"name": "mlp", "hidden": [4], "classes": CLASSES},
        "method": {"name": "fedrep", "head_epochs": 1, "batch_size": 5, "optimizer": {"lr": 0.05}},
        "stop": {"rounds": 3},
    }
    (here / "net.yaml").write_text(yaml.safe_dump(net))
    command = ("compare", "net.yaml", "--methods", "fedrep,fedavg", "--seeds", "0", "--quiet")
    said(capsys, *command, "--jobs", "1", "--output", "one")
    said(capsys, *command, "--jobs", "2", "--output", "two", "--transport", "grpc", "--hosts", "2")
    for run in ("fedrep-0", "fedavg-0"):
        assert bits(here / "two" / run)[:3] == bits(here / "one" / run)[:3]


@pytest.mark.slow
def test_an_error_names_its_run_and_ends_the_others(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = {**yaml.safe_load((here / "small.yaml").read_text()), "stop": {"rounds": 100_000}}
    content["data"] = {**content["data"], "path": str(here / "rows.csv")}
    monkeypatch.chdir("/")
    made = [series.Wanted(name, here / name, lambda: experiment_from(content)) for name in ("long", "wrong")]
    (here / "wrong").write_text("a file, where a folder is wanted")

    async def run() -> None:
        shown = series.SeriesDisplay(["long", "wrong"])
        await series._side_by_side(2, dict(enumerate(made, 1)), series.How("loopback", jobs=2), shown, Stop())

    with pytest.raises(coterie.CoterieError, match=r"^wrong: "):
        asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("to_all", [True, False], ids=["to all of a terminal", "to the command alone"])
def test_ctrl_c_ends_all_runs_and_a_resume_goes_on_to_the_same_bits(to_all: bool, capsys: pytest.CaptureFixture[str], here: Path) -> None:
    command = ("compare", "small.yaml", "--methods", "pdmm,fedavg", "--seeds", "0", "--set", "stop={rounds: 3000}")
    said(capsys, *command, "--jobs", "1", "--quiet", "--output", "one")
    process = Command(here, *command, "--jobs", "2", "--quiet", "--output", "two", launcher=("setsid",))
    begun = [here / "two" / run / "run.db" for run in ("pdmm-0", "fedavg-0")]
    deadline = time.monotonic() + 120
    while not all(path.is_file() for path in begun):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (os.killpg if to_all else os.kill)(process.process.pid, signal.SIGINT)
    assert process.fails(130).endswith("coterie compare two --resume")
    wait_for_the_end(process.process.pid, 10)
    said(capsys, "compare", "two", "--resume", "--jobs", "2", "--quiet")
    for path in begun:
        assert bits(path.parent)[:3] == bits(here / "one" / path.parent.name)[:3]


@pytest.mark.slow
def test_processes_of_a_killed_command_end_too(here: Path) -> None:
    command = (*SMALL, "--set", "stop={rounds: 1000000}", "--jobs", "2", "--quiet")
    process = Command(here, *command, launcher=("setsid",)).process
    deadline = time.monotonic() + 120
    while not list(here.glob("runs/*/*/run.db")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.communicate(timeout=60)
    wait_for_the_end(process.pid, 40)


def wait_for_the_end(group: int, seconds: float) -> None:
    """Until no process of a group is left."""
    deadline = time.monotonic() + seconds
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.killpg(group, 0)
            assert time.monotonic() < deadline, "a process is left"
            time.sleep(0.1)


# ---- how many


def wanted(folder: Path, *rules: dict[str, Any]) -> list[series.Wanted]:
    base = {"name": "x", "data": {"source": "ellipses"}, "problem": {"loss": "squared_hinge"}, "method": {"name": "local"}}
    return [series.Wanted(f"r{n}", folder / f"r{n}", lambda r=r: experiment_from({**base, "stop": r})) for n, r in enumerate(rules)]  # type: ignore[misc]


ALONE = "runs are made one after another, "


@pytest.mark.parametrize(
    ("asked", "transport", "rules", "jobs", "note"),
    [
        (None, "loopback", [{}, {}, {}], 2, "2 runs are made at a time, each on a core (--jobs 1: one after another)"),
        (None, "grpc", [{}, {}], 1, ALONE + "since each has processes of its own over gRPC (--jobs 2: 2 at a time)"),
        (None, "loopback", [{}, {"wall_time_s": 5}], 1,
         ALONE + "since stop.wall_time_s ends them by the clock (--jobs 2: 2 at a time)"),
        (None, "loopback", [{}], 1, ""),
        (3, "grpc", [{}, {}], 3, ""),
    ],
)  # fmt: skip
def test_without_jobs_each_core_has_a_run_where_that_suits_them_and_a_line_says_so(
    asked: int | None, transport: Transport, rules: Sequence[Any], jobs: int, note: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(series, "cores", lambda: 2)
    how, said = series._with_jobs(series.How(transport, None, asked), wanted(tmp_path, *rules))
    assert (how.jobs, said) == (jobs, note)


def test_cores_are_those_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 <= side_by_side.cores() <= len(os.sched_getaffinity(0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 7, 9})
    limits = {"/proc/self/cgroup": "0::/a/b\n", "/sys/fs/cgroup/a/b/cpu.max": "max 100000\n", "/sys/fs/cgroup/a/cpu.max": "250000 100000\n"}
    monkeypatch.setattr(Path, "is_file", lambda self: str(self) in limits)
    monkeypatch.setattr(Path, "read_text", lambda self, **_: limits[str(self)])
    assert side_by_side.cores() == 2
    limits["/sys/fs/cgroup/a/cpu.max"] = "50000 100000\n"
    assert side_by_side.cores() == 1


def test_jobs_below_one_are_refused(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    assert "--jobs" in refused(capsys, 2, *SMALL, "--jobs", "0")
    with pytest.raises(ConfigError, match=r"^jobs is 0, want at least 1$"):
        coterie.compare("small.yaml", ["local"], output="out", jobs=0)


# ---- progress


def test_lines_of_runs_side_by_side_are_whole_and_name_their_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie_deploy.studies.progress.LINES_EVERY_S", 0.0)
    file = io.StringIO()
    with series_display(Console(file=file, width=60), ["a-0 (1/2)", "b-0 (2/2)"], quiet=False) as shown:
        shown.begin(1)
        shown.begin(2)
        shown.has_come(2, At("global", 0, 2, 3, 0.5))
        shown.has_come(1, At("local", 1, 2, 1, 0.0))
        picture = Console(width=60, force_terminal=True, color_system=None)
        with picture.capture() as captured:
            picture.print(shown.picture())
        shown.end(2)
        assert shown.done == 1.5
    lines = ["a-0 (1/2)", "b-0 (2/2)", "b-0 (2/2)  global: 0/2", "a-0 (1/2)  local: 0/2"]
    assert file.getvalue().splitlines() == lines
    assert [line.split("  ")[0] for line in captured.get().splitlines()] == ["a-0 (1/2)", "b-0 (2/2)", "all"]


# ---- the pool


def worked(how: str) -> Any:
    """What a process of the pool does in these tests."""
    in_a_process.tell("at work")
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "fails":
        raise RunError("the disk is full")
    if how == "waits":
        time.sleep(600)
    return {name: os.environ.get(name) for name in side_by_side.ONE_THREAD}


def pooled(*calls: str, stop_after: str = "") -> tuple[dict[int, Any], list[tuple[int, Any]]]:
    heard: list[tuple[int, Any]] = []

    async def go() -> dict[int, Any]:
        stop = Stop()

        def hear(number: int, what: Any) -> None:
            heard.append((number, what))
            if what == stop_after:
                stop.ask("SIGINT")

        named = dict(enumerate(calls))
        pool = Pool(2, worked, hear, lambda number: heard.append((number, "over")))
        return await pool.results({n: (call,) for n, call in named.items()}, {n: f"run {n}" for n in named}, stop, 0.1)

    return asyncio.run(go()), heard


def test_each_process_has_one_thread_whatever_the_command_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    found, heard = pooled("ends", "ends")
    assert list(found.values()) == [side_by_side.ONE_THREAD] * 2
    assert (os.environ["OMP_NUM_THREADS"], os.environ.get("MKL_NUM_THREADS")) == ("4", None)
    assert {number for number, what in heard if what == "over"} == {0, 1}


def test_an_error_of_one_ends_all_and_names_its_run() -> None:
    began = time.monotonic()
    with pytest.raises(RunError, match=r"^run 1: the disk is full$"):
        pooled("waits", "fails")
    assert time.monotonic() - began < 60  # of 600


@pytest.mark.slow
def test_a_process_that_dies_ends_all_and_names_what_it_may_have_done() -> None:
    with pytest.raises(RunError, match=r"^a process of .*run 0.* ended without a word: want memory for so many at a time, or fewer jobs$"):
        pooled("dies", "ends")


@pytest.mark.slow
def test_a_signal_ends_what_does_not_end_by_itself_and_begins_nothing_more() -> None:
    began = time.monotonic()
    with pytest.raises(StoppedError, match=r"^(stopped in run [01]|run [01]: stopped before it began)$"):
        pooled("waits", "waits", "ends", stop_after="at work")
    assert time.monotonic() - began < 60


# ---- papers


SMALL_STUDY = {"N_USERS": 30, "N_NEW": 8, "ROUNDS": 4, "ROWS": (3, 4)}


def part_of_a_small_study(*arguments: Any) -> None:
    for name, value in SMALL_STUDY.items():
        setattr(fedrep_linear, name, value)
    (arguments[2] / f"by-{os.getpid()}").touch()
    papers._measured(*arguments)


def test_parts_of_a_reproduction_side_by_side_give_the_rows_of_one_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SMALL_STUDY.items():
        monkeypatch.setattr(fedrep_linear, name, value)
    monkeypatch.setattr(papers, "_measured", part_of_a_small_study)
    screen = Console(file=io.StringIO(), width=100)
    (tmp_path / "2").mkdir()
    one, two = (papers.reproduce("fedrep-figure1", seeds=1, output=tmp_path / str(n), jobs=n, console=screen) for n in (1, 2))
    assert {row.seed for row in one} == {0}
    assert len(list(tmp_path.glob("2/by-*"))) == 2
    assert two == one
    assert (tmp_path / "2/fedrep-figure1.csv").read_bytes() == (tmp_path / "1/fedrep-figure1.csv").read_bytes()
