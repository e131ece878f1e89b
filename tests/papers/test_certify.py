"""Theorems 1 and 2 of Armacki, Bajovic, Jakovetic and Kar (2022) and the exact recovery interval, found by a federation."""

from __future__ import annotations

import asyncio
import functools

import numpy as np
import pytest
from scipy.spatial.distance import pdist

from coterie.errors import ConfigError
from coterie.experiment.config import experiment_from
from coterie.experiment.problem import ProblemConfig
from coterie.families.consensus import Curvatures, Slopes
from coterie.methods.certify import Config
from coterie.wire.precision import Precision
from coterie_deploy.engines.api import run
from coterie_deploy.studies.certify import Proved, certification, certify, check_belongs, found_labels, proved_in
from coterie_server.interface.half import Facts, Members, Outcome, Replies, Setting
from coterie_server.maths.clusters import same_partition
from coterie_server.methods.certify import set_up
from tests.papers.fixture_data import experiment, fixture

LABELS = np.array(fixture(60)["label"])
ELLIPSES = {"source": "ellipses", "users_per_cluster": 4, "test_per_class": 20}


@functools.cache
def certified(at=None, hosts=1):
    return run(experiment(60, {"name": "certify", "at": at}), hosts=hosts)


def test_the_interval_of_the_fixture():
    figures = certified().metrics["certify"]
    assert figures["lower_end"] == pytest.approx(0.0709, rel=2e-3)
    assert figures["upper_end"] == pytest.approx(0.1041, rel=2e-3)
    assert figures["upper_end"] <= figures["merging_penalty"]
    assert figures["at"] == pytest.approx((figures["lower_end"] + figures["upper_end"]) / 2)
    assert figures["exact_holds"] == 1
    assert figures["clusters"] == 3


def test_inside_the_interval_the_group_models_are_the_solution_of_3():
    entry = next(entry for entry in fixture(60)["son"] if entry["LAM"] == 0.09)
    result = certified(at=0.09)
    x = result.outcomes["certify"].models
    assert result.metrics["certify"]["exact_holds"] == 1
    assert result.metrics["certify"]["sum_of_losses"] + 0.09 * pdist(x).sum() == pytest.approx(entry["Phi"], rel=1e-6)
    np.testing.assert_allclose(x, entry["x"], atol=1e-5)


@pytest.mark.parametrize("entry", fixture(60)["son"], ids=lambda entry: str(entry["LAM"]))
def test_the_exact_verdict_is_that_of_the_solution(entry):
    is_exact = same_partition(np.array(entry["partition"]), LABELS)
    assert certified(at=entry["LAM"]).metrics["certify"]["exact_holds"] == is_exact


def test_theorem_1_is_sufficient_and_loose_and_theorem_2_certifies_nothing():
    """With 10 rows for each user (6) asks for more than the penalty wherever the clusters stay apart; (13) is below it by (7)."""
    for at in (None, 0.075, 0.09, 0.1):
        figures = certified(at=at).metrics["certify"]
        assert figures["theorem1_holds"] == 0
        assert figures["theorem1"] > figures["exact"]
        assert figures["theorem2"] < figures["at"]
        assert figures["theorem2_holds"] == 0


class PointUsers:
    """A federation of users with f_i(x) = |x - a_i|^2 / 2."""

    def __init__(self, points):
        self.points = np.array(points)

    async def exchange(self, *messages, to=None, wanted=()):
        (asked,) = messages
        away = asked.x - self.points
        n, d = away.shape
        triangle = np.tile(np.eye(d)[np.triu_indices(d)], (n, 1))
        return Replies({Slopes: Slopes((away**2).sum(axis=1) / 2, away), Curvatures: Curvatures(triangle)}, None)


def test_for_two_clusters_of_one_size_theorem_2_asks_for_the_penalty_itself_and_rounding_does_not_decide():
    """|grad g_1 - grad g_2| = 2 (LAM n) by (7), so the right side of (13) is LAM: "lambda < lambda" holds for no penalty."""
    strict = []
    for seed in range(12):
        random = np.random.default_rng(seed)
        points = np.array([[-3.0, 0], [-3, 0], [3, 0], [3, 0]]) + 0.1 * random.normal(size=(4, 2))
        config = Config(at=float(random.uniform(0.2, 1.2)))
        method = set_up(config, setting(("a", "a", "b", "b")))
        _, figures = asyncio.run(method.round(asyncio.run(method.init(None)), PointUsers(points), 1))
        assert figures["exact_holds"] == 1
        assert figures["theorem2"] == pytest.approx(config.at, rel=1e-7)
        assert figures["theorem2_holds"] == 0
        strict.append(config.at < figures["theorem2"])
    assert any(strict), "without a margin rounding would have certified some"


