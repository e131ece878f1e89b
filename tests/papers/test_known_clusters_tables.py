"""The stand-in for tables 2 and 3 and figure 2 of Lyu, Hanzely and Kolar (2022), and known clusters on the other real data."""

from __future__ import annotations

import csv
import io
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from coterie.errors import RunError
from coterie.experiment.problem import ProblemConfig
from coterie_client.data import load_users
from coterie_client.problems import build_problem
from coterie_deploy.engines.api import run
from coterie_deploy.read import shipped
from coterie_deploy.studies.reproduce import known_clusters_exams, names, reproduce
from coterie_deploy.studies.reproduce.known_clusters_exams import Scores
from coterie_deploy.studies.reproduce.study import Work

TABLE2 = "known-clusters-table2"
# Mean held-out losses with other held-out rows, found independently.
EXAMS = {"known_clusters": 0.4529, "single_cluster": 0.4529, "single_model": 0.4756, "local": 1.090}


def screen():
    return Console(file=io.StringIO(), width=120)


def scores(estimator, losses, accuracies, seed=0):
    return Scores(seed, estimator, [f"s{place}" for place in range(len(losses))], losses, accuracies)


# ---- the data and the experiments


@pytest.fixture(scope="module")
def schools():
    return list(known_clusters_exams.schools({}, 0))


def test_the_schools_of_the_local_models_have_the_rows_of_the_shipped_experiment(schools):
    shipped_users = load_users(shipped.load("exams").data, 0, None)
    assert [user.name for user in schools] == [user.name for user in shipped_users]
    for ours, theirs in zip(schools, shipped_users, strict=True):
        assert ours.target.tobytes() == theirs.target.tobytes()
        assert ours.test_target.tobytes() == theirs.test_target.tobytes()
        assert ours.features.shape == (len(theirs.features), 4)
        assert set(ours.test_features[:, -1]) == {-1.0}
    rows = np.concatenate([user.features for user in schools])
    np.testing.assert_allclose(rows.mean(axis=0), [0, 0, 0, -1], atol=1e-12)
    np.testing.assert_allclose(rows.std(axis=0), [1, 1, 1, 0], atol=1e-12)


def test_schools_with_one_label_have_a_local_model_only_when_the_intercept_is_held(schools):
    one_label = [user for user in schools if len(set(user.target)) == 1]
    assert len(one_label) >= 24
    features, targets = [user.features for user in one_label], [user.target for user in one_label]
    held = ProblemConfig(loss="logistic", l2=2e-3, reduction="sum", intercept=False)
    assert held == known_clusters_exams.local_experiment(0).problem
    assert build_problem(held, [user.name for user in one_label], features, targets).coercive() == [None] * len(one_label)
    free = ProblemConfig(loss="logistic", l2=2e-3, reduction="sum", intercept=True)
    without = [rows[:, :-1] for rows in features]
    assert None not in build_problem(free, [user.name for user in one_label], without, targets).coercive()


def test_the_experiments_differ_in_what_they_are_about_only():
    known, single = known_clusters_exams.known_clusters_experiment(3), known_clusters_exams.single_cluster_experiment(3)
    assert (known.seed, known.references, known.method.gamma, known.method.lam) == (3, ("global",), 5.0, 100.0)
    assert (single.method.gamma, single.method.lam, single.method.alpha) == (5.0, None, 1.0)
    assert single.data == known.data == shipped.load("exams").data
    assert single.problem == known.problem


# ---- what is said of them


def test_the_performance_ratio_is_the_share_of_users_no_less_accurate_than_by_known_clusters():
    rows = [
        scores("known_clusters", [1.0] * 4, [0.5, 0.5, 0.5, 1.0]),
        scores("local", [1.0] * 4, [0.4, 0.5, 0.6, 0.9]),
        scores("known_clusters", [1.0] * 4, [0.5] * 4, seed=1),
        scores("local", [1.0] * 4, [0.5] * 4, seed=1),
    ]
    assert known_clusters_exams.performance_ratio(rows, "local") == (2 / 4 + 4 / 4) / 2
    assert known_clusters_exams.performance_ratio(rows, "known_clusters") == 1.0


