"""Questions to the ledger: sums by hand, and those of whole runs beside sums that know nothing of SQL."""

from __future__ import annotations

import contextlib
import itertools
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.errors import ConfigError
from coterie.record.ledger import DOWN, SESSION, UP, Own, Row, of_ranges
from coterie.wire.codec import ENVELOPE
from coterie_server.interface.half import Members
from coterie_server.record.query import (
    KEYS,
    MEASURES,
    ROW_COLUMNS,
    SESSION_NAME,
    Group,
    Query,
    closed_forms,
    grand_total,
    has_shares,
    numbered_totals,
    rows,
    totals,
)
from coterie_server.record.rundb import BETWEEN, WITHIN, RunDatabase, open_run
from tests.simulation import Faults, World, small_experiment
from tests.two_tier import Tiers, small

QUERY, SLOPES, CONSTANTS = "consensus.GroupModel", "consensus.Slopes", "prepare.AgreedScale"  # rows, rows, a broadcast
NAMES, CLUSTERS, HOSTS = ("u0", "a, b", "u/2", 'u"3"'), ("x", "x", "y", "y"), ("one", "one", "one", "two")


@pytest.fixture
def database() -> Iterator[RunDatabase]:
    with contextlib.closing(RunDatabase(None)) as opened:
        opened.members(Members(NAMES, CLUSTERS), dict(zip(NAMES, HOSTS, strict=True)))
        yield opened


def row(seq: int, direction: str, kind: str, vectors: int = 6, message_bytes: int = 120, attempt: int = 1, resent: int = 0) -> Row:
    return Row(seq, attempt, resent, direction, kind, vectors, 3 * vectors, 24 * vectors, message_bytes, 2)


def book(
    database: RunDatabase, link: str, *listed: Row, stage: int = 0, number: int = 1, useful: bool = True, users: Sequence[int] | None = None
) -> None:
    own = None if users is None else np.array(users)
    database.book(link, (stage, number), [(one, own) for one in listed], useful)


def connection_of(database: RunDatabase) -> sqlite3.Connection:
    database.flush()
    return database.connection


def table(database: RunDatabase, query: Query, *measures: str) -> dict[tuple[Any, ...], tuple[float, ...]]:
    groups = totals(connection_of(database), query)
    return {group.keys: tuple(getattr(group, measure) for measure in measures) for group in groups}


# ---- by hand


def test_a_broadcast_counts_once_in_vectors_and_for_each_host_in_bytes_and_twice_where_it_is_sent_twice(database: RunDatabase) -> None:
    for seq, link in itertools.product((1, 2), ("one", "two")):
        book(database, link, row(seq, DOWN, CONSTANTS))
    (group,) = totals(connection_of(database), Query())
    assert (group.vectors, group.scalars, group.payload_bytes, group.message_bytes, group.frames) == (12, 36, 576, 480, 8)
    assert group.wire_bytes == 480 + 5 * 8


def test_what_aggregators_pass_on_is_another_broadcast_for_each(database: RunDatabase) -> None:
    database.book_within("x/h1", [(row(1, DOWN, CONSTANTS), Own(1, 0, 1, 0))], [])
    database.book_within("x/h2", [(row(1, DOWN, CONSTANTS), Own(1, 0, 1, 0))], [])
    database.book_within("y/h1", [(row(1, DOWN, CONSTANTS), Own(1, 0, 1, 0))], [])
    assert table(database, Query(("scope",)), "vectors", "message_bytes") == {(WITHIN,): (12, 360)}


