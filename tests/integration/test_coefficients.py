"""Coefficients and standard errors against statsmodels, which sees all rows, while the coordinator has sums alone."""

from __future__ import annotations

import csv
import io
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from statsmodels.regression.mixed_linear_model import MixedLM, VCSpec

import coterie
from coterie.errors import ConfigError
from coterie_deploy.cli import app as cli
from coterie_deploy.read.coefficients import Asked, Members, cluster_names

FILES = Path(coterie.__file__).parents[2] / "client" / "coterie_client" / "data" / "files"
HSB = pd.read_csv(FILES / "hsb82.csv.gz")
GROWTH = pd.read_csv(FILES / "egsingle.csv.gz")
UNPENALISED = ["inference=true", "problem.l2=0", "problem.reduction=sum", "data.test_fraction=0"]
ON_HSB = [*UNPENALISED, "method={name: local}", "references=[local,global,oracle]", "data.feature_columns=[ses]"]


@pytest.fixture(scope="module")
def hsb() -> Any:
    """Schools on standardised features and targets: the table is in natural units all the same."""
    return coterie.run("hsb", overrides=[*ON_HSB, "data.standardize_target=true"])


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The output of a command."""
    assert cli._run(["coefficients", *arguments]) == 0
    return capsys.readouterr().out


def agrees(table: pd.DataFrame, fitted: Any, rtol: float = 1e-7) -> None:
    """`table` has the features first and the intercept last, statsmodels the constant first."""
    order = [*range(1, len(table)), 0]
    low, high = np.asarray(fitted.conf_int())[order].T
    for column, wanted in (
        ("estimate", np.asarray(fitted.params)[order]),
        ("standard_error", np.asarray(fitted.bse)[order]),
        ("low", low),
        ("high", high),
    ):
        np.testing.assert_allclose(table[column], wanted, rtol=rtol)
    assert set(table.n_rows) == {int(fitted.nobs)}


@pytest.mark.parametrize("errors", ["classical", "robust"])
def test_a_schools_own_model_is_the_least_squares_fit_to_its_rows(hsb: Any, errors: str) -> None:
    table = hsb.coefficients("local", errors=errors)
    for school in ("s1224", "s9586"):
        rows = HSB[HSB.school == school]
        fitted = sm.OLS(rows.mAch, sm.add_constant(rows[["ses"]])).fit(cov_type="nonrobust" if errors == "classical" else "HC0")
        agrees(table[table.name == school], fitted)
    assert len(table) == 2 * HSB.school.nunique()
    assert list(table.coefficient[:2]) == ["ses", "(intercept)"]


@pytest.mark.parametrize("errors", ["classical", "robust"])
def test_the_global_model_is_the_pooled_fit_and_the_oracle_that_of_a_sector(hsb: Any, errors: str) -> None:
    kind = "nonrobust" if errors == "classical" else "HC0"
    everyone = hsb.coefficients("global", errors=errors)
    agrees(everyone, sm.OLS(HSB.mAch, sm.add_constant(HSB[["ses"]])).fit(cov_type=kind))
    assert set(everyone.model) == {"everyone"}
    catholic = HSB[HSB.sector == "Catholic"]
    fitted = sm.OLS(catholic.mAch, sm.add_constant(catholic[["ses"]])).fit(cov_type=kind)
    agrees(hsb.coefficients("oracle", cluster="Catholic", errors=errors), fitted)
    agrees(hsb.coefficients("oracle", users=catholic.school.iloc[0], errors=errors), fitted)


def test_the_level_is_that_of_the_intervals(hsb: Any) -> None:
    fitted = sm.OLS(HSB.mAch, sm.add_constant(HSB[["ses"]])).fit()
    table = hsb.coefficients("global", level=0.5)
    np.testing.assert_allclose(table[["low", "high"]], np.asarray(fitted.conf_int(0.5))[[1, 0]], rtol=1e-7)


def test_unequal_weights_of_the_rows_are_those_of_weighted_least_squares() -> None:
    """With reduction mean every user has the weight 1, so a row of a small school counts more."""
    result = coterie.run("hsb", overrides=[*ON_HSB, "problem.reduction=mean", "method={name: global}", "references=[global]"])
    sizes = HSB.groupby("school").school.transform("size")
    fitted = sm.WLS(HSB.mAch, sm.add_constant(HSB[["ses"]]), weights=1 / sizes).fit(cov_type="HC0")
    agrees(result.coefficients(errors="robust"), fitted)


def table_of(loss: str, folder: Path) -> pd.DataFrame:
    """A small table of three users, with a common model."""
    random = np.random.default_rng(8)
    frame = pd.DataFrame({"user": np.repeat(["a", "b", "c"], [40, 30, 50]), "x": 3 + 2 * random.normal(size=120)})
    frame["z"] = random.normal(size=120) / 10
    score = 0.8 * (frame.x - 3) - 4 * frame.z + 0.3
    draws = random.uniform(size=120)
    frame["y"] = np.where(draws < 1 / (1 + np.exp(-score)), 1, -1) if loss == "logistic" else random.poisson(np.exp(score.clip(-2, 2)))
    frame.to_csv(folder / "rows.csv", index=False)
    return frame


@pytest.mark.parametrize(("loss", "errors"), [(loss, errors) for loss in ("logistic", "poisson") for errors in ("classical", "robust")])
def test_other_likelihoods_have_the_inverse_hessian_and_the_sandwich(tmp_path: Path, loss: str, errors: str) -> None:
    frame = table_of(loss, tmp_path)
    data = {"source": "csv", "path": str(tmp_path / "rows.csv"), "user_column": "user", "target_column": "y"}
    experiment = {
        "name": "small",
        "data": {**data, "feature_columns": ["x", "z"], "test_fraction": 0, "standardize": True},
        "problem": {"loss": loss, "reduction": "sum"},
        "method": {"name": "global"},
        "inference": True,
    }
    found = coterie.run(experiment, hosts=1).coefficients(errors=errors)
    model = sm.Logit((frame.y + 1) / 2, sm.add_constant(frame[["x", "z"]])) if loss == "logistic" else None
    fitted = (model or sm.Poisson(frame.y, sm.add_constant(frame[["x", "z"]]))).fit(
        disp=False, cov_type="nonrobust" if errors == "classical" else "HC0", tol=1e-12
    )
    agrees(found, fitted, rtol=1e-6)


# ---- known clusters


def mixed(frame: pd.DataFrame) -> tuple[Any, list[str]]:
    """MixedLM with effects of schools and of children on both coefficients, each component one variance; and the schools in its order."""
    x = np.column_stack([frame.year, np.ones(len(frame))])
    schools = sorted(set(frame.school))
    columns: list[list[list[str]]] = [[], []]
    designs: list[list[np.ndarray]] = [[], []]
    for school in schools:
        rows = np.flatnonzero(frame.school == school)
        children = frame.child.to_numpy()[rows]
        names = list(dict.fromkeys(children))
        own = (children[:, None] == np.array(names)).repeat(2, axis=1) * np.tile(x[rows], len(names))
        designs[0].append(x[rows])
        columns[0].append(["year", "1"])
        designs[1].append(own)
        columns[1].append([f"{name} {effect}" for name in names for effect in ("year", "1")])
    components = VCSpec(["cluster", "user"], columns, designs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its optimiser, about other versions of scipy
        return MixedLM(frame.math.to_numpy(), x, frame.school.to_numpy(), exog_vc=components).fit(reml=True, gtol=1e-8), schools


def fit(frame: pd.DataFrame, folder: Path, output: Path | None = None, **weights: float) -> Any:
    """The run of `hlm_exact` on these rows."""
    path = folder / "rows.csv"
    frame[["child", "school", "math", "year"]].to_csv(path, index=False)
    columns = {"user_column": "child", "cluster_column": "school", "target_column": "math", "feature_columns": ["year"]}
    experiment = {
        "name": "children",
        "data": {"source": "csv", "path": str(path), "test_fraction": 0, **columns},
        "problem": {"loss": "least_squares", "reduction": "sum"},
        "method": {"name": "hlm_exact", **weights},
        "inference": True,
    }
    return coterie.run(experiment, output=output)


def same_as_statsmodels(frame: pd.DataFrame, folder: Path) -> None:
    fitted, schools = mixed(frame)
    variances = fit(frame, folder, gamma=1.0, lam=3.0).as_run().coefficient_table().variances
    found = (variances.reml.cluster, variances.reml.user, variances.reml.error)
    np.testing.assert_allclose(found, [*fitted.vcomp, fitted.scale], rtol=1e-4)
    total = sum(found)
    assert (variances.icc_cluster, variances.icc_user) == pytest.approx((found[0] / total, (found[0] + found[1]) / total))
    # With these ratios as weights, the users' models are the sums of what MixedLM estimates and predicts.
    table = fit(frame, folder, gamma=variances.gamma, lam=variances.lam).coefficients()
    common = table[table.model == "everyone"].estimate.to_numpy()
    np.testing.assert_allclose(common, fitted.fe_params, rtol=1e-4)
    for school in schools[:5]:
        effects = fitted.random_effects[school].to_numpy()
        model = table[(table.model == "cluster") & (table.name == school)].estimate.to_numpy()
        np.testing.assert_allclose(model, common + effects[:2], atol=2e-4)
        children = list(dict.fromkeys(frame.child[frame.school == school]))
        for place, child in enumerate(children):
            own = table[(table.model == "user") & (table.name == child)].estimate.to_numpy()
            np.testing.assert_allclose(own, common + effects[:2] + effects[2 + 2 * place : 4 + 2 * place], atol=2e-4)


def test_variance_components_and_models_are_those_of_a_mixed_model(tmp_path: Path) -> None:
    same_as_statsmodels(GROWTH[GROWTH.school.isin(sorted(set(GROWTH.school))[:6])], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_so_they_are_on_the_whole_table(tmp_path: Path) -> None:
    same_as_statsmodels(GROWTH, tmp_path)


# ---- what is not measured, and what is asked wrongly


def test_a_run_without_inference_has_estimates_and_says_how_standard_errors_are_measured(tmp_path: Path, capsys: Any) -> None:
    overrides = [one for one in ON_HSB if not one.startswith("inference")]
    coterie.run("hsb", overrides=overrides, output=tmp_path / "run")
    run = coterie.load_run(tmp_path / "run")
    table = run.coefficients("global")
    np.testing.assert_allclose(table.estimate, sm.OLS(HSB.mAch, sm.add_constant(HSB[["ses"]])).fit().params.iloc[[1, 0]], rtol=1e-7)
    assert table.standard_error.isna().all()
    page = said(capsys, str(tmp_path / "run"), "--stage", "global")
    assert "std. error" not in page
    assert "Note: standard errors were not measured: run the experiment with --set inference=true." in " ".join(page.split())


def test_a_penalised_stage_has_no_standard_errors_and_its_refit_has() -> None:
    small = {"source": "ellipses", "users_per_cluster": 2}
    method = {"name": "pdmm", "penalty": 0.3, "refit": True}
    problem = {"loss": "logistic", "l2": 0.01}
    result = coterie.run({"name": "s", "data": small, "problem": problem, "method": method, "inference": True, "stop": {"rounds": 5}})
    run = result.as_run()
    biased, refitted = run.coefficient_table("pdmm"), run.coefficient_table("refit")
    assert biased.errors == ""
    wanted = "those of refit can have them (--stage)"
    assert biased.notes == (f"models of stage 'pdmm' have no standard errors, because a penalty biases them; {wanted}",)
    assert refitted.errors == "classical"
    assert all(row.standard_error is not None for row in refitted.rows)
    assert "problem.l2 is 0.01" in refitted.notes[0]


def test_a_loss_that_is_no_likelihood_has_robust_errors_alone() -> None:
    content = {"name": "s", "data": {"source": "ellipses", "users_per_cluster": 2}, "method": {"name": "global"}, "inference": True}
    result = coterie.run({**content, "problem": {"loss": "squared_hinge", "l2": 0.01}})
    assert result.as_run().coefficient_table().errors == "robust"
    with pytest.raises(ConfigError, match="the loss squared_hinge has no classical standard errors, want --errors robust"):
        result.coefficients(errors="classical")


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"users": ["nobody"]}, "user 'nobody' is not in the data"),
        ({"cluster": "Private"}, "the run has no cluster 'Private', want one of Catholic, Public"),
        ({"level": 1.0}, "the level is 1, want a number between 0 and 1"),
        ({"everyone": True, "users": ["s1224"]}, "everyone's model is one .--global., want no user and no cluster beside it"),
        ({"everyone": True, "stage": "local"}, "stage 'local' has no model of everyone, want another --stage"),
        ({"errors": "HC3"}, "errors is 'HC3', want classical or robust"),
        ({"user": "s1224"}, "coefficients have no choice 'user', want some of users, cluster, level, errors, everyone"),
    ],
)
def test_wrong_questions_are_answered_by_a_sentence(hsb: Any, asked: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        hsb.coefficients(**asked)


def test_clusters_have_their_known_names_where_they_are_the_known_ones() -> None:
    members = Members(["a", "b", "c"], ["x", "x", "y"])
    assert cluster_names(np.array([0, 0, 1]), members) == ["x", "y"]
    assert cluster_names(np.array([0, 1, 1]), members) == ["0", "1"]
    assert cluster_names(np.array([0, 1, 2]), members) == ["0", "1", "2"]
    assert Asked().level == 0.95


# ---- the command


def test_the_command_writes_tables_csv_and_json_lines(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    fit(GROWTH[GROWTH.school.isin(["s2020", "s2040", "s2180"])], tmp_path, tmp_path / "run", gamma=1.2, lam=3.0)
    folder = str(tmp_path / "run")
    page = said(capsys, folder, "--cluster", "s2020", "--level", "0.9")
    for part in (
        "conditional standard errors",
        "cluster s2020",
        "high 90 %",
        "Variance components",
        "ICC:",
        "Intercept and slopes vary with one variance, so this is no model of random intercepts alone.",
        "Variances are in squared units of the target. Those of a feature's effects are for",
        "method.gamma: 1.2 in this run",
    ):
        assert part in page
    rows = list(csv.DictReader(io.StringIO(said(capsys, folder, "--cluster", "s2020", "--format", "csv"))))
    said(capsys, folder, "--cluster", "s2020", "--format", "jsonl", "--output", str(tmp_path / "rows.jsonl"))
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [float(row["estimate"]) for row in rows] == [line["estimate"] for line in lines]
    assert {line["model"] for line in lines} == {"cluster", "user"}
    said(capsys, folder, "--cluster", "s2020", "--output", str(tmp_path / "page.txt"))
    assert "cluster s2020" in (tmp_path / "page.txt").read_text()
    (everyone,) = {line["model"] for line in map(json.loads, said(capsys, folder, "--global", "--format", "jsonl").splitlines())}
    assert everyone == "everyone"


def test_in_a_pipe_no_line_of_the_table_is_wrapped(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    name = "a feature whose name alone is nearly as long as a line of a narrow terminal is wide"
    users, x = np.repeat(["u0", "u1"], 8), np.arange(16) % 5 + 0.5
    pd.DataFrame({"user": users, name: x, "y": 2 * x + np.arange(16) % 3}).to_csv(tmp_path / "rows.csv", index=False)
    data = {"source": "csv", "path": str(tmp_path / "rows.csv"), "user_column": "user", "target_column": "y"}
    content = {"name": "wide", "data": data, "problem": {"loss": "least_squares"}, "method": {"name": "local"}}
    coterie.run({**content, "inference": True}, output=tmp_path / "run")
    lines = said(capsys, str(tmp_path / "run")).splitlines()
    assert len([line for line in lines if name in line and len(line.split()) == len(name.split()) + 7]) == 2
