"""Missing cells that get a common mean: agreed by sums over the cells that are there, and the same whoever has which rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from coterie import run
from coterie.errors import ConfigError
from coterie.experiment.config import load_experiment
from coterie_deploy.engines.api import Result
from coterie_deploy.read.loading import load_run
from coterie_deploy.read.models import predicted, stage_models
from coterie_deploy.read.verify import verdict_on
from coterie_deploy.studies.adapt import adapt
from coterie_server.record.rundb import read_run

RANDOM = np.random.default_rng(4)
ROWS = RANDOM.normal([3.0, -200.0], [1.0, 50.0], size=(60, 2))
TARGETS = ROWS @ [1.0, 0.02] + RANDOM.normal(size=60) / 10
# Users are u0, u1, u2 in turn; u1 lacks no cell, and u2 has no value of b at all.
HOLES = RANDOM.random((60, 2)) < 0.2
HOLES[1::3] = False
HOLES[2::3, 1] = True


def table(folder: Path, rows: np.ndarray[Any, Any]) -> None:
    cells = [["" if np.isnan(value) else repr(float(value)) for value in row] for row in rows]
    lines = [f"u{place % 3},{','.join(row)},{float(TARGETS[place])!r}" for place, row in enumerate(cells)]
    (folder / "rows.csv").write_text("\n".join(["user,a,b,y", *lines]) + "\n")


def fit(
    folder: Path, rows: np.ndarray[Any, Any], *, hosts: int = 1, output: Path | None = None, method: Any = None, **data: object
) -> Result:
    table(folder, rows)
    source = {"source": "csv", "path": "rows.csv", "user_column": "user", "target_column": "y", "columns": {"a": "number", "b": "number"}}
    described = {
        "name": "holes",
        "data": {**source, "test_fraction": 0, **data},
        "problem": {"loss": "least_squares", "l2": 0.01},
        "method": method or {"name": "global"},
    }
    return run(described, data=folder, hosts=hosts, output=output)


WITH_HOLES = np.where(HOLES, np.nan, ROWS)
MEANS = np.nanmean(WITH_HOLES, axis=0)
FILLED = np.where(HOLES, MEANS, ROWS)


@pytest.mark.parametrize("hosts", [1, 3])
def test_the_fit_is_that_of_the_table_with_the_means_written_in(tmp_path: Path, hosts: int) -> None:
    found, by_hand = fit(tmp_path, WITH_HOLES, hosts=hosts, missing="mean"), fit(tmp_path, FILLED)
    np.testing.assert_allclose(found.models["u0"], by_hand.models["u0"], rtol=1e-9)
    assert found.facts.fill is not None
    np.testing.assert_allclose(found.facts.fill, MEANS, rtol=1e-13)
    assert found.facts.mean is None


def test_the_bits_do_not_depend_on_the_hosts(tmp_path: Path) -> None:
    for standardize in (False, True):
        one, three = (fit(tmp_path, WITH_HOLES, hosts=hosts, missing="mean", standardize=standardize) for hosts in (1, 3))
        np.testing.assert_array_equal(one.models["u0"], three.models["u0"])


def test_a_scale_is_that_of_the_cells_that_are_there_so_a_filled_cell_is_0(tmp_path: Path) -> None:
    found = fit(tmp_path, WITH_HOLES, missing="mean", standardize=True)
    assert found.facts.mean is not None
    assert found.facts.scale is not None
    np.testing.assert_allclose(found.facts.mean, MEANS, rtol=1e-13)
    np.testing.assert_allclose(found.facts.scale, np.nanstd(WITH_HOLES, axis=0), rtol=1e-13)
    by_hand = fit(tmp_path, np.where(HOLES, 0.0, (ROWS - MEANS) / np.nanstd(WITH_HOLES, axis=0)))
    np.testing.assert_allclose(found.models["u0"], by_hand.models["u0"], rtol=1e-9)


def test_without_a_missing_cell_nothing_changes(tmp_path: Path) -> None:
    for standardize in (False, True):
        whole, plain = (fit(tmp_path, ROWS, standardize=standardize, missing=missing) for missing in ("mean", "refuse"))
        np.testing.assert_array_equal(whole.models["u0"], plain.models["u0"])


@pytest.mark.parametrize("standardize", [False, True])
def test_indicators_are_features_also_where_a_column_lacks_nothing(tmp_path: Path, standardize: bool) -> None:
    holes = HOLES & [False, True]
    found = fit(tmp_path, np.where(holes, np.nan, ROWS), missing="indicator", standardize=standardize)
    assert [feature.name for feature in found.features] == ["a", "b", "a is missing", "b is missing"]
    a_is_missing, b_is_missing = found.models["u0"][2:4]
    assert a_is_missing == pytest.approx(0.0, abs=1e-12)
    assert abs(b_is_missing) > 1e-6


def test_a_feature_that_nobody_has_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="feature 'b' has no value in any training row, want at least one"):
        fit(tmp_path, np.column_stack([ROWS[:, 0], np.full(60, np.nan)]), missing="mean")


def test_held_out_rows_are_filled_and_their_cells_are_in_no_mean(tmp_path: Path) -> None:
    found = fit(tmp_path, WITH_HOLES, missing="mean", test_fraction=0.25)
    assert np.isfinite(found.metrics["global"]["heldout_loss"])
    assert found.facts.fill is not None
    assert not np.allclose(found.facts.fill, MEANS, rtol=1e-9)


@pytest.mark.parametrize(("standardize", "up", "down"), [(False, 6, 2), (True, 12, 4)])
def test_the_ledger_is_its_closed_form(tmp_path: Path, standardize: bool, up: int, down: int) -> None:
    fit(tmp_path, WITH_HOLES, missing="mean", standardize=standardize, output=tmp_path / "run")
    verdict = verdict_on(tmp_path / "run")
    assert verdict.agrees
    scalars = {one.row.direction: one.row.scalars for one in verdict.judged[0] if one.row.step == "standardize"}
    assert scalars == {"up": up, "down": down}, "sums, and with standardize norms, of 2 features and 3 users; counts are no scalars"


@pytest.mark.parametrize(
    ("standardize", "n_cells", "said"),
    [
        (False, 1, "1 user has fewer than 2 training rows with a value of some feature, and missing cells get a common mean"),
        (False, 2, ""),
        (True, 2, "1 user has fewer than 3 training rows with a value of some feature, and standardize is true"),
        (True, 3, ""),
    ],
)
def test_users_whose_few_cells_their_sums_give_away_are_counted(tmp_path: Path, standardize: bool, n_cells: int, said: str) -> None:
    rows = ROWS.copy()
    rows[2::3, 1] = np.nan
    rows[2 : 2 + 3 * n_cells : 3, 1] = ROWS[2 : 2 + 3 * n_cells : 3, 1]
    fit(tmp_path, rows, missing="mean", standardize=standardize, output=tmp_path / "run")
    with read_run(tmp_path / "run") as connection:
        found = [text for (text,) in connection.execute("SELECT text FROM events WHERE kind = 'warning'")]
    assert [text.startswith(said) for text in found] == ([True] if said else []), json.dumps(found)


@pytest.mark.parametrize("standardize", [False, True])
def test_predictions_fill_missing_cells_as_training_did(tmp_path: Path, standardize: bool) -> None:
    fit(tmp_path, WITH_HOLES, missing="mean", standardize=standardize, output=tmp_path / "run")
    with np.load(tmp_path / "run" / "models" / "global.npz") as arrays:
        np.testing.assert_allclose(arrays["fill"], MEANS, rtol=1e-13)
    left = stage_models(tmp_path / "run", "global")
    experiment = load_experiment(tmp_path / "run" / "experiment.json")
    holed, whole = (predicted(experiment, left, "u0", rows[:5]) for rows in (WITH_HOLES, FILLED))
    np.testing.assert_allclose(holed, whole, rtol=1e-12)
    assert HOLES[:5].any()
    np.testing.assert_array_equal(load_run(tmp_path / "run").predict("u0", WITH_HOLES[:5]), holed)
    with pytest.raises(ConfigError, match="not finite"):
        load_run(tmp_path / "run").predict("u0", np.full((1, 2), np.inf))


def test_new_users_get_the_constants_of_the_run_that_they_start_from_and_send_no_sums(tmp_path: Path) -> None:
    def described(name: str) -> dict[str, Any]:
        return {"source": "csv", "path": name, "user_column": "user", "target_column": "y", "missing": "mean", "standardize": True}

    table(tmp_path, WITH_HOLES)
    problem = {"loss": "least_squares", "l2": 0, "intercept": False}
    method = {"name": "fedrep_linear", "k": 1, "batch_rows": 5}
    content = {"name": "r", "data": described("rows.csv"), "problem": problem, "method": method, "stop": {"rounds": 2}}
    run(content, data=tmp_path, output=tmp_path / "run")
    rows = (tmp_path / "rows.csv").read_text().splitlines()
    (tmp_path / "new.csv").write_text("\n".join([rows[0], *(f"new,{place},{place % 7},1" for place in range(20))]) + "\n")
    out = tmp_path / "adapted"
    quiet = Console(quiet=True)
    adapt(tmp_path / "run", tmp_path / "new.csv", [], out, 1, quiet, quiet, quiet=True)
    with np.load(tmp_path / "run/models/fedrep_linear.npz") as trained, np.load(out / "models/fedrep_linear.npz") as adapted:
        for name in ("mean", "scale", "fill"):
            np.testing.assert_array_equal(adapted[name], trained[name])
    with read_run(out) as connection:
        sums = "SELECT COUNT(*) FROM ledger WHERE step = 'standardize' AND direction = 'up' AND scalars > 0"
        assert connection.execute(sums).fetchone() == (0,)
    assert verdict_on(out).agrees


def test_networks_take_no_filled_cells(tmp_path: Path) -> None:
    data = {"source": "csv", "path": "rows.csv", "user_column": "user", "target_column": "y", "missing": "mean"}
    with pytest.raises(ConfigError, match=r"data\.missing: mean and indicator are for convex problems"):
        run({"name": "n", "data": data, "model": {"name": "mlp", "classes": 2}, "method": {"name": "fedavg"}}, data=tmp_path)
