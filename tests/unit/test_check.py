"""`coterie check method`: what it prints, its exit codes, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from coterie.errors import ConfigError
from coterie_deploy.cli import app as cli
from coterie_deploy.studies.check import CHECKS, check_method
from coterie_deploy.studies.check.federations import CASES, cases_of
from coterie_deploy.studies.check.table import BY_NAME, needed

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
    assert list(cases_of("fedavg")) == ["fedavg", "fedavg convex"]
    assert list(cases_of("pdmm paper")) == ["pdmm paper"]
    assert next(iter(cases_of("pdmm"))) == "pdmm lean"
    assert {name for row in CASES for name in cases_of(row)} == set(CASES)


def test_from_python(tmp_path: Path) -> None:
    found = check_method("local", only=["runs", "books"], output=tmp_path / "kept")
    assert [(one.check.name, one.state) for one in found] == [("runs", "passed"), ("books", "passed")]
    with pytest.raises(ConfigError, match="the check 'none' is unknown"):
        check_method("local", only=["none"])