def test_a_loss_counts_100_at_most_and_statistics_are_means_over_the_seeds():
    rows = [scores("local", [1.0, 2.0, 3.0, 500.0], [0.0] * 4), scores("local", [0.0] * 4, [0.0] * 4, seed=1)]
    found = known_clusters_exams.summary(known_clusters_exams.losses_of(rows, "local"))
    assert (found.mean, found.maximum) == (106 / 4 / 2, 50.0)
    assert found.quartiles == (1.75 / 2, 2.5 / 2, 27.25 / 2)
    assert found.error == pytest.approx(26.5 / np.sqrt(2))


@pytest.fixture
def zero_models(monkeypatch, schools):
    """Runs that leave all models at 0, for 10 schools."""
    outcome = SimpleNamespace(models=np.zeros((10, 4)))
    monkeypatch.setattr(known_clusters_exams, "schools", lambda *_: schools[:10])
    made = []

    def fake_run(experiment):
        made.append(experiment)
        return SimpleNamespace(outcomes=dict.fromkeys(("local", "global", "async_l2gd"), outcome))

    monkeypatch.setattr(known_clusters_exams, "run", fake_run)
    return made


def test_the_table_is_printed_with_its_plot_and_numbers_beside_the_papers(tmp_path, zero_models, monkeypatch):
    console = screen()
    rows = reproduce(TABLE2, seeds=2, output=tmp_path / "new", console=console)
    assert TABLE2 in names()
    assert len(zero_models) == 2 * 3
    np.testing.assert_allclose([row.losses for row in rows], np.log(2), rtol=1e-12)  # judged as a model that knows nothing
    printed = console.file.getvalue()
    wanted = (
        "0.6931",
        "10 schools, seeds 0 to 1",
        "0.215",
        "2.668",
        "0.972",
        "0.4529",
        "1.090",
        "other data",
        "not public",
        "(0 were above)",
    )
    assert [text for text in wanted if text not in printed] == []
    assert (tmp_path / "new" / f"{TABLE2}.png").read_bytes().startswith(b"\x89PNG")
    with (tmp_path / "new" / f"{TABLE2}.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [float(line["loss"]) for line in lines] == [loss for row in rows for loss in row.losses]
    monkeypatch.setattr(known_clusters_exams, "run", None)  # the numbers are there
    assert reproduce(TABLE2, seeds=2, output=tmp_path / "new", console=screen()) == rows


def test_a_file_that_cannot_be_written_is_told(tmp_path, zero_models):
    (tmp_path / "taken").write_text("")
    with pytest.raises(RunError, match=r"cannot write .*known-clusters-exams-seed0\.json"):
        known_clusters_exams.rows_of(0, Work(tmp_path / "taken"))


# ---- real runs


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_study_finds_what_the_schools_say_of_their_models(tmp_path, monkeypatch):
    results = []
    monkeypatch.setattr(known_clusters_exams, "run", lambda experiment: results.append(run(experiment)) or results[-1])
    rows = {row.estimator: row for row in known_clusters_exams.rows_of(0, Work(tmp_path))}
    known, single, local = (result.metrics for result in results)
    told = {
        "known_clusters": known["async_l2gd"],
        "single_model": known["global"],
        "single_cluster": single["async_l2gd"],
        "local": local["local"],
    }
    for estimator, figures in told.items():
        assert np.mean(rows[estimator].losses) == pytest.approx(figures["heldout_loss"], rel=1e-10), estimator
        assert np.mean(rows[estimator].accuracies) == pytest.approx(figures["heldout_metric"], rel=1e-10), estimator
        assert np.mean(rows[estimator].losses) == pytest.approx(EXAMS[estimator], rel=0.1), estimator
    assert told["known_clusters"]["heldout_loss_sd"] == pytest.approx(np.std(rows["known_clusters"].losses), rel=1e-10)
    assert np.mean(rows["known_clusters"].losses) < 0.96 * np.mean(rows["single_model"].losses) < 0.5 * np.mean(rows["local"].losses)
    assert np.mean(rows["known_clusters"].losses) == pytest.approx(np.mean(rows["single_cluster"].losses), abs=0.002)  # a tie


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("name", "stage"), [("growth", "hlm_exact"), ("schools", "async_l2gd")])
def test_known_clusters_beat_single_model_and_local_models_on_held_out_rows(name, stage, seed):
    figures = run(name, overrides=[f"seed={seed}"]).metrics
    for key in ("heldout_loss", "heldout_metric"):
        known, local, single = (figures[each][key] for each in (stage, "local", "global"))
        assert known < 0.99 * min(local, single), key
