"""What supervisors do to the processes of a run: they stop all of them at once, start some late, and start a finished run again."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

import pytest

from coterie import run
from coterie.errors import RunError
from coterie_deploy.read.folders import is_finished
from coterie_deploy.roles.listening import TELL_S
from coterie_server.run.coordinator import LOCK
from tests.commands import events, models, wait_for
from tests.processes import SERVER, Processes, launched, processes

SOON_S = TELL_S - 1.0  # a coordinator whom not all members ask ends after TELL_S; one whose members do, at once
SHARES = {"a": "#0..#2", "b": "#3..#5"}
EXPERIMENT: dict[str, Any] = {
    "name": "supervised",
    "seed": 3,
    "data": {"source": "ellipses", "users_per_cluster": 2, "test_per_class": 20},
    "problem": {"loss": "least_squares", "l2": 0.1},
    "method": {"name": "pdmm", "penalty": 0.07, "evaluate_every": 0},
    "references": ["local"],
    "stop": {"rounds": 3000, "residual": None},  # no signal of a test comes after the end
    "snapshots": {"every_rounds": 100_000, "every_s": 600},  # so that nothing but the stop writes a checkpoint
    "federation": {"hosts": 2, "absence_timeout_s": 30},
}
SHORT: dict[str, Any] = {**EXPERIMENT, "stop": {"rounds": 5}, "references": []}
TIERS: dict[str, Any] = {
    **EXPERIMENT,
    "method": {"name": "async_l2gd", "iterations": 3000, "gamma": 1.0, "alpha": 0.4, "p0": 0.2, "p": 0.3, "collect_models": True},
    "references": [],
    "federation": {"topology": "clusters", "hosts": 3, "absence_timeout_s": 30},
}
PDMM_STAGE = 2  # after the reference and the start


def stopped(group: Processes, number: signal.Signals) -> None:
    """All members get the signal at the same moment, and end with its code."""
    for process in group.processes.values():
        process.send_signal(number)
    for name in group.processes:
        group.ends(name, 128 + number)


def repeated_rounds(group: Processes, stage: int) -> int:
    """How many rounds of a stage were begun twice."""
    twice = "SELECT round FROM ledger WHERE stage = ? GROUP BY round HAVING COUNT(DISTINCT attempt) > 1"
    return len(group.rows(twice.replace("?", str(stage))))


def calm(folder: Path, content: Mapping[str, Any]) -> dict[str, bytes]:
    """The models of the same run in one process, undisturbed."""
    run({**content, "federation": {"hosts": 1}}, output=folder / "calm")
    return models(folder / "calm")


def goes_on(group: Processes, folder: Path, content: Mapping[str, Any], stage: int) -> None:
    group.start_again(*group.commands)
    group.end()
    assert repeated_rounds(group, stage) <= 1
    assert models(group.run) == calm(folder, content)


def test_sigterm_to_all_at_once_loses_no_finished_round(tmp_path: Path) -> None:
    with processes(tmp_path, EXPERIMENT, hosts=SHARES) as group:
        group.wait_for_round(50, PDMM_STAGE)
        stopped(group, signal.SIGTERM)
        (said,) = events(group.run, "stop")
        assert said.startswith("asked to stop by a signal: the checkpoint in stage 3/3 pdmm, round ")
        assert "after round" in (tmp_path / f"{SERVER}.log").read_text()
        goes_on(group, tmp_path, EXPERIMENT, PDMM_STAGE)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_all_at_once_loses_no_finished_round_of_a_run_with_aggregators(tmp_path: Path, number: signal.Signals) -> None:
    with processes(tmp_path, TIERS, clusters=("c0", "c1", "c2")) as group:
        group.wait_for_round(300)
        stopped(group, number)
        goes_on(group, tmp_path, TIERS, 0)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_round_that_takes_too_long_is_the_only_one_that_a_stopped_run_repeats(tmp_path: Path) -> None:
    with processes(tmp_path, EXPERIMENT, hosts=SHARES) as group:
        group.wait_for_round(50, PDMM_STAGE)
        group.processes["b"].send_signal(signal.SIGSTOP)
        group.wait_for_standstill(PDMM_STAGE)  # it has a task, and does not answer
        group.processes[SERVER].send_signal(signal.SIGTERM)
        assert "which would have taken longer than 10 s more" in group.ends(SERVER, 143)
        group.shoot("b")
        group.processes["a"].send_signal(signal.SIGTERM)
        group.ends("a", 143)
        goes_on(group, tmp_path, EXPERIMENT, PDMM_STAGE)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("patience", ["2", "none"])
def test_a_late_host_makes_the_run_and_those_that_were_in_time_keep_their_places(tmp_path: Path, patience: str) -> None:
    """With a joining time the coordinator ends now and then, and is started again: its host does not end with it."""
    content = {**EXPERIMENT, "federation": {**EXPERIMENT["federation"], "join_timeout_s": patience if patience == "none" else 2}}
    with processes(tmp_path, content, hosts={"a": SHARES["a"]}) as group:
        late = [*group.commands["a"][:3], "--name", "b", "--users", SHARES["b"], "--state", str(tmp_path / "state-b")]
        for _ in range(3 if patience != "none" else 0):
            assert "need 2 of 2 hosts, have 1 after 2 s without another" in group.ends(SERVER, 3)
            group.start(SERVER, "--resume")
        if patience == "none":
            with pytest.raises(TimeoutExpired):
                group.processes[SERVER].wait(8)
        assert group.processes["a"].poll() is None, group.logs()
        group.commands["b"] = late
        group.start("b")
        group.end()
        assert models(group.run) == calm(tmp_path, EXPERIMENT)


@pytest.mark.timeout(120)
def test_a_finished_run_that_is_started_again_with_its_members_ends_in_seconds(tmp_path: Path) -> None:
    with processes(tmp_path, SHORT, hosts=SHARES) as group:
        group.end()
        before = (group.run / "run.db").read_bytes()
        group.start_again(*group.commands, option="--or-resume")
        for name in group.commands:
            group.ends(name, 0, SOON_S)
        assert "the run has finished" in (tmp_path / "a.log").read_text()
        assert (group.run / "run.db").read_bytes() == before


KILLED_AT_THE_END = """
import os, runpy, signal, sys
from coterie_server.record.rundb import RunDatabase
from coterie_server.session.hub import Hub
event = RunDatabase.event
def killed(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
def killed_at(self, kind, text, **data):
    (killed if kind == "finished" else event)(self, kind, text, **data)
if "WHEN" == "before":
    Hub.finish = killed
RunDatabase.event = killed_at
sys.argv[0] = "coterie"
runpy.run_module("coterie", run_name="__main__", alter_sys=True)
"""


@contextlib.contextmanager
def killed_at_the_end(folder: Path, when: str) -> Iterator[Processes]:
    """A run whose coordinator has killed itself before or after its hosts heard the end. One that is started again does not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.processes.COTERIE", [sys.executable, "-c", KILLED_AT_THE_END.replace("WHEN", when)])
        with processes(folder, SHORT, hosts=SHARES) as group:
            group.ends(SERVER, -signal.SIGKILL)
            patch.undo()
            yield group


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_coordinator_that_is_killed_after_its_hosts_have_heard_the_end_does_not_wait_for_them_again(tmp_path: Path) -> None:
    with killed_at_the_end(tmp_path, "after") as group:
        for host in SHARES:
            group.ends(host, 0)
        assert not is_finished(group.run)
        group.start(SERVER, "--or-resume")
        group.start("a")  # it alone: whoever asks is told
        group.ends("a", 0, SOON_S)
        group.start("b")
        for name in group.commands:
            group.ends(name, 0, SOON_S)
        assert is_finished(group.run)
        assert models(group.run) == calm(tmp_path, SHORT)
        wanted = "host 'b' may not have brought its whole book: the coordinator was ended meanwhile"
        assert wanted in events(group.run, "lost")


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_hosts_that_have_not_heard_the_end_of_a_killed_coordinator_hear_it_when_its_run_is_resumed(tmp_path: Path) -> None:
    with killed_at_the_end(tmp_path, "before") as group:
        assert all(group.processes[host].poll() is None for host in SHARES), group.logs()
        group.start(SERVER, "--resume")
        for name in group.commands:
            group.ends(name, 0, SOON_S)
        assert models(group.run) == calm(tmp_path, SHORT)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_aggregators_pass_on_that_the_run_has_finished(tmp_path: Path) -> None:
    with processes(tmp_path, TIERS, clusters=("c0", "c1", "c2")) as group:
        group.end()
        group.start_again(*group.commands, option="--or-resume")
        for name in group.commands:
            group.ends(name, 0, SOON_S)


def test_a_folder_that_another_coordinator_still_has_is_worth_another_attempt(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with (folder / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RunError, match=r"^the run folder .* is in use by another coordinator$") as error:
            run({**EXPERIMENT, "federation": {"hosts": 1}}, output=folder)
    assert error.value.exit_code == 3


@pytest.mark.slow
def test_a_member_that_was_in_a_run_hears_that_it_has_finished_meanwhile(tmp_path: Path) -> None:
    """The coordinator dies between the last row of the run and the word to its hosts."""
    with processes(tmp_path, SHORT, hosts=SHARES) as group:
        group.end()
        finished = group.run.rename(tmp_path / "finished")
        group.start(SERVER)
        group.start("a")  # in another run, which waits for b
        wait_for(lambda: (tmp_path / "a.log").read_text().count(" joins run ") >= 2, group.logs)
        group.shoot(SERVER)
        group.run.rename(tmp_path / "other")
        finished.rename(group.run)
        group.start(SERVER, "--or-resume")
        group.ends("a", 0, SOON_S)
        group.start("b")
        group.ends("b", 0, SOON_S)
        group.ends(SERVER, 0, 20)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sigterm_to_a_launcher_and_all_its_processes_at_once_loses_no_finished_round(tmp_path: Path) -> None:
    """As `scancel` and the end of a container do."""
    with launched(tmp_path, EXPERIMENT, tmp_path / "run") as group:
        group.wait_for_round(50, PDMM_STAGE)
        launcher = group.processes[SERVER]
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        assert len(children) == 2
        for process in (*map(int, children), launcher.pid):
            os.kill(process, signal.SIGTERM)
        assert "--resume" in group.ends(SERVER, 143)
        goes_on(group, tmp_path, EXPERIMENT, PDMM_STAGE)
