"""What roles say: sentences for a person, a JSON object a line for a machine, a level for each kind of event."""

from __future__ import annotations

import ast
import datetime
import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from coterie.experiment.config import StopRule
from coterie_deploy.cli import app as cli
from coterie_deploy.engines.launch import Launch
from coterie_deploy.engines.local import Watched, run_here
from coterie_deploy.telemetry.hub_log import RunLog
from coterie_deploy.telemetry.logs import LEVELS, Log, LogFormat, LogLevel, on_console, wants_json
from coterie_deploy.view.progress import display
from coterie_server.record.rundb import RunDatabase
from coterie_server.run.engine import Progress
from coterie_server.run.plan import stages_of
from coterie_server.session.hub import Hub
from tests.commands import commands_in
from tests.simulation import small_experiment

ROOT = Path(__file__).resolve().parents[2]
BOOKING = {"event", "event_of", "announce", "_note"}


def lines_of(log_format: LogFormat, level: LogLevel = LogLevel.info) -> tuple[Log, list[str]]:
    lines: list[str] = []
    return Log(log_format, level, lines.append), lines


def test_a_json_line_says_when_how_bad_what_and_where() -> None:
    log, lines = lines_of(LogFormat.json)
    before = datetime.datetime.now(datetime.UTC) - datetime.timedelta(milliseconds=1)
    log.with_(where=lambda: {"run": "r1", "round": 3}, role="coordinator").say("join", "host 'a' joined", host="a", time="never")
    [said] = map(json.loads, lines)
    assert list(said)[:4] == ["time", "level", "event", "message"]
    assert before <= datetime.datetime.fromisoformat(said.pop("time")) <= datetime.datetime.now(datetime.UTC)
    wanted = {"level": "info", "event": "join", "message": "host 'a' joined", "role": "coordinator", "run": "r1", "round": 3, "host": "a"}
    assert said == wanted


def test_whatever_is_in_it_a_line_is_one_line_of_json_and_a_sentence_cannot_steer_a_terminal() -> None:
    log, lines = lines_of(LogFormat.json)
    log.say("x", "a\nb\x1b[2J\ud800", figures={"nan": float("nan"), "inf": [float("-inf"), 1.5]}, path=("a", 1))
    assert "\n" not in lines[0]
    said = json.loads(lines[0], parse_constant=pytest.fail)
    assert said["figures"] == {"nan": None, "inf": [None, 1.5]}
    log, lines = lines_of(LogFormat.text)
    log.say("x", "a\nb\x1b[2J", figures={})
    assert lines == ["a\\nb\\x1b[2J"]


