"""A run database read as it grows: whatever the looks, what was seen is what is there."""

from __future__ import annotations

import contextlib
import sqlite3
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coterie.errors import ConfigError, RunError
from coterie.record.ledger import Row
from coterie_server.record import follow, rundb, summary
from coterie_server.record.curves import curves
from coterie_server.record.follow import Follower
from coterie_server.record.rundb import WITHIN, RunDatabase, open_run

HOSTS = ("host-1", "host-2")


def begun(folder: Path, attempt: int = 1) -> RunDatabase:
    database = RunDatabase(folder / "run.db", clock=iter(range(1, 10**6)).__next__)
    for key, value in {"run_id": "r1", "attempt": str(attempt), "status": "running", "name": "small", "experiment": "{}"}.items():
        database.put(key, value)
    database.event("start", f"attempt {attempt} starts", attempt=attempt)
    return database


def round_of(database: RunDatabase, stage: int, number: int, *, seq: int = 0, hosts: tuple[str, ...] = HOSTS, is_over: bool = True) -> None:
    """A broadcast to all hosts and an answer of each."""
    seq = seq or 1000 * stage + number + 1
    for host in hosts:
        database.book(host, (stage, number), [(Row(seq, 1, 0, "down", "evaluation.FinalModels", 0, 0, 0, 21, 1), None)], True)
        database.book(host, (stage, number), [(Row(seq, 1, 0, "down", "prepare.AgreedScale", 2, 6, 48, 70, 1), None)], True)
        database.book(host, (stage, number), [(Row(seq, 1, 0, "up", "evaluation.Scores", 0, 6, 48, 90 + number, 1), None)], True)
        database.book(host, (stage, number), [(Row(seq, 1, 1, "up", "evaluation.Scores", 0, 6, 48, 90, 1), None)], False)
    if is_over:
        database.figures(stage, number, {"objective": 10.0 / (number + 1), "clusters": float("nan") if number == 2 else 1.0})
    database.flush()


def is_whole(follower: Follower) -> None:
    """All that was seen in pieces is what one finds in the whole."""
    with contextlib.closing(open_run(follower.folder)) as connection:
        traffic = [replace(row, expected=None) for row in summary.traffic(connection) if row.frames]
        assert sorted(follower.traffic.values(), key=repr) == sorted(traffic, key=repr)
        assert follower.stages == summary.stages(connection)
        for stage in follower.stages:
            seen, there = follower.curves(stage), curves(connection, stage)
            assert seen.rounds.tolist() == there.rounds.tolist()
            np.testing.assert_array_equal(seen.seconds, there.seconds)
            for name in ("figures", "wire_bytes"):
                assert getattr(seen, name).keys() == getattr(there, name).keys()
                for key, values in getattr(there, name).items():
                    np.testing.assert_array_equal(getattr(seen, name)[key], values, err_msg=str(key))


def test_looks_between_any_two_writings_add_up_to_the_whole(tmp_path: Path) -> None:
    database, follower = begun(tmp_path), Follower(tmp_path)
    assert follower.update().is_anew
    database.stage(0, "local", "local", 0, "", 0.0)
    round_of(database, 0, 0)
    round_of(database, 0, 1, hosts=("host-1",), is_over=False)  # a broadcast that one of its hosts has been booked for
    first = follower.update()
    assert (first.is_anew, len(first.rounds), len(first.figures)) == (False, 1, 2)
    is_whole(follower)
    round_of(database, 0, 1, hosts=("host-2",))
    second = follower.update()
    assert sum(row.vectors for row in second.traffic) == 0, "the broadcast was counted at the first host"
    assert sum(row.message_bytes for row in second.traffic) == 21 + 70 + 91
    database.stage(0, "local", "local", 1, "1 rounds", 2.0)
    database.stage(1, "pdmm", "pdmm", 0, "", 0.0)
    for number in range(200):
        round_of(database, 1, number)
        if number % 70 == 0:
            follower.update()
            is_whole(follower)
    assert follower.update().rounds[-1][:2] == (1, 199)
    is_whole(follower)
    assert follower.update() == follow.Added(is_anew=False, traffic=[], rounds=[], figures=[], events=[])
    database.close()


def test_a_stage_that_is_over_before_its_last_rounds_are_written_is_seen_to_its_end(tmp_path: Path) -> None:
    database, follower = begun(tmp_path), Follower(tmp_path)
    database.stage(0, "local", "local", 0, "", 0.0)
    round_of(database, 0, 0)
    database.figures(0, 1, {"objective": 1.0})
    database.stage(0, "local", "local", 1, "converged", 2.0)  # written at once, while the round waits
    follower.update()
    database.flush()
    assert follower.update().figures == [(0, 1, "objective", 1.0)]
    is_whole(follower)
    database.close()


