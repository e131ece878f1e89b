"""Queries over a run database: how traffic is added up, and which disagreements of the two books are differences."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Mapping, Sequence

import pytest

from coterie.errors import ConfigError
from coterie.experiment.config import StopRule
from coterie.record.ledger import DOWN, SESSION, UP, Row
from coterie.wire.codec import ENVELOPE
from coterie_server.record import summary
from coterie_server.record.rundb import RunDatabase
from coterie_server.record.summary import Shortfall

QUERY, SLOPES, CONSTANTS = "consensus.GroupModel", "consensus.Slopes", "prepare.AgreedScale"


@pytest.fixture
def database() -> Iterator[RunDatabase]:
    with contextlib.closing(RunDatabase(None)) as opened:
        opened.put("attempt", "1")
        yield opened


def row(seq: int, direction: str, kind: str, vectors: int = 2, message_bytes: int = 60, attempt: int = 1, resent: int = 0) -> Row:
    return Row(seq, attempt, resent, direction, kind, vectors, 3 * vectors, 24 * vectors, message_bytes, 1)


def book(database: RunDatabase, link: str, *rows: Row, stage: int = 0, useful: bool = True) -> None:
    database.book(link, (stage, 1), [(one, None) for one in rows], useful)


def connection_of(database: RunDatabase) -> sqlite3.Connection:
    database.flush()
    return database.connection


def test_rows_add_up_over_links_and_a_broadcast_counts_once_in_vectors_and_per_host_in_bytes(database: RunDatabase) -> None:
    for link in ("a", "b", "c"):
        book(database, link, row(1, DOWN, QUERY), row(1, DOWN, CONSTANTS, vectors=1, message_bytes=30))
    totals = {one.step: one for one in summary.traffic(connection_of(database))}
    query, constants = totals["query"], totals[next(step for step in totals if step != "query")]
    assert (query.vectors, query.scalars, query.payload_bytes, query.message_bytes, query.frames) == (6, 18, 144, 180, 3)
    assert query.wire_bytes == 180 + 5 * 3
    assert (constants.vectors, constants.scalars, constants.payload_bytes, constants.message_bytes) == (1, 3, 72, 90)


def test_two_broadcasts_count_twice(database: RunDatabase) -> None:
    book(database, "a", row(1, DOWN, CONSTANTS), row(2, DOWN, CONSTANTS))
    assert [one.vectors for one in summary.traffic(connection_of(database))] == [4]


def test_the_closed_form_stands_beside_its_step_and_a_step_without_traffic_is_shown(database: RunDatabase) -> None:
    book(database, "a", row(1, DOWN, QUERY), stage=1)
    database.result(1, {}, {("query", "down"): 2.0, ("gradient", "up"): 4.0, ("model", "up"): 0.0})
    listed = [(one.step, one.direction, one.vectors, one.expected) for one in summary.traffic(connection_of(database))]
    assert listed == [("query", "down", 2, 2.0), ("gradient", "up", 0, 4.0)]


def test_a_stage_under_way_has_taken_the_time_from_its_start_to_the_end_of_its_latest_round() -> None:
    times = iter([0.0, 100.0, 100.5, 107.0])
    with contextlib.closing(RunDatabase(None, clock=lambda: next(times, 107.0))) as database:
        database.stage(0, "pdmm", "pdmm", 0, "", 0.0)
        database.stage(1, "refit", "pdmm", 0, "", 0.0)
        for number in range(3):
            database.figures(0, number, {} if number == 0 else {"objective": 1.0})
        under_way, begun = summary.stages(connection_of(database))
        assert (under_way.rounds, under_way.seconds, begun.seconds) == (2, 7.0, 0.0)
        database.stage(0, "pdmm", "pdmm", 2, "2 rounds", 6.5)
        assert summary.stages(connection_of(database))[0].seconds == 6.5


def test_the_time_of_a_stage_is_that_of_all_attempts_without_the_pauses_between_them() -> None:
    now = [0.0]
    with contextlib.closing(RunDatabase(None, clock=lambda: now[0])) as database:
        database.stage(0, "pdmm", "pdmm", 0, "", 0.0)
        for at, number in ((1.0, 0), (3.0, 1), (103.0, 2), (104.0, 3)):
            if number == 2:
                now[0] = 102.5
                database.event("start", "attempt 2 starts", attempt=2)
            now[0] = at
            database.figures(0, number, {} if number == 0 else {"objective": 1.0})
        now[0] = 204.0
        database.event("start", "attempt 3 starts", attempt=3)
        assert database.worked_s(0) == 2.0 + 0.5 + 1.0
        assert summary.stages(connection_of(database))[0].seconds == 3.5


def test_repeats_and_the_session_stand_apart(database: RunDatabase) -> None:
    book(database, "a", row(1, DOWN, QUERY))
    book(database, "a", row(1, DOWN, QUERY, resent=1), useful=False)
    book(database, "a", row(0, UP, SESSION, vectors=0))
    connection = connection_of(database)
    assert [(one.stage, one.step, one.vectors) for one in summary.traffic(connection)] == [(summary.SESSION, "control", 0), (0, "query", 2)]
    assert [(one.stage, one.step, one.vectors) for one in summary.traffic(connection, repeats=True)] == [(0, "query", 2)]


def test_stages_and_histories_are_read_back(database: RunDatabase) -> None:
    database.stage(0, "global", "global", 2, "converged", 0.5)
    database.figures(0, 1, {"objective": 3.0})
    database.figures(0, 2, {"objective": 2.0, "gap": float("nan")})
    database.result(0, {"heldout_loss": 0.25}, {})
    connection = connection_of(database)
    stage = summary.stage_named(connection, "global")
    assert (stage.rounds, stage.outcome, stage.results) == (2, "converged", {"heldout_loss": 0.25})
    first, second = summary.history(connection, 0)
    assert first == {"round": 1.0, "objective": 3.0}
    assert second["gap"] != second["gap"]
    assert summary.has_rounds(connection)
    with pytest.raises(ConfigError, match="no stage 'pdmm', want one of global"):
        summary.stage_named(connection, "pdmm")


# ---- stages that ended too early


def stopped(database: RunDatabase, outcome: str, rounds: Sequence[Mapping[str, float]]) -> sqlite3.Connection:
    database.stage(0, "pdmm", "pdmm", len(rounds), outcome, 0.5)
    for number, figures in enumerate(rounds, 1):
        database.figures(0, number, figures)
    return connection_of(database)


def test_a_stage_that_ended_by_its_rounds_falls_short_by_the_residual_of_its_last_round(database: RunDatabase) -> None:
    rounds = [{"primal_residual": 9.0, "dual_residual": 8.0}, {"primal_residual": 0.5, "dual_residual": 0.7}]
    connection = stopped(database, "2 rounds", rounds)
    assert summary.shortfalls(connection, StopRule(residual=1e-5)) == [Shortfall("pdmm", "2 rounds", "residual", 0.7, 1e-5)]
    assert summary.shortfalls(connection, StopRule()) == [Shortfall("pdmm", "2 rounds", "residual", 0.7, 1e-6)]
    assert summary.shortfalls(connection, StopRule(residual=None)) == []


def test_a_stage_that_ended_by_the_clock_falls_short_of_the_objective_wanted(database: RunDatabase) -> None:
    connection = stopped(database, "5 s", [{"objective": 3.0}, {"objective": 2.5}])
    stop = StopRule(objective_gap=0.01, reference_objective=2.0)
    assert summary.shortfalls(connection, stop) == [Shortfall("pdmm", "5 s", "objective gap", 0.25, 0.01)]


def test_a_method_that_knows_when_it_has_converged_falls_short_when_it_has_not(database: RunDatabase) -> None:
    assert summary.shortfalls(stopped(database, "500 rounds", [{"converged": 0.0}]), StopRule()) == [Shortfall("pdmm", "500 rounds", "")]


@pytest.mark.parametrize("outcome", ["residuals at most 1e-05", "objective gap at most 0.01", "converged", ""])
def test_a_stage_that_ended_by_its_rule_or_is_under_way_does_not_fall_short(database: RunDatabase, outcome: str) -> None:
    connection = stopped(database, outcome, [{"primal_residual": 1.0, "converged": 1.0}])
    assert summary.shortfalls(connection, StopRule(residual=1e-5)) == []


# ---- the two books


def test_equal_books_agree(database: RunDatabase) -> None:
    rows = [row(1, DOWN, QUERY), row(1, DOWN, ENVELOPE, 0), row(1, UP, SLOPES)]
    book(database, "a", *rows, row(0, UP, SESSION, 0))
    database.book_host("a", rows)
    books = summary.reconcile(connection_of(database))
    assert books.agree
    assert (books.n_agreed, books.lost_by_host, books.lost_by_parent, books.absent) == (3, {}, {}, ())


def test_one_byte_is_a_difference_that_names_host_and_exchange(database: RunDatabase) -> None:
    book(database, "a", row(1, DOWN, QUERY, message_bytes=60), row(2, DOWN, QUERY))
    database.book_host("a", [row(1, DOWN, QUERY, message_bytes=61), row(2, DOWN, QUERY)])
    books = summary.reconcile(connection_of(database))
    assert not books.agree
    assert books.n_agreed == 1
    (sentence,) = books.differences
    assert all(part in sentence for part in ("exchange 1", " 60 bytes", "host 'a' 61"))


@pytest.mark.parametrize("side", ["parent", "host"])
def test_a_row_that_one_side_alone_has_is_a_difference_when_nobody_was_lost(database: RunDatabase, side: str) -> None:
    both, extra = row(1, DOWN, QUERY), row(2, DOWN, QUERY)
    book(database, "a", both, *([extra] if side == "parent" else []))
    database.book_host("a", [both, *([extra] if side == "host" else [])])
    assert summary.reconcile(connection_of(database)).n_differences == 1


def test_a_row_of_nothing_is_a_row(database: RunDatabase) -> None:
    book(database, "a", row(1, DOWN, QUERY), row(2, DOWN, QUERY))
    nothing = Row(2, 1, 0, UP, SLOPES, 0, 0, 0, 0, 0)
    database.book_host("a", [row(1, DOWN, QUERY), row(2, DOWN, QUERY), nothing])
    assert summary.reconcile(connection_of(database)).n_differences == 1


def test_what_a_killed_host_had_booked_is_lost_and_no_difference(database: RunDatabase) -> None:
    book(database, "a", row(1, DOWN, QUERY), row(2, DOWN, QUERY))
    book(database, "b", row(1, DOWN, QUERY))
    database.book_host("a", [row(1, DOWN, QUERY)])
    database.book_host("b", [row(1, DOWN, QUERY)])
    database.event("lost", "host 'a' is gone", host="a", round=1)
    books = summary.reconcile(connection_of(database))
    assert books.agree
    assert (books.n_agreed, books.lost_by_host) == (2, {"a": 1})


def test_what_a_killed_coordinator_had_not_written_is_lost_and_no_difference(database: RunDatabase) -> None:
    database.put("attempt", "2")
    book(database, "a", row(1, DOWN, QUERY, attempt=1))
    database.book_host("a", [row(1, DOWN, QUERY, attempt=1), row(2, DOWN, QUERY, attempt=1), row(2, DOWN, QUERY, attempt=2)])
    books = summary.reconcile(connection_of(database))
    assert books.lost_by_parent == {"a": 1}
    assert books.n_differences == 1  # of the attempt that was not killed


def test_a_host_whose_book_is_missing_is_named(database: RunDatabase) -> None:
    book(database, "a", row(1, DOWN, QUERY))
    books = summary.reconcile(connection_of(database))
    assert (books.absent, books.n_differences) == (("a",), 0)