def test_users_share_the_bytes_of_their_link_and_a_broadcast_is_whole_for_each(database: RunDatabase) -> None:
    book(database, "one", row(1, DOWN, QUERY))  # for the three behind it
    book(database, "one", row(2, DOWN, QUERY), users=[0, 2])
    book(database, "one", row(2, DOWN, CONSTANTS))
    book(database, "two", row(2, DOWN, CONSTANTS))
    assert table(database, Query(("user",)), "vectors", "message_bytes", "frames") == {
        ("u0",): (2 + 3 + 6, 40 + 60 + 40, pytest.approx(2 / 3 + 1 + 2 / 3)),
        ("a, b",): (2 + 6, 40 + 40, pytest.approx(4 / 3)),
        ("u/2",): (2 + 3 + 6, 40 + 60 + 40, pytest.approx(2 / 3 + 1 + 2 / 3)),
        ('u"3"',): (6, 120, 2),
    }
    both = Query(users=("u0", "a, b"))
    assert table(database, both, "vectors", "message_bytes") == {(): (4 + 3 + 6, pytest.approx(80 + 60 + 80))}, "the broadcast once"
    assert has_shares(connection_of(database), both)


def test_clusters_that_share_a_link_share_its_bytes_by_their_users(database: RunDatabase) -> None:
    book(database, "one", row(1, UP, SLOPES), row(1, DOWN, CONSTANTS))
    book(database, "two", row(1, UP, SLOPES), row(1, DOWN, CONSTANTS))
    query = Query(("cluster", "step"))
    assert has_shares(connection_of(database), query)
    found = table(database, query, "vectors", "message_bytes")
    assert found == {
        ("x", "gradient"): (4, 80),
        ("x", "standardize"): (6, 80),
        ("y", "gradient"): (2 + 6, 40 + 120),
        ("y", "standardize"): (6, 40 + 120),
    }
    assert table(database, Query(("step",), clusters=("y",)), "message_bytes") == {("gradient",): (160,), ("standardize",): (160,)}
    whole = grand_total(connection_of(database), query, totals(connection_of(database), query))
    assert (whole.vectors, whole.message_bytes) == (12 + 6, 480), "the broadcast is in both clusters, and once in all"


def test_clusters_with_links_of_their_own_have_whole_messages(database: RunDatabase) -> None:
    database.members(Members(NAMES, CLUSTERS), dict(zip(NAMES, "xxyy", strict=True)))
    book(database, "x", row(1, UP, SLOPES))
    book(database, "y", row(1, UP, SLOPES), row(2, UP, SLOPES))
    query = Query(("cluster",))
    assert not has_shares(connection_of(database), query)
    assert table(database, query, "vectors", "frames") == {("x",): (6, 2), ("y",): (12, 4)}
    assert table(database, Query(clusters=("y",)), "vectors") == {(): (12,)}


def test_nobody_behind_a_link_leaves_nothing_out(database: RunDatabase) -> None:
    book(database, "gone", row(1, UP, SLOPES))
    assert table(database, Query(("user",)), "vectors", "message_bytes") == {("",): (6, 120)}
    assert table(database, Query(users=("u0",)), "vectors") == {}


def test_the_users_of_a_host_below_an_aggregator_are_those_of_its_session(database: RunDatabase) -> None:
    database.members(Members(NAMES, CLUSTERS), dict(zip(NAMES, ("x%/z", "x%/z", "y", "y"), strict=True)))
    sets = ["0", "2", "3"]
    database.book_within("x%25%2Fz/h", [(row(1, UP, SLOPES), Own(1, 0, 1, 0)), (row(0, UP, SESSION, 0), Own(1, 0, 0, 1))], sets)
    database.book_within("y/h", [(row(1, UP, SLOPES), Own(1, 0, 1, 0)), (row(0, UP, SESSION, 0), Own(1, 0, 0, 2))], sets)
    database.book_within("x%25%2Fz/unknown", [(row(1, UP, SLOPES), Own(1, 0, 1, 0))], sets)
    vectors = {("u0",): (6 + 3,), ("a, b",): (3,), ("u/2",): (6,)}
    assert table(database, Query(("user",), steps=("gradient",)), "vectors") == vectors, "an unknown host may have any of its aggregator's"
    assert table(database, Query(("cluster",), steps=("gradient",)), "vectors") == {("x",): (12,), ("y",): (6,)}


