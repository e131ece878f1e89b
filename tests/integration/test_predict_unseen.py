"""Predictions for users that a run has not seen: by a cluster's model, or by that of everyone."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import coterie
from coterie_deploy.cli import app as cli
from coterie_deploy.read.coefficients import Members
from coterie_deploy.read.models import StageModels, stage_models
from coterie_deploy.read.shared_models import of_cluster, of_everyone
from coterie_server.maths import hlm
from tests.unit.test_variance_components import CLUSTER_OF, rows

NEW = "year,grade\n0.5,2\n-1,1\n"


def predicted(capsys: Any, *arguments: str) -> list[dict[str, str]]:
    assert cli._run(["predict", *arguments]) == 0
    return list(csv.DictReader(io.StringIO(capsys.readouterr().out)))


def refused(capsys: Any, *arguments: str) -> str:
    assert cli._run(["predict", *arguments]) == 2
    return str(capsys.readouterr().err)


@pytest.fixture(scope="module")
def growth(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("growth")
    (folder / "new.csv").write_text(NEW)
    coterie.run("growth", overrides=["inference=true", "references=[global]"], output=folder / "run")
    return folder


def test_the_model_of_a_cluster_is_that_of_the_coefficients_in_the_units_of_the_data(growth: Path, capsys: Any) -> None:
    table = coterie.load_run(growth / "run").coefficients(cluster="s2020")
    slope, intercept = table[table.model == "cluster"].estimate
    found = predicted(capsys, str(growth / "run"), str(growth / "new.csv"), "--cluster", "s2020")
    np.testing.assert_allclose([float(row["prediction"]) for row in found], [intercept + 0.5 * slope, intercept - slope], rtol=1e-9)
    assert {row["model"] for row in found} == {"cluster s2020 (hlm_exact)"}
    assert [row["grade"] for row in found] == ["2", "1"]
    loaded = coterie.load_run(growth / "run")
    np.testing.assert_allclose(loaded.predict(None, [[0.5], [-1.0]], cluster="s2020"), [float(row["prediction"]) for row in found])


def test_the_model_of_everyone_is_the_common_one_of_the_method_or_the_global_stage(growth: Path, capsys: Any) -> None:
    for stage, options in (("hlm_exact", []), ("global", ["--stage", "global"])):
        table = coterie.load_run(growth / "run").coefficients(stage)
        slope, intercept = table[table.model == "everyone"].estimate
        found = predicted(capsys, str(growth / "run"), str(growth / "new.csv"), "--global", *options)
        np.testing.assert_allclose([float(row["prediction"]) for row in found], [intercept + 0.5 * slope, intercept - slope], rtol=1e-9)
        assert {row["model"] for row in found} == {f"everyone ({stage})"}
        python = coterie.load_run(growth / "run").predict(None, [[0.5], [-1.0]], stage if options else None, global_=True)
        np.testing.assert_allclose(python, [float(row["prediction"]) for row in found])


def test_a_users_model_is_named_and_an_unknown_user_hears_what_there_is(growth: Path, capsys: Any) -> None:
    arguments = (str(growth / "run"), str(growth / "new.csv"))
    assert predicted(capsys, *arguments, "--user", "c273059461")[0]["model"] == "user c273059461"
    sentence = refused(capsys, *arguments, "--user", "newcomer")
    assert "user 'newcomer' is not in the run" in sentence
    assert ", or for a user that the run has not seen --cluster CLUSTER or --global" in sentence


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([], "want one of --user USER, --cluster CLUSTER and --global"),
        (["--global", "--cluster", "s2020"], "want one of --user USER"),
        (["--cluster", "elsewhere"], "stage 'hlm_exact' has no cluster 'elsewhere', want one of s2020"),
        (["--cluster", "s2020", "--stage", "global"], "stage 'global' has no models of clusters: run the experiment with --set"),
    ],
)
def test_a_model_that_there_is_not_is_refused(growth: Path, capsys: Any, options: list[str], sentence: str) -> None:
    assert sentence in refused(capsys, str(growth / "run"), str(growth / "new.csv"), *options)
    if not options:
        with pytest.raises(coterie.ConfigError, match=r"\(user, cluster, global_\): whose model predicts"):
            coterie.load_run(growth / "run").predict(None, [[0.5]])


def test_the_models_follow_from_the_users_models_for_all_weights() -> None:
    """The same w_j and common model that the closed form finds from the rows."""
    features, targets = rows(0.7, 0.5)
    gamma, alpha = np.linspace(0.3, 2.0, len(features)), np.array([0.2, 0.5, 1.0, 0.7, 0.1])
    lam = hlm.lambda_of(alpha, np.bincount(CLUSTER_OF, gamma))
    wanted = hlm.known_clusters(hlm.quadratics(features, targets), CLUSTER_OF, gamma, lam)
    names, clusters = [f"u{i}" for i in range(len(features))], [f"c{j}" for j in CLUSTER_OF]
    weights = {"gamma": dict(zip(names, gamma.tolist(), strict=True)), "alpha": {f"c{j}": share for j, share in enumerate(alpha.tolist())}}
    content = {"data": {"source": "npz", "path": "x.npz", "cluster": "c"}, "problem": {"loss": "least_squares"}}
    experiment = coterie.load_experiment({"name": "s", **content, "method": {"name": "hlm_exact", **weights}})
    stage = StageModels("hlm_exact", tuple(names), wanted.theta)
    members = Members(names, clusters)
    np.testing.assert_allclose(of_everyone(experiment, members, ["hlm_exact"], lambda _: stage).x, wanted.wbar, rtol=1e-9)
    for j in range(5):
        np.testing.assert_allclose(of_cluster(experiment, members, ["hlm_exact"], lambda _: stage, f"c{j}").x, wanted.w[j], rtol=1e-9)


def test_found_clusters_and_probabilities(tmp_path: Path, capsys: Any) -> None:
    method = {"name": "pdmm", "penalty": 0.2, "refit": True, "start": "zero"}
    data = {"source": "ellipses", "users_per_cluster": 3}
    small = {"name": "s", "data": data, "problem": {"loss": "logistic", "l2": 0.001}, "method": method, "stop": {"rounds": 200}}
    result = coterie.run(small, output=tmp_path / "run")
    left = stage_models(tmp_path / "run", "refit")
    assert left.labels is not None
    assert left.models is not None
    (tmp_path / "new.csv").write_text("x1,x2\n0.5,-1\n3,2\n")
    user = result.users[-1]
    name = str(left.labels[-1])
    arguments = (str(tmp_path / "run"), str(tmp_path / "new.csv"), "--stage", "refit")
    chances = []
    for options in (["--user", user], ["--cluster", name]):
        found = predicted(capsys, *arguments, *options)
        x = left.models[-1]
        wanted = [1 / (1 + np.exp(-(np.array(row) @ x[:2] - x[2]))) for row in ([0.5, -1.0], [3.0, 2.0])]
        np.testing.assert_allclose([float(row["probability"]) for row in found], wanted, rtol=1e-9)
        assert [row["prediction"] for row in found] == ["1" if chance >= 0.5 else "-1" for chance in wanted]
        chances.append([row["probability"] for row in found])
    assert chances[0] == chances[1]
    if left.labels.any():
        assert "has no model for everyone: run the experiment with --set 'references=[global]'" in refused(capsys, *arguments, "--global")
