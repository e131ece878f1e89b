"""Objectives without a minimiser: a run ends, and says so wherever it says how a stage has ended."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import coterie
from coterie.errors import ConfigError
from coterie_deploy.cli import app as cli

CASES = Path(__file__).parent.parent / "fixtures" / "cases"
EXPERIMENT = {
    "name": "open",
    "data": {"source": "csv", "path": "separable.csv", "user_column": "school", "cluster_column": "region", "target_column": "label"},
    "problem": {"loss": "logistic", "l2": 0},
    "method": {"name": "global"},
}


def report(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> list[str]:
    """What `run` and then `show` say, each in one line."""
    (folder / "open.yaml").write_text(json.dumps(EXPERIMENT))
    if not (folder / "separable.csv").is_file():
        shutil.copy(CASES / "separable.csv", folder)
    run = ["run", "open.yaml", "--transport", "loopback", "--output", "run", *options]
    said = []
    for command in (run, ["show", "run"]):
        assert cli._run(command) == 0
        said.append(" ".join(capsys.readouterr().out.split()))
    return said


@pytest.mark.parametrize("standardize", ["true", "false"])
def test_separable_classes_have_not_converged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, standardize: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for text in report(tmp_path, capsys, "--set", f"data.standardize={standardize}"):
        assert "converged" not in text
        assert "global * no minimum!" in text
        assert "warning: global ended without a minimiser: the objective falls for ever in some direction, as with separable" in text


@pytest.mark.parametrize("options", [("--set", "problem.l2=1e-6"), ("--set", "problem.loss=least_squares")])
def test_with_a_penalty_or_another_loss_they_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    for text in report(tmp_path, capsys, *options):
        assert "global * converged" in text
        assert "warning" not in text


def test_counts_that_are_all_0_have_no_best_mean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [f"s{place % 3},{place * 37 % 11 - 5},0" for place in range(30)]
    (tmp_path / "separable.csv").write_text("\n".join(["school,a,label", *rows]) + "\n")
    options = ("--set", "problem={loss: poisson, l2: 0.1}", "--set", "data.cluster_column=null")
    for text in report(tmp_path, capsys, *options):
        assert "converged" not in text
        assert "ended without a minimiser" in text


def test_a_hinge_that_every_row_satisfies_has_several_minimisers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for text in report(tmp_path, capsys, "--set", "problem.loss=squared_hinge"):
        assert "warning: global ended at one of several minimisers: some direction changes nothing" in text


def test_groups_and_shrunken_users_need_rows_that_span_the_space_together_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(3)
    rows, user = random.normal(size=(40, 2)), np.repeat(["a", "b"], 20)
    rows[:20, 0], rows[20:, 1] = 0.0, 0.0  # each user lacks one of two features, as a ward without a level of a category
    target = rows @ [1.0, -2.0] + random.normal(size=40)
    np.savez("rows.npz", features=rows, target=target, user=user, ward=np.repeat("w", 40))
    experiment = {
        "name": "wards",
        "data": {"source": "npz", "path": "rows.npz", "cluster": "ward", "test_fraction": 0},
        "problem": {"loss": "least_squares", "reduction": "sum"},
        "method": {"name": "hlm_exact", "gamma": 1.0, "alpha": 1.0},
        "references": ["oracle"],
    }
    run = coterie.run(experiment).as_run()
    together, *_ = np.linalg.lstsq(np.column_stack([rows, np.ones(40)]), target)
    assert run.models_of("oracle")["a"] * [1, 1, -1] == pytest.approx(together)
    with pytest.raises(ConfigError, match=r"2 of 2 users .* of its own, which a method or a reference of this experiment needs: user 'a'"):
        coterie.run({**experiment, "references": ["local"], "name": "alone"})