def test_parts_of_the_ledger(database: RunDatabase) -> None:
    database.stage(0, "local", "local", 1, "converged", 1.0)
    database.stage(1, "global", "global", 3, "converged", 1.0)
    book(database, "one", row(1, DOWN, QUERY, 1), stage=0, number=1)
    for number in (0, 1, 2, 3):
        book(database, "one", row(2 + number, DOWN, QUERY, 10**number), stage=1, number=number)
    book(database, "two", row(9, UP, SLOPES, 20000), stage=1, number=3)
    book(database, "two", row(9, UP, SLOPES, 5, resent=1), stage=1, number=3, useful=False)
    book(database, "two", row(0, UP, SESSION, 300000), stage=0, number=0)

    def vectors(**asked: Any) -> float:
        found = totals(connection_of(database), Query(**asked))
        return found[0].vectors if found else 0

    assert vectors() == 321112
    assert vectors(stages=("global",)) == vectors(stages=(1,)) == 21111
    assert vectors(stages=("session",)) == 300000
    assert vectors(first_round=2) == 21100
    assert vectors(last_round=1) == 1 + 1 + 10, "the session has no rounds"
    assert vectors(stages=("global",), first_round=0, last_round=0) == 1
    assert vectors(steps=("gradient",)) == vectors(directions=("up",), stages=("global",)) == 20000
    assert vectors(links=("one",)) == 1112
    assert vectors(useful=False) == 5
    assert vectors(useful=None) == 321117
    assert vectors(users=('u"3"',), stages=("global",)) == 20000
    assert list(table(database, Query(("stage", "round")))) == [
        *(("local", 1), ("global", 0), ("global", 1), ("global", 2), ("global", 3)),
        (SESSION_NAME, 0),
    ]


def test_what_the_run_does_not_have_is_one_sentence(database: RunDatabase) -> None:
    empty = connection_of(database)
    with pytest.raises(ConfigError, match="the run has no step 'S5', nor any other yet"):
        totals(empty, Query(steps=("S5",)))
    book(database, "one", row(1, DOWN, QUERY))
    for asked, said in {
        Query(("steps",)): "the ledger cannot be grouped by 'steps', want one of stage, round, step",
        Query(("step", "step")): "grouped by step, step, want each key once",
        Query(stages=("pdmm",)): "the run has no stage 'pdmm', nor any other yet",
        Query(steps=("S5",)): "the run has no step 'S5', want one of query",
        Query(directions=("left",)): "the run has no direction 'left', want one of down",
        Query(scopes=(BETWEEN,)): "the run has no scope 'between-cluster', want one of direct",
        Query(clusters=("z",)): "the run has no cluster 'z', want one of x, y",
        Query(links=("three",)): "the run has no link 'three', want one of one",
        Query(users=("u0", "u9")): "the run has no user 'u9', want one of u0, a, b, u/2",
    }.items():
        with pytest.raises(ConfigError, match=said):
            totals(connection_of(database), asked)
    many = tuple(f"user-{i}" for i in range(40))
    database.members(Members(many, ("x",) * 40), dict.fromkeys(many, "one"))
    with pytest.raises(ConfigError, match="no user 'usr-7', want one of 40 such as user-7"):
        totals(connection_of(database), Query(users=("usr-7",)))


def test_an_empty_ledger_and_one_before_the_first_stage_have_totals(database: RunDatabase) -> None:
    assert totals(connection_of(database), Query()) == totals(connection_of(database), Query(("user", "stage"))) == []
    assert grand_total(connection_of(database), Query(("user",)), []) == Group(())
    book(database, "one", row(1, DOWN, CONSTANTS), number=0)
    assert table(database, Query(("stage",)), "vectors") == {("0",): (6,)}
    assert [line[0] for line in rows(connection_of(database), Query())] == ["0"]


def test_stages_of_one_name_are_told_apart_by_their_numbers(database: RunDatabase) -> None:
    for number in (0, 1):
        database.stage(number, "twin", "global", 1, "converged", 1.0)
        book(database, "one", row(1 + number, DOWN, QUERY, 1 + number), stage=number)
    assert [group.vectors for group in totals(connection_of(database), Query(("stage",), stages=("twin",)))] == [1, 2]
    assert [group.vectors for group in totals(connection_of(database), Query(stages=(1,)))] == [2]


