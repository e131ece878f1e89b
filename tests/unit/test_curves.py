"""What a stage has reached in each round and what that had cost by then, by hand."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator

import numpy as np
import pytest

from coterie.errors import ConfigError
from coterie.record.ledger import DOWN, UP, Own, Row
from coterie_server.record.curves import GAP, Curves, Goal, closest, curves, goal_from, reached, why_not_reached, with_figure_of
from coterie_server.record.rundb import BETWEEN, RunDatabase
from coterie_server.record.summary import StageSummary, final_stage, stage_named

QUERY, SLOPES = "consensus.GroupModel", "consensus.Slopes"
OBJECTIVES = (4.0, 2.2, 2.0, 2.5)


class Clock:
    """Advances by hand."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def sent(database: RunDatabase, number: int, n_bytes: int, direction: str = DOWN, *, stage: int = 1, useful: bool = True) -> None:
    kind = QUERY if direction == DOWN else SLOPES
    database.book("x", (stage, number), [(Row(7, 1, 0, direction, kind, 1, 3, 24, n_bytes, 1), None)], useful)


@pytest.fixture
def database() -> Iterator[RunDatabase]:
    """A stage of four rounds after another, of an experiment of method pdmm."""
    clock = Clock()
    with contextlib.closing(RunDatabase(None, clock, scope=BETWEEN)) as opened:
        opened.put("experiment", json.dumps({"method": {"name": "pdmm"}, "stop": {"rounds": 4}}))
        opened.stage(0, "local", "local", 1, "converged", 1.0)
        opened.stage(1, "pdmm", "pdmm", 4, "4 rounds", 9.0)
        sent(opened, 1, 1000, stage=0)
        opened.figures(1, 0, {})
        sent(opened, 0, 5)
        for number, objective in enumerate(OBJECTIVES, 1):
            clock.now += number
            sent(opened, number, 10**number)
            sent(opened, number, 10, UP)
            sent(opened, number, 77, useful=False)
            figures = {"objective": objective, "primal_residual": 1 / number}
            opened.figures(1, number, figures if number != 2 else {"objective": objective})
        opened.book_within("x/h", [(Row(9, 1, 0, UP, SLOPES, 1, 3, 24, 50, 1), Own(1, 1, 3, 0))], [])
        yield opened


def connection_of(database: RunDatabase) -> sqlite3.Connection:
    database.flush()
    return database.connection


def curves_of(database: RunDatabase, stage: str = "pdmm") -> Curves:
    connection = connection_of(database)
    return curves(connection, stage_named(connection, stage))


def test_bytes_add_up_over_rounds_by_direction_and_scope(database: RunDatabase) -> None:
    made = curves_of(database)
    assert made.rounds.tolist() == [0, 1, 2, 3, 4]
    assert made.wire_bytes[DOWN, BETWEEN].tolist() == made.bytes_by(direction=DOWN).tolist() == [10, 25, 130, 1135, 11140]
    assert made.bytes_by(direction=UP, scope=BETWEEN).tolist() == [0, 15, 30, 45, 60]
    assert made.bytes_by(scope="within-cluster").tolist() == [0, 0, 0, 55, 55]
    assert made.bytes_by()[-1] == 11140 + 60 + 55
    assert made.bytes_by(scope="direct").tolist() == [0] * 5
    assert made.is_two_tier
    assert not curves(database.connection, stage_named(database.connection, "pdmm"), with_bytes=False).wire_bytes


def test_figures_and_seconds_have_a_place_for_each_round(database: RunDatabase) -> None:
    made = curves_of(database)
    assert made.seconds.tolist() == [0, 1, 3, 6, 10]
    np.testing.assert_array_equal(made.figures["objective"], [np.nan, *OBJECTIVES])
    np.testing.assert_array_equal(made.figures["primal_residual"], [np.nan, 1, np.nan, 1 / 3, 1 / 4])


def test_the_gap_is_from_the_smallest_objective_of_the_stage_or_from_the_reference(database: RunDatabase) -> None:
    made = curves_of(database)
    np.testing.assert_allclose(made.figures[GAP], [np.nan, 1.0, 0.1, 0.0, 0.25])
    assert not made.has_reference
    database.put("experiment", json.dumps({"method": {"name": "pdmm"}, "stop": {"reference_objective": -1.6}}))
    made = curves_of(database)
    np.testing.assert_allclose(made.figures[GAP], [np.nan, 3.5, 2.375, 2.25, 2.5625])
    assert made.has_reference


def test_the_reference_objective_is_not_that_of_another_method(database: RunDatabase) -> None:
    database.put("experiment", json.dumps({"method": {"name": "pdmm"}, "stop": {"reference_objective": 1.0}}))
    database.figures(0, 0, {})
    database.figures(0, 1, {"objective": 3.0})
    made = curves_of(database, "local")
    np.testing.assert_array_equal(made.figures[GAP], [np.nan, 0.0])
    assert not made.has_reference


