"""`coterie events`: which events, in what order and form, and those to come."""

from __future__ import annotations

import csv
import datetime
import fcntl
import io
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from coterie_deploy.cli import app as cli
from coterie_deploy.view import events_page
from coterie_deploy.view.events_page import Asked, print_events
from coterie_server.record.rundb import BETWEEN, RunDatabase
from coterie_server.run.coordinator import LOCK

BEGAN = 1_800_000_000.0


@pytest.fixture
def clock() -> list[float]:
    return [BEGAN]


@pytest.fixture
def database(tmp_path: Path, clock: list[float]) -> Iterator[RunDatabase]:
    """A run with two aggregators, of which one had something to tell."""
    made = RunDatabase(tmp_path / "run.db", lambda: clock[0], scope=BETWEEN)
    made.event("start", "attempt 1 starts", attempt=1)
    for seconds, kind, text in (
        (2, "join", "host 'x' joined with 3 users"),
        (70, "lost", "host 'x' is gone: \x1b[2J"),
        (4000, "failed", "no"),
    ):
        clock[0] = BEGAN + seconds
        made.event(kind, text, host="x")
    made.events_of("x", json.dumps([BEGAN + 1, "join", "host 'h1' joined with 3 users", {"host": "h1"}]))
    made.flush()
    yield made
    made.close()


def printed(folder: Path, asked: Asked | None = None, form: str = "table", width: int = 120) -> str:
    file = io.StringIO()
    print_events(folder, asked or Asked(), form, Console(file=file, width=width))
    return file.getvalue()


def test_events_are_in_the_order_of_time_with_those_of_aggregators_in_between(tmp_path: Path, database: RunDatabase) -> None:
    lines = printed(tmp_path).splitlines()[2:]
    assert [line.split()[2:] for line in lines] == [
        ["0.0", "s", "info", "start", "attempt", "1", "starts"],
        ["1.0", "s", "info", "join", "at", "'x':", "host", "'h1'", "joined", "with", "3", "users"],
        ["2.0", "s", "info", "join", "host", "'x'", "joined", "with", "3", "users"],
        ["1:10", "warning", "lost", "host", "'x'", "is", "gone:", "\\x1b[2J"],
        ["1:06:40", "error", "failed", "no"],
    ]
    assert lines[0].startswith("2027-01-15 08:00:00")


@pytest.mark.parametrize("width", [30, 50, 80])
def test_narrow_terminals_have_room_for_it(tmp_path: Path, database: RunDatabase, width: int) -> None:
    text = printed(tmp_path, width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "users" in text
    assert "1:06:40" in text


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        (Asked(kinds=["join"]), ["join", "join"]),
        (Asked(kinds=["start", "failed"]), ["start", "failed"]),
        (Asked(level=events_page.LogLevel.warning), ["lost", "failed"]),
        (Asked(since="2027-01-15T08:00:02Z"), ["join", "lost", "failed"]),
        (Asked(since="2027-01-15T09:00:02+01:00", kinds=["lost"]), ["lost"]),
        (Asked(kinds=["skip"]), []),
    ],
)
def test_kinds_levels_and_times_choose(tmp_path: Path, database: RunDatabase, asked: Asked, wanted: list[str]) -> None:
    assert [json.loads(line)["kind"] for line in printed(tmp_path, asked, "jsonl").splitlines()] == wanted


def test_since_can_be_how_long_ago(tmp_path: Path) -> None:
    database = RunDatabase(tmp_path / "run.db", time.time)
    database.event("start", "now")
    database._clock = lambda: time.time() - 3600
    database.event("join", "an hour ago")
    database.close()
    for text, n_found in (("90s", 1), ("59m", 1), ("1.1h", 2), ("1d", 2), ("2min", 1)):
        assert len(printed(tmp_path, Asked(since=text), "jsonl").splitlines()) == n_found


def test_rows_for_programs_have_all_of_an_event(tmp_path: Path, database: RunDatabase) -> None:
    last = json.loads(printed(tmp_path, form="jsonl").splitlines()[-1])
    assert last == {
        "time": "2027-01-15T09:06:40.000Z", "elapsed_s": 4000.0, "level": "error", "kind": "failed", "text": "no", "data": {"host": "x"},
    }  # fmt: skip
    assert datetime.datetime.fromisoformat(last["time"]).timestamp() == BEGAN + 4000
    rows = list(csv.DictReader(io.StringIO(printed(tmp_path, form="csv"))))
    assert [row["kind"] for row in rows] == ["start", "join", "join", "lost", "failed"]
    assert json.loads(rows[1]["data"]) == {"host": "h1", "aggregator": "x"}
    assert list(rows[0]) == list(last)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere"], "nowhere is not a run folder: it does not exist"),
        ([".", "--kind", "joins"], "--kind is 'joins', want one of join"),
        (
            [".", "--since", "yesterday"],
            "--since is 'yesterday', want a time such as 2026-01-31T12:00:00Z, or how long ago: 90s, 5m, 2h, 1d",
        ),
        ([".", "--level", "bad"], "Invalid value for '--level'"),
    ],
)
def test_a_mistake_is_one_sentence(
    tmp_path: Path,
    database: RunDatabase,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli._run(["events", *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_what_comes_is_followed_until_nobody_is_at_work(
    tmp_path: Path, database: RunDatabase, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_page, "_LOOK_EVERY_S", 0.01)
    file = io.StringIO()

    def follow() -> None:
        print_events(tmp_path, Asked(kinds=["back", "failed", "finished"]), "table", Console(file=file), follow=True)

    with (tmp_path / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        following = threading.Thread(target=follow)
        following.start()
        for number, kind in enumerate(("back", "join", "finished")):
            clock[0] = BEGAN + 5000 + number
            database.event(kind, f"event {number}")
            database.flush()
            time.sleep(0.05)
        assert following.is_alive()
        database.put("status", "finished")
    following.join(5)
    assert not following.is_alive()
    assert [line.split() for line in file.getvalue().splitlines()] == [
        ["1:06:40", "error", "failed:", "no"],
        ["1:23:20", "info", "back:", "event", "0"],
        ["1:23:22", "info", "finished:", "event", "2"],
    ]


@pytest.mark.parametrize(
    ("status", "said"), [("running", "the run was stopped, nobody is at work in its folder"), ("failed: no", "the run has failed: no")]
)
def test_who_follows_a_run_that_does_not_finish_is_told_so(
    tmp_path: Path, database: RunDatabase, capsys: pytest.CaptureFixture[str], status: str, said: str
) -> None:
    database.put("status", status)
    assert cli._run(["events", str(tmp_path), "--follow"]) == 3
    assert f"error: {said}" in capsys.readouterr().err
    assert cli._run(["events", str(tmp_path)]) == 0