# ---- closed forms


def test_closed_forms_add_up_as_the_groups_do(database: RunDatabase) -> None:
    for number in (0, 1):
        database.stage(number, f"stage-{number}", "global", 1, "converged", 1.0)
        book(database, "one", row(1 + number, DOWN, QUERY), row(1 + number, UP, SLOPES), row(1 + number, DOWN, ENVELOPE, 0), stage=number)
        database.result(number, {}, {("query", "down"): 6.0, ("gradient", "up"): 5.5, ("model", "up"): 2.0, ("hessian", "up"): 0.0})
    connection = connection_of(database)
    assert closed_forms(connection, Query(("step",))) == {("query",): 12.0, ("gradient",): 11.0, ("model",): 4.0}
    assert closed_forms(connection, Query(("direction", "scope"))) == {("down", "direct"): 12.0, ("up", "direct"): 15.0}
    assert closed_forms(connection, Query(("stage",), directions=("up",))) == {(0,): 7.5, (1,): 7.5}
    assert closed_forms(connection, Query(stages=("stage-1",), steps=("query",))) == {(): 6.0}
    assert closed_forms(connection, Query(("step",), steps=("query",), stages=(0,))) == {("query",): 6.0}
    assert closed_forms(connection, Query(("step",), scopes=("direct",))) == closed_forms(connection, Query(("step",)))


def test_a_group_with_vectors_that_have_no_formula_has_none(database: RunDatabase) -> None:
    book(database, "one", row(1, DOWN, QUERY), row(1, UP, SLOPES))
    database.result(0, {}, {("query", "down"): 6.0})
    assert closed_forms(connection_of(database), Query(("step",))) == {("query",): 6.0, ("gradient",): None}
    assert closed_forms(connection_of(database), Query()) == {(): None}


def test_what_aggregators_pass_on_has_its_formula_in_each_scope(database: RunDatabase) -> None:
    book(database, "x", row(1, DOWN, QUERY))
    database.book_within("x/h", [(row(1, DOWN, QUERY), Own(1, 0, 1, 0))], [])
    database.result(0, {}, {("query", "down"): 6.0})
    assert closed_forms(connection_of(database), Query(("step",))) == {("query",): 12.0}
    assert closed_forms(connection_of(database), Query(("step",), scopes=(WITHIN,))) == {("query",): 6.0}


@pytest.mark.parametrize(
    "query",
    [
        *(Query((key,)) for key in ("round", "kind", "cluster", "link", "user", "attempt")),
        *(Query(first_round=1), Query(last_round=1), Query(clusters=("x",)), Query(links=("one",)), Query(users=("u0",))),
        *(Query(useful=False), Query(useful=None)),
    ],
)
def test_a_part_that_no_formula_is_for_has_none(database: RunDatabase, query: Query) -> None:
    book(database, "one", row(1, DOWN, QUERY))
    database.result(0, {}, {("query", "down"): 6.0})
    assert closed_forms(connection_of(database), query) == {}


# ---- the rows themselves


def test_rows_come_as_they_were_booked_with_the_names_of_their_users(database: RunDatabase) -> None:
    database.stage(0, "global", "global", 1, "converged", 1.0)
    book(database, "one", row(1, DOWN, QUERY, 2), users=[0, 1])
    book(database, "two", row(1, DOWN, CONSTANTS, 4))
    book(database, "two", row(1, DOWN, QUERY, 2, resent=1), useful=False)
    first, second = (dict(zip(ROW_COLUMNS, line, strict=True)) for line in rows(connection_of(database), Query()))
    assert first == {
        "stage": "global", "round": 1, "seq": 1, "attempt": 1, "resent": 0, "useful": 1, "step": "query", "kind": QUERY,
        "direction": "down", "scope": "direct", "link": "one", "users": ("u0", "a, b"), "is_broadcast": 0, "vectors": 2, "scalars": 6,
        "payload_bytes": 48, "message_bytes": 120, "wire_bytes": 130, "frames": 2,
    }  # fmt: skip
    assert (second["users"], second["is_broadcast"]) == (None, 1)
    linked = [line[ROW_COLUMNS.index("link")] for line in rows(connection_of(database), Query(users=('u"3"',)))]
    assert linked == ["two"]
    assert len(list(rows(connection_of(database), Query(clusters=("x",))))) == 1
    assert [line[ROW_COLUMNS.index("resent")] for line in rows(connection_of(database), Query(useful=False))] == [1]


