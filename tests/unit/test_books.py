"""The books that an aggregator brings of its own links, also those of one that does not keep to the contract."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import time
import zlib
from pathlib import Path

import numpy as np
import pytest

from coterie.errors import ProtocolError, RunError
from coterie.experiment.config import experiment_from
from coterie.record.ledger import Own, Row, as_ranges, check_ranges, of_ranges, pack, pack_own, unpack, unpack_own
from coterie.v1 import session_pb2
from coterie_server.record.rundb import WITHIN, RunDatabase
from coterie_server.session.hub import Hub
from coterie_server.session.refusal import Refusal

ROWS = [
    (Row(1, 1, 0, "down", "evaluation.FinalModels", 2, 6, 48, 70, 1), Own(1, 0, 3, 1)),
    (Row(1, 1, 0, "up", "evaluation.Scores", 0, 6, 48, 90, 1), Own(1, 0, 3, 0)),
    (Row(2, 2, 1, "down", "evaluation.FinalModels", 2, 6, 48, 70, 1), Own(0, 0, 4, 2)),
]
SETS = ["0-2,7", "4"]


def test_an_aggregators_side_of_a_link_comes_back_as_it_was() -> None:
    (book,) = pack_own(ROWS, "host-1", SETS)
    assert (book.link, book.of_parent, book.user_sets) == ("host-1", True, "0-2,7\n4")
    assert unpack_own(book) == ROWS
    (plain,) = pack([row for row, _ in ROWS], "host-1")
    assert (plain.link, plain.of_parent) == ("host-1", False)
    assert unpack(plain) == [row for row, _ in ROWS]


@pytest.mark.parametrize("numbers", [[], [3], [0, 1, 2, 7], [5, 9, 10]])
def test_ranges_are_read_as_they_are_written(numbers: list[int]) -> None:
    text = as_ranges(np.array(numbers, dtype=np.int64))
    assert of_ranges(text).tolist() == numbers
    check_ranges(text, np.arange(11))
    if numbers:
        with pytest.raises(ProtocolError, match="not all of whom are among its users"):
            check_ranges(text, np.array(numbers[1:], dtype=np.int64))


def test_a_set_of_users_is_the_same_in_whatever_order_they_come() -> None:
    assert as_ranges(np.array([7, 1, 2, 0, 1])) == "0-2,7"


@pytest.mark.parametrize("text", ["x", "1-", "-1", "1--2", "+1", "1, 2", "\u0661", "1,,2", "3-1", "2,1", "0-2,2", "1_0", "9" * 19])
def test_ranges_that_nobody_would_write_are_refused(text: str) -> None:
    with pytest.raises(ProtocolError, match="wanted ascending ranges of numbers such as 0-19,25"):
        check_ranges(text, np.arange(11))


def test_ranges_of_very_many_users_are_refused_without_counting_them() -> None:
    with pytest.raises(ProtocolError, match="0-999999999999999999, not all of whom"):
        check_ranges("0-999999999999999999", np.arange(11))


def test_rows_of_another_width_or_with_unknown_sets_are_refused() -> None:
    (book,) = pack_own(ROWS, "host-1", SETS)
    with pytest.raises(ProtocolError, match="a ledger book brings"):
        unpack(book)
    (short,) = pack_own(ROWS, "host-1", SETS[:1])
    with pytest.raises(ProtocolError, match="names set 2 of users, but lists 1"):
        unpack_own(short)
    (useless,) = pack_own([(ROWS[0][0], Own(2, 0, 3, 1))], "host-1", SETS)
    with pytest.raises(ProtocolError, match="2 times useful, wanted 0 or 1"):
        unpack_own(useless)
    (nobody,) = pack_own(ROWS[:1], "host-1", [""])
    assert unpack_own(nobody) == ROWS[:1], "a set of nobody is a set"
    book.rows = zlib.compress(b"nonsense")
    with pytest.raises(ProtocolError, match="a ledger book brings 8 bytes"):
        unpack_own(book)


def hub(topology: str, database: RunDatabase, **rules: object) -> Hub:
    content = {
        "name": "books",
        "data": {"source": "ellipses"},
        "problem": {"loss": "squared_hinge"},
        "method": {"name": "oracle"},
        "federation": {"topology": topology, **rules},
    }
    return Hub(experiment_from(content), "run-1", database, time.monotonic)


def test_the_coordinators_database_takes_an_aggregators_books(tmp_path: Path) -> None:
    below = RunDatabase(tmp_path / "below.db", scope=WITHIN)
    for row, own in ROWS:
        users = None if own.user_set == 0 else of_ranges(["0-1", "2"][own.user_set - 1])
        below.book("host-1", (own.stage, own.round), [(row, users)], bool(own.useful))
    below.book_host("host-1", [ROWS[0][0]])
    below.event("restart", "something happened", host="host-1")
    assert below.links() == ["host-1"]
    above = RunDatabase(tmp_path / "above.db")
    numbers = np.array([10, 11, 14])  # of the aggregator's members in the whole run
    for book in pack_own(below.own_rows("host-1"), "host-1", below.user_sets(numbers)):
        above.book_within(f"x/{book.link}", unpack_own(book), book.user_sets.split("\n"))
    above.events_of("x", "\n".join(below.event_lines()))
    above.flush()
    with contextlib.closing(sqlite3.connect(tmp_path / "above.db")) as connection:
        listed = connection.execute(
            "SELECT seq, useful, round, scope, link, members FROM ledger LEFT JOIN user_sets ON user_set = id ORDER BY seq, kind"
        ).fetchall()
        events = connection.execute("SELECT kind, text, data FROM events").fetchall()
    assert listed == [
        (1, 1, 3, "within-cluster", "x/host-1", "10-11"),
        (1, 1, 3, "within-cluster", "x/host-1", None),
        (2, 0, 4, "within-cluster", "x/host-1", "14"),
    ]
    ((kind, text, data),) = events
    assert (kind, text, json.loads(data)) == ("restart", "something happened", {"host": "host-1", "aggregator": "x"})
    assert list(below.host_rows("host-1")) == [ROWS[0][0]]
    below.close()
    above.close()


@pytest.mark.parametrize(
    "lines",
    [
        "no JSON",
        '[1, "kind"]',
        '["late", "kind", "text", {}]',
        '[1, "kind", "text", 5]',
        '[NaN, "kind", "text", {}]',
        f'[1{"0" * 400}, "kind", "text", {{}}]',
        '[1, "kind", "\\ud800", {}]',
        '[1, "kind", "text", {"host": NaN}]',
    ],
)
def test_events_that_are_none_are_refused(lines: str) -> None:
    with contextlib.closing(RunDatabase(None)) as database, pytest.raises(ProtocolError, match="an event of its book is"):
        database.events_of("x", lines)


def hello(name: str, clusters: list[str], *, aggregator: bool) -> session_pb2.Hello:
    users = [session_pb2.User(name=f"{name}-{i}", cluster=cluster) for i, cluster in enumerate(clusters)]
    return session_pb2.Hello(protocol=1, host=name, users=users, aggregator=aggregator)


class Quiet:
    """A link that nobody listens to."""

    def send(self, encoded: object) -> None: ...
    async def flush(self) -> None: ...
    def send_frame(self, frame: object) -> None: ...
    def close(self, code: str, reason: str) -> None: ...


@pytest.mark.parametrize(
    ("topology", "said", "reason"),
    [
        ("flat", hello("x", ["x"], aggregator=True), "'x' is an aggregator, but this parent waits for client hosts"),
        ("clusters", hello("h", ["x"], aggregator=False), "'h' is a client host, but this parent waits for the clusters' aggregators"),
        ("clusters", hello("x", ["x", "y"], aggregator=True), "user 'x-1' of aggregator 'x' is of cluster 'y', wanted cluster 'x'"),
        ("clusters", hello("x", [""], aggregator=True), "aggregator 'x' brings users without a known cluster, wanted those of one cluster"),
    ],
)
def test_who_is_not_of_the_tier_is_turned_away(topology: str, said: session_pb2.Hello, reason: str) -> None:
    with contextlib.closing(RunDatabase(None)) as database, pytest.raises(Refusal, match=reason) as refused:
        hub(topology, database).hello(said, Quiet())
    assert refused.value.code == "INVALID_ARGUMENT"


def test_a_cluster_has_one_aggregator_which_may_come_again() -> None:
    with contextlib.closing(RunDatabase(None)) as database:
        parent = hub("clusters", database, hosts=2)
        first, again = hello("a", ["x"], aggregator=True), Quiet()
        parent.hello(first, Quiet())
        with pytest.raises(Refusal, match="cluster 'x' is claimed by aggregator 'b', but another aggregator speaks for it") as refused:
            parent.hello(hello("b", ["x"], aggregator=True), Quiet())
        assert refused.value.code == "ALREADY_EXISTS"
        assert parent.journal.refused["b"].endswith("but aggregator 'a' speaks for it")
        parent.hello(first, again)
        parent.lost("a", again, "killed")
        parent.hello(first, again)
        parent.lost("a", again, "killed for good")
        parent.hello(hello("b", ["x"], aggregator=True), Quiet())
        assert list(parent.roster.hosts) == ["b"], "nothing was asked of the first yet"


def test_a_cluster_that_nobody_waits_for_is_turned_away_and_the_one_that_is_missing_is_named() -> None:
    async def test(parent: Hub) -> None:
        parent.hello(hello("x", ["x"], aggregator=True), Quiet())
        with pytest.raises(Refusal, match=r"cluster 'w' is not in federation.clusters, want one of x, y"):
            parent.hello(hello("w", ["w"], aggregator=True), Quiet())
        with pytest.raises(
            RunError,
            match=r"need 2 of 2 aggregators, have 1 after 0\.01 s without another \(federation\.join_timeout_s\): x; "
            r"nobody speaks for cluster 'y'; cluster 'w' is",
        ):
            await parent.gather()

    with contextlib.closing(RunDatabase(None)) as database:
        asyncio.run(test(hub("clusters", database, hosts=2, clusters=["x", "y"], join_timeout_s=0.01)))
