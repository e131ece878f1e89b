"""`coterie reproduce convex-clustering-scaling`: a path of convex clustering on half-moon points."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from sklearn.metrics import adjusted_rand_score

from coterie_deploy.studies.reproduce import half_moons as study
from coterie_deploy.studies.reproduce import reproduce
from coterie_deploy.studies.reproduce.study import Work

NAME = "convex-clustering-scaling"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "N_POINTS", 120)
    monkeypatch.setattr(study, "PENALTIES", (0.0, *np.geomspace(1.0, 3000.0, 12).tolist()))


def test_it_leaves_a_table_a_picture_and_the_numbers(tmp_path: Path, small: None) -> None:
    console = Console(file=io.StringIO(), width=100)
    rows = reproduce(NAME, seeds=2, output=tmp_path, console=console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert [text for text in ("13 penalties, seeds 0 to 1", "adjusted Rand index", "SSNAL 126 s") if text not in printed] == []
    assert len(rows) == 2 * 13
    assert max(row.gap for row in rows) <= 1e-6
    assert (tmp_path / f"{NAME}.png").read_bytes().startswith(b"\x89PNG")
    with (tmp_path / f"{NAME}.csv").open(newline="") as file:
        assert [int(line["clusters"]) for line in csv.DictReader(file)] == [row.clusters for row in rows]
    again = Console(file=io.StringIO(), width=100)
    assert reproduce(NAME, seeds=2, output=tmp_path, console=again) == rows
    assert again.file.getvalue() == printed, "CPU times too are those that were kept"  # type: ignore[attr-defined]


def test_the_index_is_that_of_scikit_learn() -> None:
    random = np.random.default_rng(0)
    for most in (2, 3, 40):
        one, other = random.integers(most, size=(2, 40))
        assert study.adjusted_rand(one, other) == pytest.approx(adjusted_rand_score(one, other), abs=1e-12)
        assert study.adjusted_rand(one, one) == 1.0
    assert study.adjusted_rand(np.zeros(4, int), np.zeros(4, int)) == 1.0


def test_the_points_are_two_half_circles_that_reach_into_each_other() -> None:
    points, moon = study.half_moons(100, 0.0, 0)
    assert np.bincount(moon).tolist() == [50, 50]
    for half, centre in enumerate(([0.0, 0.0], [1.0, 0.5])):
        np.testing.assert_allclose(np.linalg.norm(points[moon == half] - centre, axis=1), 1.0)
    assert points[moon == 1, 1].min() == pytest.approx(-0.5, abs=0.01)
    assert points[moon == 0, 1].min() == pytest.approx(0.0, abs=1e-9)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_path_of_551_penalties_has_a_gap_of_1e_6_everywhere_and_finds_both_moons(tmp_path: Path) -> None:
    rows = study.rows_of_seed(0, Work(tmp_path))
    assert len(rows) == 551
    assert max(row.gap for row in rows) <= 1e-6
    assert sum(row.steps for row in rows) < 6000
    clusters = [row.clusters for row in rows]
    assert clusters[0] == 1000
    assert clusters[-1] <= 3
    assert max(row.rand for row in rows) > 0.99
