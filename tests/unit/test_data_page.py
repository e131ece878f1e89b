"""`coterie data`: the users and their classes in numbers, in wide and narrow terminals, and no row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from coterie_deploy.cli import app as cli

DIGITS = """
name: digits
data: {source: digits, partition: {by: classes, users: 25, classes_per_user: 2}}
model: {name: mlp, classes: 10}
method: {name: fedrep}
"""
TABLE = """
name: table
data: {source: npz, path: t.npz, test_fraction: 0.25}
problem: {loss: least_squares}
method: {name: global}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "digits.yaml").write_text(DIGITS)
    (tmp_path / "table.yaml").write_text(TABLE)
    np.savez(tmp_path / "t.npz", features=np.full((8, 1), 123.25), target=np.arange(8) / 7, user=["a"] * 4 + ["b"] * 4)
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert cli._run(["data", *arguments]) == 0
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_the_partition_is_shown_in_numbers(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "digits.yaml")
    assert lines[0] == "digits: 25 users, 1,350 training rows, 350 test rows"
    assert lines[1] == "source digits, divided by classes"
    assert "a user has     min  25 %  median  75 %  max" in lines
    assert "training rows   54    54      54    54   54" in lines
    assert "test rows       14    14      14    14   14" in lines
    assert "classes          2     2       2     2    2" in lines
    picture = [line for line in lines if line.startswith("u")]
    assert len(picture) == 20
    assert all(len(line.split()) == 11 and line.count("·") == 8 for line in picture)
    assert lines[-1] == "and 5 more users"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("digits.yaml",), "20 % of each user's rows are held out (data.test_fraction)"),
        (("table.yaml",), "25 % of each user's rows are held out (data.test_fraction)"),
        (("table.yaml", "--set", "data.test_fraction=0"), "no rows are held out (data.test_fraction: 0)"),
        (("table.yaml", "--set", "data.fold={number: 2, of: 3}"), "fold 2 of 3 of each user's training rows is held out (data.fold)"),
    ],
)
def test_the_rows_that_are_held_out_are_said_with_their_key(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], sentence: str
) -> None:
    assert sentence in said(capsys, *arguments)


def test_the_seed_and_the_overrides_count(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (said(capsys, "digits.yaml", "--seed", seed) for seed in ("1", "2"))
    assert first != second
    assert said(capsys, "digits.yaml", "--set", "data.partition.users=5")[0].startswith("digits: 5 users")


@pytest.mark.parametrize("columns", [20, 28, 40, 80, 200])
def test_lines_fit_the_terminal(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = said(capsys, "digits.yaml")
    assert all(len(line) <= columns for line in lines)
    assert sum(line.startswith("u") and "·" in line for line in lines) == 20
    assert sum(line.split()[:1] == ["9"] for line in lines) == 1


def test_a_table_without_classes_shows_its_users_and_no_row(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "table.yaml")
    assert lines[0] == "table: 2 users, 6 training rows, 2 test rows"
    assert "123" not in "".join(lines)
    assert not any("Classes" in line for line in lines)


def test_a_mistake_is_one_sentence(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._run(["data", "digits.yaml", "--set", "data.partition.classes_per_user=11"]) == 2
    assert capsys.readouterr().err == "error: partition.classes_per_user is 11, want at most the 10 classes of digits\n"