def test_what_a_resumed_run_repeats_is_taken_back(tmp_path: Path) -> None:
    database, follower = begun(tmp_path), Follower(tmp_path)
    database.stage(0, "local", "local", 0, "", 0.0)
    for number in range(5):
        round_of(database, 0, number)
    follower.update()
    database.close()
    again = begun(tmp_path, attempt=2)
    again.flush()
    assert follower.update().is_anew, "an attempt has begun"
    is_whole(follower)
    again.rewind(3, 0, 2)
    again.event("resume", "resumed at stage 0, round 2, exchange 3", attempt=2)
    round_of(again, 0, 3, seq=4)
    assert follower.update().is_anew, "and has taken back what it repeats"
    is_whole(follower)
    round_of(again, 0, 4, seq=5)
    assert not follower.update().is_anew
    is_whole(follower)
    again.close()


def test_broadcasts_below_aggregators_count_once_for_each_of_them(tmp_path: Path) -> None:
    database, follower = begun(tmp_path), Follower(tmp_path)
    database.stage(0, "local", "local", 0, "", 0.0)
    for link in ("a/host-1", "a/host-2", "b/host-1"):
        database._scope = WITHIN
        database.book(link, (0, 1), [(Row(1, 1, 0, "down", "prepare.AgreedScale", 2, 6, 48, 70, 1), None)], True)
        database.flush()
        follower.update()
    assert [row.vectors for row in follower.traffic.values()] == [4]
    is_whole(follower)
    database.close()


def test_a_look_reads_what_is_new_and_no_whole_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database, follower = begun(tmp_path), Follower(tmp_path)
    database.stage(0, "local", "local", 0, "", 0.0)
    for number in range(2000):
        for host in HOSTS:
            database.book(host, (0, number), [(Row(number + 1, 1, 0, "up", "evaluation.Scores", 0, 6, 48, 90, 1), None)], True)
        database.figures(0, number, {"objective": 1.0})
    database.flush()
    steps = [0]

    def counted(folder: Path) -> sqlite3.Connection:
        connection = open_run(folder)
        connection.set_progress_handler(lambda: steps.__setitem__(0, steps[0] + 1), 100)
        return connection

    monkeypatch.setattr(rundb, "open_run", counted)
    follower.update()
    first, steps[0] = steps[0], 0
    round_of(database, 0, 2000, seq=9999)
    assert follower.update().rounds == [(0, 2000, pytest.approx(2002, abs=10))]
    assert steps[0] < first / 20
    database.close()


def test_who_is_there_follows_from_the_events(tmp_path: Path) -> None:
    database, follower = begun(tmp_path), Follower(tmp_path)
    database.event("join", "host 'host-1' joined with 2 users", host="host-1", hosts_here=1)
    database.event("join", "host 'host-2' joined with 1 users", host="host-2", hosts_here=2)
    database.events_of("a", '[5.0, "join", "host \'below\' joined", {"host": "below"}]')
    database.event("lost", "host 'host-1' is gone: it was silent", host="host-1", round=3)
    database.event("lost", "host 'host-2' has not brought its whole book", host="host-2", book=True)
    database.flush()
    follower.update()
    assert {name: is_here for name, (is_here, _) in follower.here.items()} == {"host-1": False, "host-2": True}
    database.event("start", "attempt 2 starts", attempt=2)
    database.flush()
    follower.update()
    assert not any(is_here for is_here, _ in follower.here.values())
    database.close()


def test_events_are_kept_up_to_a_number(tmp_path: Path) -> None:
    database, follower = begun(tmp_path), Follower(tmp_path)
    for number in range(follow.MAX_EVENTS + 10):
        database.event("warning", f"number {number}")
    database.flush()
    assert len(follower.update().events) == follow.MAX_EVENTS + 11
    assert (len(follower.events), follower.events[-1].text) == (follow.MAX_EVENTS, f"number {follow.MAX_EVENTS + 9}")
    database.close()


def test_what_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"it has no run\.db"):
        Follower(tmp_path).update()
    (tmp_path / "run.db").write_text("this is not a database, whatever its name may say")
    with pytest.raises(RunError, match="is damaged: file is not a database"):
        Follower(tmp_path).update()
    (tmp_path / "other").mkdir()
    begun(tmp_path / "other").connection.execute("ALTER TABLE run RENAME COLUMN value TO amount")
    with pytest.raises(RunError, match="cannot be read: no such column"):
        Follower(tmp_path / "other").update()
