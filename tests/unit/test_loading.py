"""Runs in notebooks: tables as data frames of pandas or polars, facts, models and predictions, of runs on disk, in memory and under way."""

from __future__ import annotations

import contextlib
import io
import json
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import coterie
from coterie import run
from coterie.errors import ConfigError, RunError
from coterie_client.data.new_rows import read_new_rows
from coterie_deploy.engines.api import Result
from coterie_deploy.read import run_tables
from coterie_deploy.read.predict import predict
from coterie_deploy.read.shared_models import Whose
from coterie_server.record import summary
from coterie_server.record.curves import curves
from coterie_server.record.query import Query, totals
from coterie_server.record.rundb import open_run

USERS = [f"u{i}" for i in range(7)]
STAGES = ("local", "global", "pdmm-0.3", "pdmm-0.05")


def experiment(**more: Any) -> dict[str, Any]:
    return {
        "name": "small",
        "seed": 5,
        "data": {
            "source": "csv", "path": "rows.csv", "user_column": "user", "cluster_column": "region", "target_column": "y",
            "feature_columns": ["a", "b"], "standardize": True, "test_fraction": 0.2,
        },
        "problem": {"loss": "least_squares", "l2": 1e-3},
        "method": {"name": "pdmm", "path": [0.3, 0.05]},
        "references": ["local", "global"],
        "stop": {"rounds": 6},
        "federation": {"hosts": 2},
        **more,
    }  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(1)
    lines = ["user,region,a,b,y"]
    for place, user in enumerate(USERS):
        for a, b in rng.normal(size=(12, 2)):
            lines.append(f"{user},r{place % 2},{a:.4f},{b:.4f},{a * (1 - 2 * (place % 2)) + b:.4f}")
    (folder / "rows.csv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def folder(data: Path) -> Path:
    run(experiment(), data=data, output=data / "run")
    return data / "run"


@pytest.fixture(scope="module")
def in_memory(data: Path) -> Result:
    return run(experiment(), data=data)


def test_importing_coterie_imports_no_other_room_and_no_frames() -> None:
    code = (
        "import sys, coterie; before = {m.partition('.')[0] for m in sys.modules}; assert 'load_run' in dir(coterie); coterie.load_run\n"
        "after = {m.partition('.')[0] for m in sys.modules}\n"
        "rooms = {'coterie_deploy', 'coterie_server', 'coterie_client', 'pandas', 'polars', 'numpy'}\n"
        "print(*sorted(before & rooms), '|', *sorted(after & {'pandas', 'polars'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout.strip() == "|"


def test_an_installation_without_the_other_rooms_says_so_when_a_run_is_to_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "coterie_deploy.read.loading", None)
    with pytest.raises(ImportError, match=r"coterie\.load_run needs coterie_deploy\.read\.loading, which is not installed here"):
        _ = coterie.load_run
    with pytest.raises(AttributeError, match="has no attribute 'load_runs'"):
        _ = coterie.load_runs  # type: ignore[attr-defined]


def test_what_is_no_run_folder_is_refused_and_so_are_frames_that_are_not_there(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"is not a run folder: it has no run.db"):
        coterie.load_run(tmp_path)
    sqlite3.connect(tmp_path / "run.db").close()
    with pytest.raises(ConfigError, match=r"has a run\.db without the tables of a run"):
        coterie.load_run(tmp_path)
    with pytest.raises(ConfigError, match="frames is 'arrow', want one of pandas, polars"):
        coterie.load_run(folder, frames="arrow")  # type: ignore[call-overload]
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(ConfigError, match=r"need polars, which is not installed: pip install 'coterie\[frames\]'"):
        coterie.load_run(folder, frames="polars")


def test_facts_and_the_experiment(folder: Path) -> None:
    loaded = coterie.load_run(folder)
    assert (loaded.name, loaded.status, loaded.method, loaded.seed) == ("small", "finished", "pdmm", 5)
    assert (loaded.version, loaded.users, loaded.stages) == (coterie.__version__, tuple(USERS), STAGES)
    assert loaded.experiment.stop.rounds == 6
    assert loaded.final_stage in ("pdmm-0.3", "pdmm-0.05")
    assert len(loaded.run_id) == 16
    assert repr(loaded) == "Run('small', pdmm, finished, stages: local, global, pdmm-0.3, pdmm-0.05)"


@pytest.mark.parametrize("chunk", [7, 50_000])
def test_the_ledger_has_every_row_with_its_stage_its_users_and_its_wire_bytes(
    folder: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_tables, "_CHUNK_ROWS", chunk)
    frame = coterie.load_run(folder).ledger()
    with contextlib.closing(open_run(folder)) as connection:
        columns = "seq, round, step, kind, direction, scope, link, vectors, payload_bytes, message_bytes, frames"
        rows = connection.execute(f"SELECT {columns} FROM ledger ORDER BY rowid").fetchall()
    assert [tuple(row) for row in frame[columns.split(", ")].itertuples(index=False)] == rows
    assert (frame.wire_bytes == frame.message_bytes + 5 * frame.frames).all()
    assert set(frame.stage[frame.seq == 0]) == {"session"}
    assert set(frame.stage[frame.seq > 0]) == set(STAGES)
    assert dict(frame[frame.step == "S5"].groupby("link", observed=True).users.unique().map(list)) == {
        "host-1": ["u0..u2"],
        "host-2": ["u3..u6"],
    }
    assert set(frame.n_users[frame.link == "host-1"]) == {3}
    assert frame.useful.all()
    assert frame.memory_usage(deep=True).sum() < 200 * len(frame) + 20_000


def test_users_that_are_no_run_of_names_are_listed() -> None:
    names = np.array(USERS, dtype=object)
    assert run_tables._listed(np.array([0, 2, 3, 5, 6]), names) == "u0, u2, u3, u5, u6"
    assert run_tables._listed(np.array([0, 1, 2, 4]), names) == "u0..u2, u4"
    assert run_tables._listed(np.zeros(0, dtype=np.int64), names) == ""


def test_traffic_is_what_the_query_gives(folder: Path) -> None:
    loaded = coterie.load_run(folder)
    with contextlib.closing(open_run(folder)) as connection:
        groups = totals(connection, Query(("step", "direction"), stages=("pdmm-0.3",), first_round=2))
    frame = loaded.traffic(by=["step", "direction"], stages="pdmm-0.3", first_round=2)
    assert [tuple(row) for row in frame[["step", "direction", "vectors", "wire_bytes"]].itertuples(index=False)] == [
        (*group.keys, group.vectors, group.wire_bytes) for group in groups
    ]
    assert frame.wire_bytes.dtype == np.int64
    by_user = loaded.traffic("user", directions=["up"])
    assert sorted(by_user.user) == USERS
    assert loaded.traffic(()).wire_bytes.item() == loaded.ledger().wire_bytes.sum()
    with pytest.raises(ConfigError, match="cannot be grouped by 'steps'"):
        loaded.traffic("steps")
    with pytest.raises(ConfigError, match="cannot be limited by 'step', want one of stages, first_round"):
        loaded.traffic(step="S5")
    with pytest.raises(ConfigError, match="has no step 'S99'"):
        loaded.traffic(steps=["S99"])


def test_metrics_stand_beside_seconds_and_bytes_round_by_round(folder: Path) -> None:
    loaded = coterie.load_run(folder)
    frame = loaded.metrics("pdmm-0.3")
    with contextlib.closing(open_run(folder)) as connection:
        expected = curves(connection, summary.stage_named(connection, "pdmm-0.3"))
    assert list(frame["round"]) == list(range(7))
    assert list(frame.columns[:6]) == ["stage", "round", "seconds", "bytes", "bytes_up", "bytes_down"]
    for name in ("objective", "gap", "primal_residual", "clusters"):
        np.testing.assert_array_equal(frame[name], expected.figures[name])
    np.testing.assert_array_equal(frame.bytes_up, expected.bytes_by(direction="up"))
    assert (frame.bytes == frame.bytes_up + frame.bytes_down).all()
    assert frame.bytes.is_monotonic_increasing
    assert frame.seconds.is_monotonic_increasing
    whole = loaded.metrics()
    assert list(whole.stage.unique()) == list(loaded.stages)
    assert (
        whole.bytes.groupby(whole.stage, observed=True).last().sum() == loaded.traffic("stage").query("stage != 'session'").wire_bytes.sum()
    )
    with pytest.raises(ConfigError, match="has no stage 'pdmm', want one of local"):
        loaded.metrics("pdmm")


def test_long_metrics_are_the_same_figure_by_figure(folder: Path) -> None:
    loaded = coterie.load_run(folder)
    wide, long = loaded.metrics(), loaded.metrics(long=True)
    figures = list(wide.columns[6:])
    melted = wide.melt(id_vars=list(wide.columns[:6]), value_vars=figures, var_name="figure").dropna(subset="value")
    order = ["stage", "round", "figure"]
    pd.testing.assert_frame_equal(
        melted.sort_values(order).reset_index(drop=True),
        long.astype({"figure": "str"}).sort_values(order).reset_index(drop=True),
        check_categorical=False,
        check_like=True,
    )
    assert not long.value.isna().any()


def test_results_members_memberships_and_events(folder: Path) -> None:
    loaded = coterie.load_run(folder)
    results = loaded.results()
    assert list(results.stage[results.is_final]) == [loaded.final_stage]
    assert list(results.rounds) == [1, 2, 6, 6]
    assert results.heldout_loss.notna().all()
    assert list(results.objective.notna()) == [False, True, True, True], "that of the last round; local models have none in common"
    assert not any("nan" in str(value) for row in results.itertuples() for value in row)
    members = loaded.members()
    assert list(members.user) == USERS
    assert list(members.cluster) == [f"r{place % 2}" for place in range(7)]
    assert list(members.host) == ["host-1"] * 3 + ["host-2"] * 4
    memberships = loaded.memberships()
    last = memberships[memberships.stage == loaded.final_stage].groupby("user", observed=True).cluster.last()
    assert dict(last) == loaded.clusters
    events = loaded.events()
    assert events.kind.iloc[0] == "start"
    assert events.kind.iloc[-1] == "finished"
    assert json.loads(events.data[0]) == {"attempt": 1}
    assert str(events["at"].dt.tz) == "UTC"


def test_figures_of_users_are_one_row_for_each_stage_and_user(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    copy.mkdir()
    for name in ("run.db", "experiment.json"):
        (copy / name).write_bytes((folder / name).read_bytes())
    with contextlib.closing(sqlite3.connect(copy / "run.db")) as connection, connection:
        rows = [(2, "accuracy", 3, 0.5), (2, "accuracy", 0, 0.25), (3, "accuracy", 0, 0.75), (3, "loss", 6, 2.0)]
        connection.execute("DELETE FROM user_results")  # of the held-out rows
        connection.executemany("INSERT INTO user_results VALUES (?, ?, ?, ?)", rows)
    frame = coterie.load_run(copy).user_results()
    found = [tuple(row) for row in frame.fillna(-1.0).itertuples(index=False)]
    assert found == [("pdmm-0.3", "u0", 0.25, -1), ("pdmm-0.3", "u3", 0.5, -1), ("pdmm-0.05", "u0", 0.75, -1), ("pdmm-0.05", "u6", -1, 2.0)]


def test_models_and_predictions_are_those_of_the_run(folder: Path, tmp_path: Path) -> None:
    loaded = coterie.load_run(folder)
    assert list(loaded.models) == USERS
    np.testing.assert_array_equal(loaded.models["u3"], loaded.models_of(str(loaded.final_stage))["u3"])
    (tmp_path / "new.csv").write_text("b,size,a\n2.0,9,1.0\n-3.0,9,-2.0\n")
    out = io.StringIO()
    predict(folder, Whose(user="u3"), tmp_path / "new.csv", None, out)
    expected = [float(line.rpartition(",")[2]) for line in out.getvalue().splitlines()[1:]]
    rows = pd.DataFrame({"b": [2.0, -3.0], "size": [9, 9], "a": [1.0, -2.0]})
    np.testing.assert_array_equal(loaded.predict("u3", rows), expected)
    np.testing.assert_array_equal(loaded.predict("u3", rows[["a", "b"]].to_numpy()), expected)
    np.testing.assert_array_equal(coterie.load_run(folder, frames="polars").predict("u3", rows), expected)
    assert not np.array_equal(loaded.predict("u3", rows, "local"), expected)
    with np.load(folder / "models" / f"{loaded.final_stage}.npz") as left:
        standardised = (rows[["a", "b"]].to_numpy() - left["mean"]) / left["scale"]
    *slopes, intercept = loaded.models["u3"]
    np.testing.assert_allclose(loaded.predict("u3", rows), standardised @ slopes - intercept, rtol=1e-12)


def test_rows_and_users_and_stages_that_do_not_fit_are_named(folder: Path) -> None:
    loaded = coterie.load_run(folder)
    wrong: list[tuple[Any, str]] = [
        (pd.DataFrame({"a": [1.0]}), "the rows have no column 'b', want a, b"),
        ([[1.0, 2.0, 3.0]], r"the rows have shape \(1, 3\), want \(m, 2\)"),
        ([1.0, 2.0], r"the rows have shape \(2,\), want \(m, 2\)"),
        ([[1.0, np.nan]], "values that are not finite"),
        ([["x", "y"]], "the rows are not all numbers"),
    ]
    for rows, sentence in wrong:
        with pytest.raises(ConfigError, match=sentence):
            loaded.predict("u3", rows)
    with pytest.raises(ConfigError, match="user 'u9' is not in the data"):
        loaded.predict("u9", [[1.0, 2.0]])
    with pytest.raises(ConfigError, match=r"the run has no stage 'refit', want one of local, global, pdmm-0\.3"):
        loaded.models_of("refit")
    with pytest.raises(ConfigError, match="has shared no representation and no network"):
        coterie.load_run(folder).networks()


def comparable(frames: Mapping[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """Without what depends on the clock or on what a folder costs."""
    return {name: frame.drop(columns=["seconds", "at"], errors="ignore") for name, frame in frames.items()}


def frames_of(loaded: coterie.Run[pd.DataFrame]) -> dict[str, pd.DataFrame]:
    tables = ("traffic", "metrics", "results", "user_results", "members", "memberships")
    return {name: getattr(loaded, name)() for name in tables}


def test_dates_of_a_frame_are_read_as_those_of_the_table(tmp_path: Path) -> None:
    lines = [f"u{i % 3},2020-01-{i + 1:02d},{i % 4}" for i in range(20)]
    (tmp_path / "dates.csv").write_text("\n".join(["user,seen,y", *lines]) + "\n")
    data = {"source": "csv", "path": "dates.csv", "user_column": "user", "target_column": "y"}
    problem, method = {"loss": "least_squares", "l2": 0.1}, {"name": "global"}
    run({"name": "dates", "data": data, "problem": problem, "method": method}, data=tmp_path, output=tmp_path / "run")
    finished = coterie.load_run(tmp_path / "run")
    days = np.array([[18262.0], [18263.0]])
    said = finished.predict("u0", days)
    for cells in (["2020-01-01", "2020-01-02"], pd.to_datetime(["2020-01-01", "2020-01-02"]), days[:, 0]):
        np.testing.assert_array_equal(finished.predict("u0", pd.DataFrame({"seen": cells})), said)
    with pytest.raises(ConfigError, match=r"ends in \.xlsx, want the rows as a table: \.csv, \.csv\.gz, \.parquet, \.dta, \.sav"):
        read_new_rows(finished.experiment.data, tmp_path / "rows.xlsx", ["seen"])


def test_new_rows_of_any_format_have_the_predictions_of_their_text(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"user": [f"u{i % 3}" for i in range(30)], "sex": rng.choice(["f", "m"], 30), "a": rng.normal(size=30)})
    table["seen"] = pd.to_datetime("2020-01-01") + pd.to_timedelta(rng.integers(0, 99, 30), unit="D")
    table["y"] = table["a"] + (table["sex"] == "m")
    table.to_csv(tmp_path / "rows.csv", index=False)
    roles = {"user_column": "user", "target_column": "y", "columns": {"sex": {"category": ["f", "m"]}}}
    content = {"name": "mixed", "data": {"source": "csv", "path": "rows.csv", **roles}, "problem": {"loss": "least_squares", "l2": 0.1}}
    run({**content, "method": {"name": "local"}}, data=tmp_path, output=tmp_path / "run")
    new = table.drop(columns=["user", "y"]).head(6)
    new.to_csv(tmp_path / "new.csv", index=False)
    new.to_parquet(tmp_path / "new.parquet", index=False)
    new.to_stata(tmp_path / "new.dta", write_index=False, convert_dates={"seen": "td"})
    said = {}
    for suffix in ("csv", "parquet", "dta"):
        text = io.StringIO()
        predict(tmp_path / "run", Whose(user="u1"), tmp_path / f"new.{suffix}", None, text)
        said[suffix] = pd.read_csv(io.StringIO(text.getvalue()))
    assert said["csv"].prediction.is_unique
    for suffix in ("parquet", "dta"):
        assert list(said[suffix].columns) == ["sex", "a", "seen", "model", "prediction"]
        pd.testing.assert_series_equal(said[suffix].prediction, said["csv"].prediction, check_exact=True)
        pd.testing.assert_series_equal(said[suffix].a, said["csv"].a, check_exact=True)
    new.assign(a=[0.5, None, 1.0, 2.0, None, 3.0]).to_parquet(tmp_path / "gaps.parquet")
    with pytest.raises(ConfigError, match=r"gaps.parquet row 2, column 'a': the cell is missing \(and cells of 1 more rows\)"):
        predict(tmp_path / "run", Whose(user="u1"), tmp_path / "gaps.parquet", None, io.StringIO())


def test_a_run_in_memory_gives_the_same_tables_and_models(folder: Path, in_memory: Result) -> None:
    loaded, expected = in_memory.as_run(), coterie.load_run(folder)
    assert loaded.folder is None
    assert (loaded.status, loaded.experiment, loaded.stages) == ("finished", expected.experiment, expected.stages)
    found = comparable(frames_of(loaded))
    for name, frame in comparable(frames_of(expected)).items():
        keys = [column for column in frame.columns if "bytes" not in column]  # a run on disk asks hosts for snapshots
        pd.testing.assert_frame_equal(found[name][keys], frame[keys])
    assert loaded.clusters == expected.clusters
    np.testing.assert_array_equal(loaded.predict("u3", [[1.0, 2.0]]), expected.predict("u3", [[1.0, 2.0]]))
    with pytest.raises(ConfigError, match="the run is in memory alone"):
        loaded.networks()


def test_a_run_on_disk_is_given_by_its_result_too(folder: Path, data: Path) -> None:
    result = run(experiment(), data=data, output=folder.parent / "again")
    assert result.as_run().folder == folder.parent / "again"
    assert result.as_run(frames="polars").metrics().height == coterie.load_run(folder).metrics().shape[0]


def test_frames_of_polars_hold_what_those_of_pandas_hold(folder: Path) -> None:
    first, second = coterie.load_run(folder), coterie.load_run(folder, frames="polars")
    for table in ("ledger", "traffic", "metrics", "results", "user_results", "members", "memberships", "events"):
        one, other = getattr(first, table)(), getattr(second, table)()
        assert list(one.columns) == other.columns
        assert one.shape == other.shape
        for name in set(one.columns) - {"at"}:
            np.testing.assert_array_equal(np.asarray(one[name]), other[name].to_numpy(), err_msg=f"{table}.{name}")
    assert list(second.events()["at"].dt.epoch("us")) == list(first.events()["at"].astype("int64"))


def test_a_run_under_way_is_read_as_far_as_it_is(data: Path, tmp_path: Path) -> None:
    seen = []

    def look(progress: Any) -> None:
        if (progress.number, progress.round) == (2, 4):
            loaded = coterie.load_run(tmp_path / "run")
            seen.append((loaded.status, loaded.final_stage, loaded.metrics("pdmm-0.3")["round"].max(), loaded.results().outcome.iloc[-1]))
            with pytest.raises(ConfigError, match="the run 'small' has not finished, so it has no models yet"):
                _ = loaded.models
            raise RunError("seen enough")

    with pytest.raises(RunError, match="seen enough"):
        run(experiment(snapshots={"every_rounds": 1}), data=data, output=tmp_path / "run", observer=look)
    assert seen == [("running", None, 4, "")]
    assert coterie.load_run(tmp_path / "run").status == "failed: seen enough"