@pytest.mark.parametrize(("level", "wanted"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_a_level_leaves_out_what_is_less_bad(level: str, wanted: int) -> None:
    log, lines = lines_of(LogFormat.text, LogLevel(level))
    for one in LogLevel:
        log.say("x", one.value, one)
    assert lines == [one.value for one in LogLevel][-wanted:]


def kinds_in(path: Path) -> set[str]:
    """The kinds of event that a module books; what is no literal must be a name of the functions that pass it on."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in BOOKING and node.args:
            first = node.args[0]
            assert isinstance(first, ast.Constant) or ast.unparse(first) in ("kind", "what"), ast.unparse(node)
            found |= {str(first.value)} if isinstance(first, ast.Constant) else set()
    return found


def test_every_kind_of_event_has_a_level() -> None:
    modules = [*(ROOT / "server").rglob("*.py"), *(ROOT / "deploy/coterie_deploy").rglob("*.py")]
    kinds = set().union(*map(kinds_in, modules)) | {"task begins", "task ends", "placed"}  # whose words are given
    assert kinds == set(LEVELS)


# ---- the events of a run


def hub_and_log(log_format: LogFormat) -> tuple[Hub, RunDatabase, list[str]]:
    log, lines = lines_of(log_format)
    run_log = RunLog(log)
    database = RunDatabase(None, on_event=run_log)
    run_log.hub = Hub(small_experiment({"name": "oracle"}), "r1", database, time.monotonic)
    return run_log.hub, database, lines


def test_an_event_is_a_line_with_its_level_and_its_data() -> None:
    hub, database, lines = hub_and_log(LogFormat.json)
    hub.begin_stage(1, json.dumps({"stage": "pdmm", "options": {}}))
    hub.state.round = 7
    database.event("skip", "going on without h1", seq=9)
    database.events_of("x", '[1.0, "join", "host h joined", {}]')  # of an aggregator, which has said it itself
    [said] = map(json.loads, lines)
    del said["time"]
    assert said == {
        "level": "warning", "event": "skip", "message": "going on without h1", "run": "r1", "stage": "pdmm", "round": 7, "seq": 9,
    }  # fmt: skip
    assert database.connection.execute("SELECT COUNT(*) FROM events").fetchone() == (0,)  # that is another matter
    database.connection.close()


def test_a_person_is_not_told_what_the_next_line_says_anyway() -> None:
    _, database, lines = hub_and_log(LogFormat.text)
    for kind in ("start", "warning", "insecure", "failed", "back"):
        database.event(kind, f"it is {kind}")
    assert lines == ["warning: it is warning", "it is back"]
    database.connection.close()


def test_a_log_that_cannot_be_written_does_not_end_the_run() -> None:
    def refuse(line: str) -> None:
        raise OSError(28, "No space left on device")

    database = RunDatabase(None, on_event=RunLog(Log(write=refuse)))
    database.event("back", "host 'a' takes part again")
    database.flush()
    assert database.connection.execute("SELECT COUNT(*) FROM events").fetchone() == (1,)
    database.connection.close()


def test_progress_is_a_line_for_each_stage_also_on_a_terminal_when_machines_read_it() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=40)
    stages = stages_of(small_experiment({"name": "pdmm", "penalty": 0.1}, stop={"rounds": 2}))
    with display(console, quiet=False, log=on_console(console, LogFormat.json, LogLevel.info)) as shown:
        for number, stage in enumerate(stages):
            for made in (1, 2):
                shown(Progress(stage, number, len(stages), made, {"objective": 1.0 / made}, 0.5))
    said = list(map(json.loads, file.getvalue().splitlines()))
    assert [(line["event"], line["stage"], line["round"]) for line in said] == [("stage", stage.name, 2) for stage in stages]
    assert said[0]["figures"] == {"objective": 0.5}
    assert isinstance(stages[0].stop, StopRule)


# ---- the command line


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["run", "x", "--log-format", "json"], True),
        (["run", "x", "--log-format=json"], True),
        (["run", "x", "--log-format=text"], False),
        (["run", "x", "--log-format"], False),
        (["run", "--log-format", "json", "--log-format", "text"], False),
        (["run", "json"], False),
    ],
)
def test_a_command_line_is_known_to_be_for_machines_before_it_is_read(arguments: list[str], wanted: bool) -> None:
    assert wants_json(arguments) == wanted


def test_an_error_is_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._run(["server", "nothing-like-it", "--listen", "127.0.0.1:0", "--log-format", "json"]) == 2
    out, err = capsys.readouterr()
    said = json.loads(err)
    assert out == ""
    assert (said["level"], said["event"], said["code"]) == ("error", "exit", 2)
    assert "nothing-like-it" in said["message"]


def run_of(folder: Path, **how: Any) -> tuple[str, str]:
    out, err = io.StringIO(), io.StringIO()
    experiment = small_experiment({"name": "oracle"}, stop={"rounds": 3})
    experiment = experiment.model_copy(update={"federation": experiment.federation.model_copy(update={"hosts": 2})})
    watched = Watched(**how)
    launch = Launch(transport="loopback", folder=folder)
    run_here(experiment, launch, Console(file=out), Console(file=err, width=50), quiet=False, watched=watched)
    return out.getvalue(), err.getvalue()


def test_a_run_for_machines_says_json_alone_from_its_start_to_its_end(tmp_path: Path) -> None:
    out, err = run_of(tmp_path / "run", log_format=LogFormat.json)
    said = list(map(json.loads, err.splitlines()))
    assert out == ""
    kinds = [line["event"] for line in said]
    assert kinds[0] == "start"
    assert kinds.count("join") == 2
    assert {"stage", "finished"} <= set(kinds)
    assert {line["role"] for line in said} == {"coordinator"}
    assert len({line["run"] for line in said if "run" in line}) == 1
    assert len(said) < 12, "a line is for no round and no message"


def test_a_run_for_a_person_is_as_quiet_as_it_was_and_tells_more_when_asked(tmp_path: Path) -> None:
    out, err = run_of(tmp_path / "plain")
    assert "run folder: " in out
    assert all(line.startswith("stage ") for line in err.splitlines())
    _, more = run_of(tmp_path / "more", log_level=LogLevel.info)
    assert "host 'host-1' is here with 4 users: 1 of 2 hosts" in more


@pytest.mark.slow
def test_a_server_and_its_clients_say_json(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(json.dumps({
        "name": "small", "data": {"source": "ellipses", "users_per_cluster": 1, "test_per_class": 5},
        "problem": {"loss": "squared_hinge", "l2": 1e-3}, "method": {"name": "oracle"}, "federation": {"hosts": 1},
    }))  # fmt: skip
    with commands_in(tmp_path) as run:
        served = run("server", "small.yaml", "--listen", "127.0.0.1:0", "--output", "run", "--log-format", "json")
        assert served.process.stderr is not None
        first = [json.loads(served.process.stderr.readline()) for _ in range(2)]
        assert [line["event"] for line in first] == ["start", "listen"]
        host = run("client", "--server", first[1]["address"], "--name", "h", "--log-format", "json")
        code, out, err = served.end()
        assert (code, out) == (0, "")
        assert {"join", "stage", "finished"} <= {json.loads(line)["event"] for line in err.splitlines()}
        code, out, err = host.end()
        assert (code, err) == (0, "")
        assert [json.loads(line)["event"] for line in out.splitlines()] == ["consent", "join", "finished"]
        assert all(json.loads(line)["host"] == "h" for line in out.splitlines())


def test_a_reason_that_hosts_share_is_one_line_and_one_with_their_number() -> None:
    log, lines = lines_of(LogFormat.text)
    said = RunLog(log)
    for host in ("a", "b", "b", "c"):
        said("refused", f"host {host!r} is refused: it speaks plain text", {"host": host})
    assert lines == ["host 'a' is refused: it speaks plain text"]
    said("refused", "host 'd' is refused: it is late", {"host": "d"})
    said("join", "host 'e' joined", {})
    assert lines[1:] == ["the same of 2 more hosts: 'b', 'c'", "host 'd' is refused: it is late", "host 'e' joined"]
    log, lines = lines_of(LogFormat.json)
    for host in ("a", "b"):
        RunLog(log)("refused", f"host {host!r} is refused", {"host": host})
    assert len(lines) == 2, "machines count themselves"