def test_three_hosts_give_the_bits_of_one():
    one, three = certified(), certified(hosts=3)
    assert one.metrics["certify"] == three.metrics["certify"]
    assert one.outcomes["certify"].models.tobytes() == three.outcomes["certify"].models.tobytes()


def test_only_group_models_gradients_and_hessians_travel():
    result = certified()
    lines = {(line["step"], line["direction"]): line for line in result.ledger() if line["stage"] == "certify"}
    exchanges = result.metrics["certify"]["exchanges"]
    assert {step for step, _ in lines} == {"control", "describe", "query", "gradient", "hessian", "evaluate"}
    for key in (("query", "down"), ("gradient", "up")):
        assert lines[key]["vectors"] == lines[key]["expected"] == 60 * exchanges
    assert lines["hessian", "up"]["scalars"] == 60 * 6 * exchanges


def test_a_single_cluster_is_exact_from_the_penalty_on_at_which_3_gives_the_global_model():
    labels = {f"u{place}": "all" for place in range(60)}
    figures = run(experiment(60, {"name": "certify", "labels": labels})).metrics["certify"]
    assert 0.1 < figures["lower_end"] < 0.15  # 3 clusters and 1 in the fixture
    assert figures["upper_end"] == figures["merging_penalty"] == np.inf
    assert figures["at"] == figures["lower_end"]
    assert figures["exact_holds"] == 1


def test_a_wrong_partition_has_no_interval():
    labels = {f"u{place}": str(place % 3) for place in range(60)}
    figures = run(experiment(60, {"name": "certify", "labels": labels})).metrics["certify"]
    assert (figures["lower_end"], figures["upper_end"], figures["exact_holds"]) == (np.inf, 0.0, 0.0)


# ---- partitions


def setting(clusters=("a", "a", "b"), labels=None):
    names = tuple(f"u{place}" for place in range(len(clusters)))
    facts = Facts(np.full(len(clusters), 5), 2)
    start = Outcome(np.zeros((3, 2)), labels) if labels is not None else None
    return Setting(0, "certify", Members(names, tuple(clusters)), Precision.of("float64"), facts, start)


def test_labels_are_by_user_name_and_numbered_by_first_member():
    method = set_up(Config(labels={"u2": "x", "u0": "y", "u1": "x"}), setting())
    assert method.labels.tolist() == [0, 1, 1]


def test_known_and_found_partitions():
    assert set_up(Config(), setting()).labels.tolist() == [0, 0, 1]
    assert set_up(Config(partition="found"), setting(labels=np.array([0, 1, 0]))).labels.tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("config", "clusters", "sentence"),
    [
        ({"labels": {"u0": "x", "u1": "x"}}, "aab", "user 'u2' has no label"),
        ({"labels": {"u0": "x", "u1": "x", "u2": "x", "v": "x"}}, "aab", "names user 'v', who is not a member"),
        ({"partition": "found"}, "aab", "needs a stage before it that finds clusters"),
        ({}, ("a", "", "b"), "user 'u1' has no known cluster"),
    ],
)
def test_a_partition_that_is_not_one_of_the_members_is_refused(config, clusters, sentence):
    with pytest.raises(ConfigError, match=sentence):
        set_up(Config(**config), setting(clusters))


def test_labels_and_found_together_are_refused():
    content = {"name": "x", "data": ELLIPSES, "problem": {"loss": "logistic"}}
    with pytest.raises(ConfigError, match="partition is found and labels are given"):
        experiment_from({**content, "method": {"name": "certify", "partition": "found", "labels": {"u0": "a"}}})


# ---- the command's function