# ---- whole runs, beside sums that know nothing of SQL


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A flat run with hosts of mixed clusters, of which one died, and the coordinator too."""
    folder = tmp_path_factory.mktemp("flat") / "run"
    method = {"name": "pdmm", "penalty": 0.1, "placement": "paper", "sampling": "paired", "primal_fraction": 0.5}
    World(small_experiment(method), folder, 2, Faults(hosts_before={9: "h1"}, coordinator=(14,))).run()
    return folder


@pytest.fixture(scope="module")
def tiers(tmp_path_factory: pytest.TempPathFactory) -> Tiers:
    """Three clusters with an aggregator and two hosts each."""
    made = Tiers(small(references=["global"]), tmp_path_factory.mktemp("tiers"), hosts_per_cluster=2)
    made.run()
    return made


Line = dict[str, Any]


def lines_of(connection: sqlite3.Connection, users_behind: dict[str, list[str]]) -> list[Line]:
    """All rows, with the users that each is about."""
    connection.row_factory = sqlite3.Row
    listed = [dict(line) for line in connection.execute("SELECT * FROM ledger ORDER BY rowid")]
    sets = {line["id"]: of_ranges(line["members"]).tolist() for line in connection.execute("SELECT * FROM user_sets")}
    members = [dict(line) for line in connection.execute("SELECT * FROM members ORDER BY position")]
    names = {line["number"]: line["name"] for line in connection.execute("SELECT number, name FROM stages")}
    connection.row_factory = None
    cluster_of = {member["name"]: member["cluster"] for member in members}
    for line in listed:
        own = line["user_set"]
        line["users"] = users_behind[line["link"]] if own is None else [members[i]["name"] for i in sets[own]]
        line["clusters"] = [cluster_of[user] for user in line["users"]]
        line["stage"] = SESSION_NAME if line["seq"] == 0 else names[line["stage"]]
        line["above"] = line["link"].split("/")[0] if line["scope"] == WITHIN else ""
    return listed


def summed(listed: list[Line], by: Sequence[str]) -> dict[tuple[Any, ...], list[float]]:
    """Vectors and message bytes by group."""
    found: dict[tuple[Any, ...], list[float]] = defaultdict(lambda: [0.0, 0.0])
    seen = set()
    for line in listed:
        labels = list(zip(line["users"], line["clusters"], strict=True)) if {"user", "cluster"} & set(by) else [("", "")]
        for user, cluster in labels:
            group = tuple({**line, "user": user, "cluster": cluster}[key] for key in by)
            found[group][1] += line["message_bytes"] / len(labels)
            exchange = (group, line["above"], line["seq"], line["attempt"], line["resent"], line["kind"])
            if line["is_broadcast"]:
                found[group][0] += line["vectors"] if exchange not in seen else 0
                seen.add(exchange)
            else:
                found[group][0] += line["vectors"] / len(labels)
    return found


GROUPINGS = [(), *((key,) for key in KEYS), *itertools.combinations(("stage", "step", "direction", "scope"), 3)]
GROUPINGS += [("stage", "round", "direction"), ("user", "step"), ("cluster", "scope", "direction"), ("link", "kind", "attempt")]


def check_groupings(connection: sqlite3.Connection, users_behind: dict[str, list[str]], useful: bool) -> None:
    listed = [line for line in lines_of(connection, users_behind) if line["useful"] == useful]
    assert listed
    for by in GROUPINGS:
        wanted = summed(listed, by)
        found = {group.keys: (group.vectors, group.message_bytes) for group in totals(connection, Query(by, useful=useful))}
        assert found.keys() == wanted.keys(), by
        for keys, (vectors, message_bytes) in found.items():
            assert (vectors, message_bytes) == (pytest.approx(wanted[keys][0]), pytest.approx(wanted[keys][1])), (by, keys)


def check_shares(connection: sqlite3.Connection, without: str) -> None:
    """Of rows, users' shares are the total, to the last bit of bytes that are whole; of broadcasts, the bytes are."""
    for by in ((), ("step", "direction"), ("scope",)):
        whole = {group.keys: group for group in totals(connection, Query(by))}
        shares: dict[tuple[Any, ...], Group] = {}
        for group in totals(connection, Query((*by, "user"))):
            numbers = (group.vectors, group.scalars, group.payload_bytes, group.message_bytes, group.frames)
            shares.setdefault(group.keys[:-1], Group(())).add(numbers)
        assert shares.keys() == whole.keys()
        for keys, group in whole.items():
            for measure in MEASURES[2:]:
                assert getattr(shares[keys], measure) == pytest.approx(getattr(group, measure), rel=1e-12)
    broadcasts = {kind for (kind,) in connection.execute("SELECT DISTINCT kind FROM ledger WHERE is_broadcast")}
    assert without in broadcasts
    by_kind = {group.keys: group.vectors for group in totals(connection, Query(("kind",)))}
    by_user: dict[str, float] = defaultdict(float)
    for group in totals(connection, Query(("kind", "user"))):
        by_user[group.keys[0]] += group.vectors
    for (kind,), vectors in by_kind.items():
        if kind not in broadcasts:
            assert by_user[kind] == pytest.approx(vectors, rel=1e-12)


