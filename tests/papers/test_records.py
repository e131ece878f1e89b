"""What a run's database says about PDMM beside the figures: the paper's own count, the clusters over the rounds, and warnings."""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie import run
from coterie_server.record.rundb import RunDatabase, open_run
from tests.papers.fixture_data import experiment, fixture
from tests.simulation import Faults, World, query, small_experiment

CASES = Path(__file__).parent.parent / "fixtures" / "cases"

PAIRED = {"sampling": "paired", "primal_fraction": 0.5}
MEMBERSHIPS = "SELECT stage, round, labels FROM memberships ORDER BY stage, round"
WARNINGS = "SELECT text, json_extract(data, '$.stage') FROM events WHERE kind = 'warning'"


def asked(folder: Path, sql: str) -> list[Any]:
    with contextlib.closing(open_run(folder)) as connection:
        return connection.execute(sql).fetchall()


@pytest.mark.parametrize("way", [{}, PAIRED, {"evaluate_every": 3}], ids=["full", "paired", "every-third"])
def test_the_clusters_over_the_rounds_are_those_of_the_figures(way: dict[str, Any], tmp_path: Path) -> None:
    result = run(experiment(6, {"name": "pdmm", "penalty": 0.9, **way}, stop={"rounds": 400, "residual": 1e-6}), output=tmp_path / "run")
    number = result.stages.index("pdmm")
    rows = {round_: json.loads(labels) for stage, round_, labels in asked(result.folder, MEMBERSHIPS) if stage == number}  # type: ignore[arg-type]
    listed = list(rows.values())
    assert all(a != b for a, b in itertools.pairwise(listed)), "written when they have changed only"
    counted = 0
    for line in result.history("pdmm"):
        if "clusters" not in line:
            continue
        latest = rows[max(round_ for round_ in rows if round_ <= line["round"])]
        assert line["clusters"] == max(latest) + 1
        counted += 1
    every = way.get("evaluate_every", 1)
    assert len(listed) > 1 or every > 1, "the clusters of the first round are not those of the solution"
    assert counted == len(result.history("pdmm")) // every
    assert all(round_ % every == 0 for round_ in rows)
    assert listed[-1] == fixture(6)["label"]


def test_under_random_draws_a_zero_must_last_to_join_two_users(tmp_path: Path) -> None:
    """Users who have not moved from the common start are not together for that."""
    result = run(experiment(6, {"name": "pdmm", "penalty": 0.7, **PAIRED}, stop={"rounds": 20}), output=tmp_path / "run")
    clusters = [line["clusters"] for line in result.history("pdmm")]
    assert clusters[:2] == [6, 6], "three updates make a zero last"
    assert min(clusters) < 6


