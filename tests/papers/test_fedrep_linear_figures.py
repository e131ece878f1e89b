"""Figures 1, 3 and 4 of Collins, Hassani, Mokhtari and Shakkottai (2021), made again by federated runs."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from coterie.experiment.data import RepresentationData
from coterie.experiment.representation import true_head, true_representation
from coterie_deploy.studies.reproduce import fedrep_linear as study
from coterie_deploy.studies.reproduce import names, reproduce
from coterie_deploy.studies.reproduce.study import Work

PNG = b"\x89PNG"
# Medians over other draws of the same data, found independently: the distance at the start, and rounds to .1, .01 and .001, for eta = 1.
FIGURE3: dict[tuple[study.Algorithm, int], tuple[float, ...]] = {
    ("fedrep", 100): (0.44, 4, 10, 15),
    ("fedrep", 500): (0.21, 1, 4, 7),
    ("fedrep", 1000): (0.14, 1, 4, 6),
    ("fedrep", 5000): (0.06, 0, 3, 5),
}
TO_A_HUNDREDTH: dict[study.Algorithm, dict[int, int]] = {
    "gd_gd": {100: 79, 500: 54, 1000: 46},
    "10gd_gd": {100: 29, 500: 14, 1000: 10},
}
FLOORS = {100: 4.2e-4, 500: 1.8e-4, 1000: 1.3e-4, 5000: 5.5e-5}
# Median errors by m_new.
FIGURE4: dict[study.Learner, dict[int, float]] = {
    "fedrep": {1: 0.94, 2: 3.3e-6, 3: 1.2e-6, 5: 5.4e-7, 10: 3.0e-7},
    "local": {1: 1.95, 2: 1.86, 3: 1.74, 5: 1.52, 10: 1.0, 20: 4.5e-5},
    # "About 2". With m_new = k rows a head fits them all, whatever the representation, and of a wrong one the error is larger.
    "fedavg": {1: 2, 3: 2, 5: 2, 10: 2, 20: 2},
}


def screen() -> Console:
    return Console(file=io.StringIO(), width=120)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "ROUNDS", 20)
    monkeypatch.setattr(study, "N_USERS", 30)
    monkeypatch.setattr(study, "N_NEW", 8)
    monkeypatch.setattr(study, "ROUNDS_3", {"fedrep": 12, "10gd_gd": 12, "gd_gd": 12})
    monkeypatch.setattr(study, "SIZES", (20, 40))
    monkeypatch.setattr(study, "ROWS", (3, 25))
    monkeypatch.setattr(study, "NEW_ROWS", (2, 5))
    others = {(algorithm, n): (".5", "1", "2", "3", "1e-3") for algorithm in study.ALGORITHMS for n in (20, 40)}
    monkeypatch.setattr(study, "OTHER_DRAWS_3", others)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("name", "texts", "n_rows"),
    [
        ("fedrep-figure1", ("FedRep", "FedAvg", "local models", "25 %"), 2 * 3 * 30),
        ("fedrep-figure3", ("GD-GD", "10GD-GD", "to 0.01", "other draws", "floor"), 2 * 3 * 13),
        ("fedrep-figure4", ("m_new", "about 2", "3.3e-6"), 2 * 3 * 8),
    ],
)
def test_a_figure_leaves_a_table_a_plot_and_the_numbers_and_is_not_run_twice(
    name: str, texts: tuple[str, ...], n_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert name in names()
    console = screen()
    first = reproduce(name, seeds=1, output=tmp_path / "new", console=console)
    assert [text for text in (*texts, "seed 0") if text not in printed(console)] == []
    assert (tmp_path / "new" / f"{name}.png").read_bytes().startswith(PNG)
    with (tmp_path / "new" / f"{name}.csv").open(newline="") as file:
        assert len(list(csv.reader(file))) == n_rows + 1

    def no_run(*arguments: Any, **options: Any) -> None:
        raise AssertionError("the second time runs nothing")

    for runner in ("run", "launch"):
        monkeypatch.setattr(study, runner, no_run)
    assert reproduce(name, seeds=1, output=tmp_path / "new", console=screen()) == first
    monkeypatch.setattr(study, "PARTICIPATION", 0.2)
    with pytest.raises(AssertionError, match="runs nothing"):
        reproduce(name, seeds=1, output=tmp_path / "new", console=screen())


def test_users_judge_themselves_by_the_distance_to_the_truth() -> None:
    first, second = study.users({"first": 7, "count": 2, "rows": 3}, seed=4)
    assert (first.name, second.name, len(first.target)) == ("u7", "u8", 3)
    data = RepresentationData(source="representation", users=9, d=study.D, k=study.K, rows_per_user=3)
    truth = true_representation(data, 4)
    assert truth is not None
    model = np.linspace(-1, 1, study.D)
    error = np.square(first.test_features @ model - first.test_target).mean()
    assert error == pytest.approx(np.square(model - truth @ true_head(data, 4, "u7")).sum())
    assert np.abs(first.features @ truth @ true_head(data, 4, "u7") - first.target).max() < 6e-3  # these are the rows of the same truth


def test_rounds_are_counted_from_the_start_and_medians_are_taken_over_runs_that_may_not_arrive() -> None:
    assert study.rounds_to([0.5, 0.2, 0.1, 0.3], 0.1) == 2
    assert study.rounds_to([0.05], 0.1) == 0
    assert study.rounds_to([0.5, 0.2], 0.1) == np.inf
    trajectories = [[0.4, 0.09, 0.009], [0.2, 0.15, 0.05], [0.3, 0.2, 0.08]]
    runs = [study.Distances(seed, "fedrep", 10, distances) for seed, distances in enumerate(trajectories)]
    start, *rounds, floor = study.median_line(runs)
    assert (start, rounds) == (0.3, [2, np.inf, np.inf])
    assert floor == pytest.approx(np.median([np.mean(distances) for distances in trajectories]))


def median_of(found: list[study.Errors], learner: study.Learner, rows: int) -> float:
    return float(np.median(study.errors_at(found, learner, rows)))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_figure_3_is_within_2_rounds_or_15_percent_of_other_draws(tmp_path: Path) -> None:
    found = [run for seed in range(12) for run in study.figure3(seed, Work(tmp_path))]

    def medians(algorithm: study.Algorithm, n_users: int) -> tuple[float, ...]:
        return study.median_line([run for run in found if (run.algorithm, run.n_users) == (algorithm, n_users)])

    for (algorithm, n_users), (start, *rounds) in FIGURE3.items():
        measured = medians(algorithm, n_users)
        assert measured[0] == pytest.approx(start, rel=0.15)
        assert measured[-1] == pytest.approx(FLOORS[n_users], rel=0.25)
        for number, wanted in zip(measured[1:-1], rounds, strict=True):
            assert abs(number - wanted) <= max(2, 0.15 * wanted), (n_users, measured)
    for algorithm, by_size in TO_A_HUNDREDTH.items():
        for n_users, wanted in by_size.items():
            measured = medians(algorithm, n_users)
            assert abs(measured[2] - wanted) <= max(2, 0.15 * wanted), (algorithm, n_users, measured)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_figure_4_is_within_a_factor_of_2_of_other_draws(tmp_path: Path) -> None:
    """ "The representation learned by FedRep allows an accurate model to be found for the new client as long as m_new >= k"."""
    found = [run for seed in range(8) for run in study.figure4(seed, Work(tmp_path))]
    for learner, by_rows in FIGURE4.items():
        for rows, wanted in by_rows.items():
            assert wanted / 2 <= median_of(found, learner, rows) <= 2 * wanted, (learner, rows)
    assert median_of(found, "fedavg", 2) > 2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_figure_1_local_models_suffer_where_rows_are_few_and_one_model_for_all_everywhere(tmp_path: Path) -> None:
    """ "FedRep exploits a common representation of the clients to achieve small error in all cases"; not in that of m = k rows."""
    found = [run for seed in range(4) for run in study.figure1(seed, Work(tmp_path))]
    for rows in study.ROWS:
        fedrep, fedavg, local = (median_of(found, learner, rows) for learner in ("fedrep", "fedavg", "local"))
        assert 1.5 < fedavg < 2.5
        assert (local > 0.5) == (rows < study.D)
        assert (fedrep > 0.5) == (rows == study.K)
        if rows > study.K:
            assert fedrep < local / 4
