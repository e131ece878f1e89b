"""`coterie watch`: what it shows of a run, and how it ends."""

from __future__ import annotations

import fcntl
import io
import json
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from coterie.errors import ConfigError
from coterie.experiment.config import experiment_from, experiment_to_json
from coterie_deploy.cli import app as cli
from coterie_deploy.read import run_status
from coterie_deploy.read.run_status import Pace, RunStatus, Status, Watcher, pace_of, rounds_left
from coterie_deploy.view.watch import line_of, picture, sparkline, watch
from coterie_server.record.curves import Curves
from coterie_server.record.rundb import RunDatabase
from coterie_server.record.summary import StageSummary
from coterie_server.run.coordinator import LOCK
from coterie_server.run.plan import stages_of
from tests.small_runs import make_run

EXPERIMENT = {
    "name": "small",
    "data": {"source": "ellipses"},
    "problem": {"loss": "squared_hinge"},
    "method": {"name": "pdmm", "penalty": 0.05},
    "stop": {"rounds": 500, "residual": 1e-3},
    "references": ["local"],
    "federation": {"hosts": 3},
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    return make_run(tmp_path_factory.mktemp("small"), tmp_path_factory.mktemp("runs") / "done")


@pytest.fixture
def under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, RunDatabase]]:
    """A run whose coordinator is at work: two hosts of three are here, and the second of three stages has just ended round 30."""
    folder, begin = tmp_path / "run", 1.8e9
    monkeypatch.setattr(run_status, "time", SimpleNamespace(time=lambda: begin + 30))
    folder.mkdir()
    now = [begin]
    database = RunDatabase(folder / "run.db", clock=lambda: now[0])
    facts = {"run_id": "r1", "attempt": "1", "name": "small", "experiment": experiment_to_json(experiment_from(EXPERIMENT))}
    for key, value in {**facts, "status": "running"}.items():
        database.put(key, value)
    database.event("start", "attempt 1 starts", attempt=1)
    for number in (1, 2, 3):
        database.event("join", f"host 'host-{number}' joined with 2 users", host=f"host-{number}", hosts_here=number)
    database.event("lost", "host 'host-2' is gone: it was silent", host="host-2", round=12)
    database.stage(0, "local", "local", 1, "converged", 0.5)
    database.stage(1, "pdmm", "pdmm", 0, "", 0.0)
    for number in range(31):
        now[0] = begin + number
        figures = {"objective": 2 + 1 / (number + 1), "primal_residual": 10 * 0.8**number, "dual_residual": 1e-9}
        database.figures(1, number, figures if number else {})
    database.flush()
    with (folder / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder, database
    database.close()


def drawn(run: RunStatus, width: int, encoding: str = "utf-8") -> str:
    """The picture, as a console of this width has it."""
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=out, width=width, highlight=False)
    console.print(picture(run, console))
    out.seek(0)
    return out.read()


@pytest.mark.parametrize("width", [80, 60, 40])
def test_the_picture_says_it_all_at_any_width(under_way: tuple[Path, RunDatabase], width: int) -> None:
    run, _ = Watcher(under_way[0]).look()
    text = drawn(run, width)
    assert max(map(len, text.splitlines())) <= width
    words = " ".join(text.split())
    assert "small running run r1" in words
    assert "30/500" in words
    assert "1/3" in words
    assert "2 of 3 hosts here" in words
    assert words.index("host-2 absent") < words.index("host-1 here"), "first who is missing"
    assert "residual 0.012 █" in words
    assert "it was silent" in words
    assert "1.0/s rounds, 30 s so far" in words
    assert "about 11 s left" in words, "10 * 0.8^t is 1e-3 at t = 41.3"
    assert "at most 7:5" in words, "470 rounds"


def test_a_terminal_without_the_letters_of_sparklines_gets_others(under_way: tuple[Path, RunDatabase]) -> None:
    run, _ = Watcher(under_way[0]).look()
    assert "residual     0.012  @" in drawn(run, 80, "ascii")


def test_names_and_texts_of_others_cannot_steer_the_terminal(under_way: tuple[Path, RunDatabase]) -> None:
    folder, database = under_way
    database.event("join", "host 'a\x1b[2J' joined", host="a\x1b[2J")
    database.put("name", "sm\x1b]0;all\x07")
    database.flush()
    run, _ = Watcher(folder).look()
    text = drawn(run, 80) + line_of(run)
    assert "\x1b" not in text
    assert "\\x1b[2J" in text