def test_the_table_gives_each_penalty_in_three_conventions(capsys):
    certify(experiment(6, {"name": "certify"}), hosts=2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("3 clusters of 6 users: exact for LAM in [")
    assert [word for word in ("LAM", "lambda_eq3", "lambda_eq14") if word in "\n".join(lines)] == ["LAM", "lambda_eq3", "lambda_eq14"]
    (row,) = [line.split() for line in lines if line.startswith("lower end")]
    lam, eq3, eq14 = map(float, row[2:])
    assert (eq3, eq14) == pytest.approx((lam / 12, lam / 2), rel=1e-3)
    assert f"[{lam:g}, " in lines[0]
    (needed,) = [float(line.split()[3]) for line in lines if line.startswith("  needed there: exact")]
    assert needed != pytest.approx(lam, rel=0.01)
    assert "so it is no end of the interval" in " ".join(" ".join(lines).split())


def test_in_forty_columns_the_table_keeps_its_titles_whole_and_says_what_it_left_out(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    certify(experiment(6, {"name": "certify"}), hosts=2)
    lines = capsys.readouterr().out.splitlines()
    (row,) = [line.split() for line in lines if line.startswith("lower end")]
    assert len(row) == 3  # two words and LAM
    assert "without room in 40 columns: lambda_eq3, lambda_eq14" in " ".join(" ".join(lines).split())


def test_the_clusters_that_a_run_has_found_are_certified(tmp_path, capsys):
    solved = experiment(60, {"name": "pdmm", "penalty": 0.09, "refit": True}, stop={"residual": 1e-6}, inference=True)
    run(solved, output=tmp_path / "run")
    labels = found_labels(tmp_path / "run")
    assert same_partition(np.array([int(labels[f"u{place}"]) for place in range(60)]), LABELS)
    chosen = certification(solved, tmp_path / "run")
    assert chosen.method == Config(labels=labels, at=0.09)
    certify(solved, partition=tmp_path / "run")
    assert "3 clusters of 60 users: exact for LAM in [0.07" in capsys.readouterr().out


def test_a_run_by_newton_steps_is_certified_by_its_duality_gap_and_its_clusters_by_the_conditions(tmp_path, capsys):
    solved = experiment(60, {"name": "son_newton", "penalty": 0.09, "refit": True})
    outcome = run(solved, output=tmp_path / "run").outcomes["son_newton"]
    (proved,) = proved_in(tmp_path / "run")
    assert proved == Proved("son_newton", 3, outcome.figures["objective"], outcome.figures["duality_gap"])
    assert 0 <= proved.gap < 1e-10
    assert certification(solved, tmp_path / "run").method.at == 0.09
    certify(solved, partition=tmp_path / "run")
    printed = " ".join(capsys.readouterr().out.split())
    assert f"son_newton 3 58.72 {proved.gap:.1e}" in printed
    assert "3 clusters of 60 users: exact for LAM in [0.07" in printed


def test_a_run_of_another_experiment_is_refused_by_both_names(tmp_path):
    solved = experiment(6, {"name": "son_newton", "penalty": 0.5})
    run(solved, output=tmp_path / "run")
    check_belongs(tmp_path / "run", solved.model_copy(update={"name": "renamed"}))
    for other, part in (
        ({"name": "other", "seed": 7}, "seed"),
        ({"name": "other", "problem": ProblemConfig(loss="logistic", l2=0.1)}, "problem"),
    ):
        with pytest.raises(ConfigError, match=rf"the run of '{solved.name}' in .* has another {part} than experiment 'other'"):
            certify(solved.model_copy(update=other), partition=tmp_path / "run")


def test_on_a_graph_the_gap_is_the_whole_certificate_and_without_one_there_is_none(tmp_path, capsys):
    method = {"name": "son_newton", "path": [0.5, 0.2], "graph": {"neighbours": 3}}
    solved = experiment(60, method)
    outcomes = run(solved, output=tmp_path / "run").outcomes
    certify(solved, partition=tmp_path / "run")
    printed = capsys.readouterr().out
    for lam in (0.5, 0.2):
        assert f"{outcomes[f'son_newton-{lam}'].figures['duality_gap']:.1e}" in printed
    assert "exact for LAM" not in printed
    with pytest.raises(ConfigError, match=r"method.graph is not complete, but the conditions for clusters are on all pairs"):
        certify(solved)
    unproved = experiment(60, {"name": "pdmm", "penalty": 0.5, "graph": {"neighbours": 3}}, stop={"rounds": 5})
    run(unproved, output=tmp_path / "pdmm")
    assert proved_in(tmp_path / "pdmm") == []
    with pytest.raises(ConfigError, match=r"a run of son_newton keeps duality gaps instead, which --partition RUN prints"):
        certify(unproved, partition=tmp_path / "pdmm")


def test_the_penalty_is_taken_in_any_convention():
    assert certification(experiment(60, {"name": "pdmm", "lambda_eq3": 0.00075})).method.at == pytest.approx(0.09)
    assert certification(experiment(60, {"name": "pdmm", "path": [0.1, 0.05]})).method.at is None
    assert certification(experiment(60, {"name": "son_newton", "path": [0.1, 0.05]})).method.at is None
    assert certification(experiment(60, {"name": "son_newton", "path": [0.1]})).method.at == 0.1
    assert certification(experiment(60, {"name": "local"})).method == Config()


def test_a_run_without_clusters_or_without_an_end_cannot_be_certified(tmp_path):
    run(experiment(6, {"name": "local"}), output=tmp_path / "local")
    with pytest.raises(ConfigError, match="has no clusters"):
        found_labels(tmp_path / "local")
    with pytest.raises(ConfigError, match="is not a run folder"):
        found_labels(tmp_path)