def test_a_resumed_run_writes_the_same_memberships_once(tmp_path: Path) -> None:
    described = small_experiment({"name": "pdmm", "penalty": 0.3, "start": "zero", **PAIRED}, snapshots={"every_rounds": 7})
    World(described, tmp_path / "calm", 2).run()
    last = query(tmp_path / "calm", "SELECT max(seq) FROM ledger")[0][0]
    World(described, tmp_path / "faulty", 2, Faults(coordinator=(5, last // 2, last - 1))).run()
    assert len(query(tmp_path / "calm", MEMBERSHIPS)) > 2
    for table in ("memberships", "printed", "expected"):
        assert query(tmp_path / "faulty", f"SELECT * FROM {table}") == query(tmp_path / "calm", f"SELECT * FROM {table}")


def test_rewinding_forgets_what_came_later_and_what_was_written_last() -> None:
    database = RunDatabase(None)
    for stage, round_, labels in ((0, 1, [0, 1]), (0, 2, [0, 0]), (0, 3, [0, 0]), (1, 1, [0, 1])):
        database.membership(stage, round_, np.array(labels))
    for stage in (0, 1):
        database.printed(stage, {"up": 3.0})
    database.flush()
    assert database.connection.execute(MEMBERSHIPS).fetchall() == [(0, 1, "[0,1]"), (0, 2, "[0,0]"), (1, 1, "[0,1]")]
    database.rewind(0, 0, 1)
    database.membership(0, 2, np.array([0, 0]))
    database.flush()
    assert database.connection.execute(MEMBERSHIPS).fetchall() == [(0, 1, "[0,1]"), (0, 2, "[0,0]")]
    assert database.connection.execute("SELECT * FROM printed").fetchall() == []


def test_the_papers_own_count_stands_beside_the_closed_form(tmp_path: Path) -> None:
    described = experiment(6, {"name": "pdmm", "penalty": 0.7, "placement": "paper", **PAIRED}, stop={"rounds": 10})
    result = run(described, output=tmp_path / "run")
    assert result.folder is not None
    (stage,) = [number for number, name in asked(result.folder, "SELECT number, name FROM stages") if name == "pdmm"]
    assert asked(result.folder, "SELECT * FROM printed") == [(stage, "down", 360.0), (stage, "up", 180.0)]
    for direction, bound in (("down", 360), ("up", 180)):
        sent = f"SELECT sum(vectors) FROM expected WHERE stage = {stage} AND direction = '{direction}' AND step != 'S0'"
        assert 0 < asked(result.folder, sent)[0][0] <= bound


def test_a_biased_draw_is_told_when_its_stage_starts(tmp_path: Path) -> None:
    uniform = {"name": "pdmm", "penalty": 0.7, "placement": "paper", "sampling": "uniform", "primal_fraction": 0.5}
    biased = run(experiment(6, uniform, stop={"rounds": 3}), output=tmp_path / "biased")
    ((text, stage),) = asked(biased.folder, WARNINGS)  # type: ignore[arg-type]
    assert text.startswith("sampling uniform in placement paper is biased")
    assert stage == "pdmm"
    lean = run(experiment(6, {**uniform, "placement": "lean"}, stop={"rounds": 3}), output=tmp_path / "lean")
    assert asked(lean.folder, WARNINGS) == []  # type: ignore[arg-type]


@pytest.mark.parametrize(("n_rows", "said"), [((1, 2, 9), "2 users have"), ((9, 2, 9), "1 user has"), ((3, 3, 9), None)])
def test_users_whose_rows_their_sums_give_away_are_counted(n_rows: tuple[int, ...], said: str | None, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["user", "a", "b", "y"])
        for user, count in enumerate(n_rows):
            writer.writerows([f"u{user}", *random.normal(size=3).tolist()] for _ in range(count))
    data = {"source": "csv", "path": "rows.csv", "user_column": "user", "target_column": "y", "standardize": True, "test_fraction": 0}
    described = {
        "name": "few",
        "data": data,
        "problem": {"loss": "least_squares", "l2": 0.1},
        "method": {"name": "pdmm", "penalty": 0.1},
        "stop": {"rounds": 2},
    }
    run(described, data=tmp_path, output=tmp_path / "run")
    found = asked(tmp_path / "run", WARNINGS)
    assert len(found) == (said is not None)
    if said is not None:
        assert found[0][0].startswith(f"{said} fewer than 3 training rows")


@pytest.mark.parametrize("name", ["plain.csv", "huge-scale.csv"])
def test_clusters_on_the_way_and_at_the_end_are_counted_by_one_rule_without_units(name: str, tmp_path: Path) -> None:
    """In huge-scale.csv a coefficient is 1e-9 as large as the others; it alone tells the two regions apart."""
    data = {"source": "csv", "path": name, "user_column": "school", "target_column": "score"}
    described = {
        "name": "units",
        "data": data,
        "problem": {"loss": "least_squares", "l2": 1e-3},
        "method": {"name": "pdmm", "penalty": 0.3},
        "stop": {"rounds": 60},
    }
    result = run(described, data=CASES, output=tmp_path / "run")
    number = result.stages.index("pdmm")
    latest = [json.loads(labels) for stage, _, labels in asked(result.folder, MEMBERSHIPS) if stage == number][-1]  # type: ignore[arg-type]
    assert list((result.clusters or {}).values()) == latest
    assert result.metrics["pdmm"]["clusters"] == result.history()[-1]["clusters"] == max(latest) + 1
    assert not set(latest[::2]) & set(latest[1::2]), "the regions have slopes of opposite sign"