def test_an_objective_that_was_never_finite_has_no_gap(database: RunDatabase) -> None:
    database.figures(0, 0, {})
    database.figures(0, 1, {"objective": float("inf"), "primal_residual": float("nan")})
    made = curves_of(database, "local")
    assert np.isnan(made.figures[GAP]).all()
    with pytest.raises(ConfigError, match="stage 'local' has no figure 'gap' of its rounds, want one of: gap, objective"):
        reached(made, Goal(GAP, 1.0))


def test_the_residual_of_a_goal_is_the_larger_of_both(database: RunDatabase) -> None:
    goal = goal_from("residual=0.5")
    with pytest.raises(ConfigError, match="has no figure 'residual'"):
        reached(curves_of(database, "local"), goal)
    assert reached(with_figure_of(goal, curves_of(database)), goal) == 3
    database.figures(1, 3, {"primal_residual": 1 / 3, "dual_residual": 0.6})
    made = with_figure_of(goal, curves_of(database))
    assert reached(made, goal) == 4


def test_a_gap_that_was_not_traced_names_the_setting_that_makes_it_known(database: RunDatabase) -> None:
    connection_of(database).execute("DELETE FROM figures")
    database.figures(1, 4, {"clusters": 2.0})
    with pytest.raises(ConfigError, match=r"has no figure 'gap' of its rounds, want one of: clusters$"):
        reached(curves_of(database), Goal(GAP, 1.0))
    database.put("experiment", json.dumps({"method": {"name": "pdmm", "trace_every": 0}}))
    with pytest.raises(ConfigError, match=r"want one of: clusters; a run with method.trace_every=100"):
        reached(curves_of(database), Goal(GAP, 1.0))
    with pytest.raises(ConfigError, match=r"'accuracy' of its rounds, want one of: clusters$"):
        reached(curves_of(database), Goal("accuracy", 1.0))


@pytest.mark.parametrize(
    ("goal", "wanted"),
    [("gap = 0.11", 2), ("gap=0.5", 2), ("objective=2.1", 3), ("objective=1.9", None), ("primal_residual=0.3", 4)],
)
def test_a_goal_is_reached_in_the_first_round_that_has_it(database: RunDatabase, goal: str, wanted: int | None) -> None:
    assert reached(curves_of(database), goal_from(goal)) == wanted


@pytest.mark.parametrize("goal", ["gap=1e-3", "gap=0"])
def test_a_gap_that_only_the_smallest_objective_itself_has_is_not_reached(database: RunDatabase, goal: str) -> None:
    made = curves_of(database)
    assert reached(made, goal_from(goal)) is None
    said = why_not_reached(made, goal_from(goal))
    assert "round 3 of 4, the first that has gap <= " in said
    assert "has not ended" not in said
    database.stage(1, "pdmm", "pdmm", 4, "", 9.0)
    assert why_not_reached(curves_of(database), goal_from(goal)).endswith("the stage has not ended: it was looked at after round 4")
    database.put("experiment", json.dumps({"method": {"name": "pdmm"}, "stop": {"reference_objective": 2.0}}))
    assert reached(curves_of(database), goal_from(goal)) == 3


def test_of_an_accuracy_more_is_better(database: RunDatabase) -> None:
    for number, accuracy in enumerate((0.5, 0.9, 0.8), 1):
        database.figures(1, number, {"mean_accuracy": accuracy})
    made = curves_of(database)
    assert reached(made, goal_from("mean_accuracy=0.8")) == 2
    assert reached(made, goal_from("mean_accuracy=0.95")) is None
    assert closest(made, goal_from("mean_accuracy=0.95")) == (2, 0.9)
    assert closest(made, goal_from("objective=1")) == (3, 2.0)
    assert (str(goal_from("mean_accuracy=0.95")), str(goal_from("gap=1e-3"))) == ("mean_accuracy >= 0.95", "gap <= 0.001")


@pytest.mark.parametrize("text", ["", "gap", "gap=", "gap=small", "gap=nan", "gap=inf", "=1", "gap<1", "gap=1=2"])
def test_what_is_no_goal_is_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match="want FIGURE=VALUE such as gap=1e-3"):
        goal_from(text)


def test_a_round_under_way_is_not_there_yet(database: RunDatabase) -> None:
    database.stage(2, "refit", "pdmm", 0, "", 0.0)
    sent(database, 0, 95, stage=2)
    assert curves_of(database, "refit").rounds.tolist() == [0], "nothing of it is over, not even its start"
    database.figures(2, 0, {})
    database.figures(2, 1, {"objective": 3.0})
    sent(database, 2, 1000, stage=2)
    made = curves_of(database, "refit")
    assert made.rounds.tolist() == [0, 1]
    assert made.bytes_by().tolist() == [100, 100]


def test_the_final_stage_is_the_results_or_the_last_that_has_begun(database: RunDatabase) -> None:
    assert final_stage(connection_of(database)).name == "pdmm"
    database.put("final_stage", "local")
    assert final_stage(database.connection) == StageSummary(0, "local", "local", 1, "converged", 1.0)
    with contextlib.closing(RunDatabase(None)) as empty, pytest.raises(ConfigError, match="the run has no stage yet"):
        final_stage(empty.connection)