def test_plain_lines_where_there_is_no_terminal_until_the_run_has_finished(under_way: tuple[Path, RunDatabase]) -> None:
    folder, database = under_way
    out = io.StringIO()
    watching = threading.Thread(target=watch, args=(folder, Console(file=out, width=80)), kwargs={"patience_s": 0.0})
    watching.start()
    deadline = time.monotonic() + 20
    while "stage 2/3 pdmm: round 30 of at most 500, objective 2.03226" not in out.getvalue():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert "host 'host-2' is gone: it was silent" in out.getvalue()
    assert watching.is_alive()
    database.event("finished", "the run has finished")
    database.put("status", "finished")
    database.flush()
    watching.join(20)
    assert not watching.is_alive()
    assert out.getvalue().splitlines()[-1].startswith("finished, stage 2/3 pdmm: round 30")
    assert "\x1b" not in out.getvalue()


def test_in_a_terminal_the_picture_is_drawn_again_and_stays(finished: Path) -> None:
    out = io.StringIO()
    watch(finished, Console(file=out, width=80, force_terminal=True), patience_s=0.0)
    assert "finished" in out.getvalue()
    assert "result" in out.getvalue()


def test_a_finished_run_ends_well_and_a_failed_or_killed_one_does_not(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli._run(["watch", str(finished), "--once"]) == 0
    assert "3 stages, result pdmm: 40 rounds in" in capsys.readouterr().out
    database = RunDatabase(tmp_path / "run.db")
    database.put("status", "running")
    database.close()
    assert cli._run(["watch", str(tmp_path)]) == 3
    assert "error: the run was stopped, nobody is at work in its folder; it can be resumed" in capsys.readouterr().err
    database = RunDatabase(tmp_path / "run.db")
    database.put("status", "failed: host 'a' is gone")
    database.close()
    assert cli._run(["watch", str(tmp_path)]) == 3
    assert "error: the run has failed: host 'a' is gone" in capsys.readouterr().err


def test_a_database_that_cannot_be_read_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.db").write_text("this is not a database, whatever its name may say")
    assert cli._run(["watch", str(tmp_path)]) == 3
    assert f"error: the run database {tmp_path}/run.db is damaged: file is not a database" in capsys.readouterr().err


def test_a_run_that_does_not_appear_is_waited_for_no_longer_than_asked(tmp_path: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(ConfigError, match=r"it does not exist, after 0\.3 s"):
        watch(tmp_path / "later", Console(file=io.StringIO()), patience_s=0.3)
    assert 0.3 <= time.monotonic() - begin < 5
    with pytest.raises(ConfigError, match=r"it does not exist$"):
        watch(tmp_path / "later", Console(file=io.StringIO()), patience_s=1000.0, once=True)


def test_who_waits_is_told_for_what_and_a_file_is_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file is not a run folder: it is a file$"):
        watch(tmp_path / "file", Console(file=io.StringIO()), patience_s=1000.0)
    assert capsys.readouterr().err == ""
    with pytest.raises(ConfigError, match=r"it has no run.db, after 1 s$"):
        watch(tmp_path, Console(file=io.StringIO()), patience_s=1.0)
    assert capsys.readouterr().err == f"waiting up to 1 s for a run: {tmp_path} is not a run folder: it has no run.db\n"


def test_a_run_that_appears_is_watched(finished: Path, tmp_path: Path) -> None:
    out = io.StringIO()
    watching = threading.Thread(target=watch, args=(tmp_path / "later", Console(file=out)), kwargs={"patience_s": 20.0})
    watching.start()
    time.sleep(0.05)
    (tmp_path / "later").symlink_to(finished)
    watching.join(20)
    assert out.getvalue().splitlines()[-1].startswith("finished")


def test_a_folder_that_vanishes_ends_the_watching(under_way: tuple[Path, RunDatabase]) -> None:
    folder, _ = under_way
    watcher = Watcher(folder)
    watcher.look()
    (folder / "run.db").rename(folder / "gone.db")
    with pytest.raises(ConfigError, match=r"it has no run\.db"):
        watcher.look()
    (folder / "gone.db").rename(folder / "run.db")


def test_a_run_of_an_experiment_that_is_not_understood_is_shown_all_the_same(under_way: tuple[Path, RunDatabase]) -> None:
    folder, database = under_way
    database.put("experiment", json.dumps({**EXPERIMENT, "from_the_future": 1}))
    run, _ = Watcher(folder).look()
    assert (run.limit, run.n_stages, run.status) == (0, 2, Status.running)
    assert "pdmm" in drawn(run, 80)


# ---- rates


def stage_curves(seconds: list[float], **figures: list[float]) -> Curves:
    rounds = np.arange(len(seconds))
    sent = {("up", "direct"): 100.0 * rounds}
    return Curves(
        StageSummary(0, "pdmm", "pdmm", 0, "", 0.0), rounds, np.array(seconds), {k: np.array(v) for k, v in figures.items()}, sent
    )


def test_the_pace_is_that_of_the_last_seconds() -> None:
    slow_then_fast = [*np.arange(0, 100, 10.0), *np.arange(100, 120, 0.5)]
    pace = pace_of(stage_curves(slow_then_fast), 119.5)
    assert pace.rounds_per_s == pytest.approx(2.0)
    assert pace.bytes_per_s["up", "direct"] == pytest.approx(200.0)


def test_a_stage_that_waits_gets_slower_and_slower() -> None:
    assert pace_of(stage_curves([0.0, 1.0, 2.0]), 102.0).rounds_per_s == pytest.approx(1 / 100), "one second may not be written yet"


def test_a_stage_that_has_just_begun_has_no_pace_and_then_at_once_the_right_one() -> None:
    fast = [0.0, *np.arange(1.0, 6.0, 0.01)]  # a second to set up, then 100 rounds a second
    for n_rounds, now_s in ((1, 1.5), (20, 1.7), (150, 3.4)):
        assert pace_of(stage_curves(fast[: n_rounds + 1]), now_s) == Pace()
    for n_rounds, now_s in ((250, 3.5), (250, 4.4), (450, 6.4)):
        assert pace_of(stage_curves(fast[: n_rounds + 1]), now_s).rounds_per_s == pytest.approx(100, rel=0.02)
    assert pace_of(stage_curves([0.0, 10.0]), 12.0) == Pace()


def test_one_that_is_over_has_the_pace_of_all_of_it_and_one_without_times_none() -> None:
    assert pace_of(stage_curves([0.0, 1.0, 1.5, 2.0]), math.nan).rounds_per_s == pytest.approx(1.5)
    assert pace_of(stage_curves([0.0]), 5.0) == Pace()
    assert pace_of(stage_curves([math.nan, math.nan]), 5.0) == Pace()


def test_rounds_left_are_known_where_a_residual_falls() -> None:
    (*_, stage) = stages_of(experiment_from(EXPERIMENT))
    falls = [10 * 0.8**t for t in range(30)]
    assert rounds_left(stage_curves([0.0] * 30, primal_residual=falls), stage) == pytest.approx(math.log(1e-4, 0.8) - 29, abs=0.01)
    assert math.isnan(rounds_left(stage_curves([0.0] * 30, primal_residual=falls[::-1]), stage))
    assert math.isnan(rounds_left(stage_curves([0.0] * 9, primal_residual=falls[:9]), stage)), "too few to tell"
    assert math.isnan(rounds_left(stage_curves([0.0] * 30, objective=falls), stage))


@pytest.mark.parametrize(
    ("values", "width", "is_log", "drawn_as"),
    [
        ([1.0, 2.0, 3.0], 8, False, "▁▅█"),
        ([5.0, 5.0], 8, False, "▁▁"),
        ([1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7], 8, True, "█▇▆▅▄▃▂▁"),
        ([9.0] * 4 + [0.0] * 4 + [9.0] * 4, 3, False, "█▁█"),
        ([100.0] + [0.0] * 4 + [1.0] * 4, 2, False, "▁█"),
        ([], 8, False, ""),
        ([math.inf, 1.0, 2.0], 8, False, "▁█"),
    ],
)
def test_a_sparkline_goes_from_the_lowest_to_the_highest_of_the_last_rounds(
    values: list[float], width: int, is_log: bool, drawn_as: str
) -> None:
    assert sparkline(np.array(values), width, is_log=is_log) == drawn_as
