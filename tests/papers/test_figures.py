"""Figures 1 and 2 of Armacki, Bajovic, Jakovetic and Kar (2022), made again by federated runs."""

from __future__ import annotations

import csv
import io
import sys
import time

import numpy as np
import pytest
from rich.console import Console

from coterie.errors import ConfigError
from coterie_deploy.studies.reproduce import convex_clustering as study
from coterie_deploy.studies.reproduce import names, reproduce
from coterie_deploy.studies.reproduce.study import Work

FIGURE1, FIGURE2 = "convex-clustering-figure1", "convex-clustering-figure2"
PNG = b"\x89PNG"
# Mean accuracies of this kind of data over 8 seeds, found independently.
REFERENCE = {"global": 0.482, "local": 0.872, "squared": 0.908, "sum_of_norms": 0.911, "oracle": 0.910}


def screen():
    return Console(file=io.StringIO(), width=100)


@pytest.fixture
def small_grids(monkeypatch):
    segments = (study.Segment((0.15, 0.09), None, 1e-3), study.Segment((0.03,), 0.2, 1e-3))
    monkeypatch.setattr(study, "SEGMENTS", segments)
    monkeypatch.setattr(study, "GAMS", (1.0, 0.15, 0.09, 0.03))
    monkeypatch.setattr(study, "LAMS", (0.15, 0.09, 0.03))


def test_both_figures_leave_a_table_a_plot_and_the_numbers(tmp_path, small_grids, monkeypatch):
    console = screen()
    rows = reproduce(FIGURE1, seeds=2, output=tmp_path / "new", console=console)
    printed = console.file.getvalue()
    assert [text for text in ("global model (1)", "oracle", "86.6 %", "86.8 %", "seeds 0 to 1") if text not in printed] == []
    assert {row.seed for row in rows} == {0, 1}
    assert len(rows) == 2 * (3 + 3 + 4)

    def no_run(*arguments, **options):
        raise AssertionError("the second figure runs nothing")

    monkeypatch.setattr(study, "run", no_run)
    console = screen()
    assert reproduce(FIGURE2, seeds=2, output=tmp_path / "new", console=console) == rows
    assert "more compact" in console.file.getvalue()
    for name in (FIGURE1, FIGURE2):
        assert (tmp_path / "new" / f"{name}.png").read_bytes().startswith(PNG)
    with (tmp_path / "new" / "convex-clustering.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [float(line["accuracy"]) for line in lines] == [row.accuracy for row in rows]
    assert float(lines[3]["lambda_eq3"]) == pytest.approx(float(lines[3]["penalty"]) / 120)


def test_numbers_of_other_grids_or_damaged_ones_are_made_again(tmp_path, small_grids, monkeypatch):
    first = study.rows_of_seed(0, Work(tmp_path))
    (kept,) = tmp_path.iterdir()
    kept.write_text("{")
    assert study.rows_of_seed(0, Work(tmp_path)) == first
    monkeypatch.setattr(study, "GAMS", (1.0,))
    assert len(study.rows_of_seed(0, Work(tmp_path))) == len(first) - 3


def test_a_curve_is_the_mean_over_the_seeds_with_its_standard_error():
    rows = [
        study.Row(seed, "squared", gam, gam / 120, acc, 0.0, 60, False, 1)
        for seed, gam, acc in [(0, 2, 0.5), (1, 2, 0.7), (0, 1, 0.9), (1, 1, 0.9)]
    ]
    found = study.curve(rows, "squared", "accuracy")
    np.testing.assert_allclose(found.penalty, [1, 2])
    np.testing.assert_allclose(found.mean, [0.9, 0.6])
    np.testing.assert_allclose(found.error, [0.0, 0.1])
    assert found.peak() == (1.0, pytest.approx(0.9), 0.0)
    assert found.at(2) == pytest.approx(0.6)


def test_an_unknown_figure_and_a_missing_library_are_told_before_anything_runs(tmp_path, monkeypatch):
    assert names()[:2] == [FIGURE1, FIGURE2]
    with pytest.raises(ConfigError, match="cannot reproduce 'figure1', want one of"):
        reproduce("figure1", output=tmp_path)
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(ConfigError, match=r"vl_convert, which is not installed: pip install 'coterie\[report\]'"):
        reproduce(FIGURE1, output=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_eight_seeds_give_the_figures_in_five_minutes(tmp_path):
    started = time.monotonic()
    rows = reproduce(FIGURE1, seeds=8, output=tmp_path, console=screen())
    reproduce(FIGURE2, seeds=8, output=tmp_path, console=screen())
    assert time.monotonic() - started < 300

    peaks = {method: study.curve(rows, method, "accuracy").peak()[1] for method in REFERENCE}
    assert peaks == pytest.approx(REFERENCE, abs=0.02)
    assert peaks["global"] < peaks["local"] < peaks["squared"] <= peaks["sum_of_norms"] <= peaks["oracle"] + 0.01

    accuracy, models = (study.curve(rows, "sum_of_norms", measure) for measure in ("accuracy", "clusters"))
    assert models.mean[-1] == 1  # "For lambda sufficiently large, our method enforces consensus"
    assert accuracy.mean[-1] == pytest.approx(peaks["global"], abs=1e-3)
    assert models.mean[0] > 59
    assert accuracy.mean[0] > peaks["local"]
    compact, squared = (study.curve(rows, method, "within") for method in ("sum_of_norms", "squared"))
    for lam in study.LAMS:  # "constantly smaller" is true from .01 up only
        assert (compact.at(lam) < squared.at(lam)) == (lam >= 0.01), lam
    exact = {row.seed for row in rows if row.method == "sum_of_norms" and row.is_exact}
    assert len(exact) >= 5  # "finds 3 clusters" for some penalty of the grid: most draws of such data have an interval
