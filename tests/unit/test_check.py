"""`coterie check method`: what it prints, its exit codes, and what it refuses."""

from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from coterie import registry
from coterie.errors import ConfigError
from coterie_deploy.cli import app as cli
from coterie_deploy.studies.check import CHECKS, check_method
from coterie_deploy.studies.check.federations import CASES, cases_of
from coterie_deploy.studies.check.runs import left_out
from coterie_deploy.studies.check.show import Asked, check_here
from coterie_deploy.studies.check.table import BY_NAME, needed
from coterie_deploy.studies.check.trial import Trial
from coterie_deploy.studies.check.world import Leaving
from tests.simulation import query

QUICK = [part for name in ("halves", "reveals", "runs", "closed-form", "aggregators") for part in ("--only", name)]
FILE = """
name: mine
data: {source: ellipses, users_per_cluster: 1, test_per_class: 5}
problem: {loss: squared_hinge, l2: 0.1}
method: {name: pdmm, penalty: 0.3}
stop: {rounds: 3}
"""


@pytest.mark.parametrize("width", [40, 80])
def test_verdicts_are_a_table_that_fits(width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert cli._run(["check", "method", "pdmm", *QUICK]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert [line.split()[:2] for line in lines if line.startswith(("halves", "closed-form"))] == [
        ["halves", "passed"],
        ["closed-form", "passed"],
    ]
    text = " ".join(" ".join(lines).split())
    assert "aggregators: method 'pdmm' cannot run with aggregators" in text
    assert "pdmm paper" in text
    assert text.endswith("4 checks passed, 1 not applicable.")
    assert "\x1b" not in text


def test_a_failure_is_said_with_what_the_check_proves(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli._run(["check", "method", "pdmm", *QUICK, "--set", "data.users_per_cluster=1", "--set", "federation.users=4"]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "runs HAS FAILED: the hosts bring 3 users together, wanted 4" in text
    assert BY_NAME["runs"].proves in text
    assert "closed-form: it builds on 'runs', which has failed" in text
    assert "1 check failed, 2 checks passed, 2 not applicable." in text


def test_an_experiment_of_one_s_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(FILE)
    kept = tmp_path / "kept"
    assert cli._run(["check", "method", "pdmm", "--experiment", str(path), *QUICK, "--only", "repeat", "--output", str(kept)]) == 0
    assert "Method 'pdmm' on the experiment 'mine'" in capsys.readouterr().out
    assert sorted(folder.name for folder in kept.iterdir()) == ["1-data", "2-calm", "3-again"]
    assert (kept / "2-calm" / "run" / "run.db").is_file()
    assert cli._run(["check", "method", "pdmm", "--experiment", str(path), "--output", str(kept)]) == 2
    assert "is not empty: choose another one with --output" in capsys.readouterr().err
    assert cli._run(["check", "method", "local", "--experiment", str(path)]) == 2
    assert "has method 'pdmm', want 'local'" in capsys.readouterr().err


METHOD = """
from typing import Literal
from coterie.plugin import JointTraining, LocalTraining

class Config(JointTraining):
    name: Literal["beside"] = "beside"

METHOD = LocalTraining(config=Config)
"""


def test_a_method_that_is_not_installed_is_checked_by_its_name_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside.py").write_text(METHOD)
    monkeypatch.setattr(registry, "_beside", {})
    command = [sys.executable, "-m", "coterie", "check", "method", "beside", "--only", "halves", "--only", "runs"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[0] == "Method 'beside' on a small federation"


def test_a_line_is_flushed_when_its_check_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []

    class Pipe(io.StringIO):
        def flush(self) -> None:
            flushed.append(self.getvalue().splitlines()[-1])

    check_here(Asked("local", only=["halves", "reveals"]), Console(file=Pipe(), width=80), Console(file=io.StringIO()))
    lines = [line.split()[:2] for line in dict.fromkeys(flushed) if "  passed  " in line]
    assert lines == [["halves", "passed"], ["reveals", "passed"]]


def test_the_list_says_what_each_check_proves(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli._run(["check", "method", "--list"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert all(check.name in text and check.proves in text for check in CHECKS)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["pdm"], "the method 'pdm' is unknown, want one of adapt, "),
        (["pdmm", "--only", "hots"], "the check 'hots' is unknown, want one of halves, "),
        ([], "coterie check method wants the name of a method, or --list"),
        (["pdmm", "--set", "method.penalti=1"], "method.penalti: unknown key; did you mean 'penalty'?"),
    ],
)
def test_what_is_wrong_is_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._run(["check", "method", *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_a_check_builds_on_earlier_ones() -> None:
    names = [check.name for check in CHECKS]
    for place, check in enumerate(CHECKS):
        assert set(needed(check)) <= set(names[:place])
        assert check.proves.endswith(".")


def test_a_method_has_its_own_small_federations() -> None:
    assert list(cases_of("fedavg")) == [
        "fedavg",
        "fedavg robust",
        "fedavg thin",
        "fedavg thin convex",
        "fedavg thin rank",
        "fedavg convex",
        "fedavg convex sums",
    ]
    assert list(cases_of("pdmm paper")) == ["pdmm paper"]
    assert next(iter(cases_of("pdmm"))) == "pdmm lean"
    assert {name for row in CASES for name in cases_of(row)} == set(CASES)


def test_from_python(tmp_path: Path) -> None:
    found = check_method("local", only=["runs", "books"], output=tmp_path / "kept")
    assert [(one.check.name, one.state) for one in found] == [("runs", "passed"), ("books", "passed")]
    with pytest.raises(ConfigError, match="the check 'none' is unknown"):
        check_method("local", only=["none"])


def test_a_lost_host_is_lost_in_a_round_whatever_the_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run has one round for two exchanges of its beginning and its end, so a draw of all of them would often miss it."""
    lost: list[int] = []
    made = Leaving.__init__

    def noted(self: Leaving, leaver: str, lost_at: int, *more: Any, **how: Any) -> None:
        lost.append(lost_at)
        made(self, leaver, lost_at, *more, **how)

    monkeypatch.setattr(Leaving, "__init__", noted)
    rounds: set[int] = set()
    for seed in range(3):
        trial = Trial(replace(CASES["fedavg convex"], changes=["stop.rounds=2", "method.participation=1.0"]), tmp_path / str(seed), seed)
        left_out(trial)
        at = lost[-2]
        rounds |= {number for (number,) in query(trial.calm.folder, f"SELECT round FROM ledger WHERE seq = {at}")}
    assert rounds == {1}


def test_a_host_that_comes_back_is_caught_up_in_one_process(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It answers the first of the tasks that it missed while the second is being sent."""
    assert left_out(Trial(CASES["pdmm lean"], tmp_path)) == "it goes on without them"
    assert caplog.text == ""