@pytest.mark.parametrize("useful", [True, False])
def test_totals_of_a_resumed_run_in_any_grouping(resumed: Path, useful: bool) -> None:
    with contextlib.closing(open_run(resumed)) as connection:
        behind: dict[str, list[str]] = defaultdict(list)
        for name, host in connection.execute("SELECT name, host FROM members ORDER BY position"):
            behind[host].append(name)
        check_groupings(connection, behind, useful)


def test_totals_of_a_run_with_aggregators_in_any_grouping(tiers: Tiers) -> None:
    behind = {
        **tiers.clusters,
        **{f"{cluster}/{cluster}-{i}": users[i::2] for cluster, users in tiers.clusters.items() for i in range(2)},
    }
    with contextlib.closing(open_run(tiers.folder / "run")) as connection:
        check_groupings(connection, behind, True)


def test_the_session_of_a_link_says_who_is_behind_it(tiers: Tiers) -> None:
    sessions = "SELECT DISTINCT link, members FROM ledger LEFT JOIN user_sets ON user_set = id WHERE seq = 0"
    positions = {name: i for i, (name,) in enumerate(tiers.query("SELECT name FROM members ORDER BY position"))}
    wanted = {f"{cluster}/{cluster}-{i}": users[i::2] for cluster, users in tiers.clusters.items() for i in range(2)} | tiers.clusters
    assert {link: of_ranges(members).tolist() for link, members in tiers.query(sessions)} == {
        link: sorted(positions[user] for user in users) for link, users in wanted.items()
    }


def test_the_shares_of_all_users_are_the_total(resumed: Path, tiers: Tiers) -> None:
    for folder, broadcast in ((resumed, "prepare.AgreedScale"), (tiers.folder / "run", "consensus.AskModels")):
        with contextlib.closing(open_run(folder)) as connection:
            kinds = [kind for (kind,) in connection.execute("SELECT DISTINCT kind FROM ledger WHERE is_broadcast")]
            check_shares(connection, broadcast if broadcast in kinds else kinds[0])


def test_numbers_of_whole_messages_are_integers(resumed: Path) -> None:
    with contextlib.closing(open_run(resumed)) as connection:
        groups = numbered_totals(connection, Query(("step",)))
    assert all(isinstance(getattr(group, measure), int) for group in groups for measure in MEASURES)
