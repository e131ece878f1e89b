"""A run as a job of Slurm, with four nodes on this machine: submitted, preempted, out of time, cancelled, and without one of its nodes.

Each ends with the bits of an undisturbed run in one process.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coterie_deploy.containers.certs import shown
from tests.commands import LONG, Command, events, in_one_process, models, n_rounds, wait_for
from tests.e2e.engines import untested

pytestmark = pytest.mark.e2e

SCRIPT = Path(__file__).parent / "slurm.sh"
STATE = Path(os.environ.get("COTERIE_SLURM", Path(os.environ.get("TMPDIR", "/tmp")) / "coterie-slurm"))  # noqa: S108 - where slurm.sh puts it
DEADLINE_S = 90.0


@pytest.fixture(autouse=True, scope="module")
def cluster() -> Iterator[None]:
    """The Slurm that `slurm.sh up` has started."""
    if not (STATE / "slurm.conf").exists():
        untested("SLURM WAS", f"tests/e2e/slurm.sh has started none in {STATE}")
    with pytest.MonkeyPatch.context() as patch:  # jobs get the environment of whoever submits them
        patch.setenv("SLURM_CONF", str(STATE / "slurm.conf"))
        patch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        yield


def slurm(*command: str, check: bool = True) -> str:
    """What a command of Slurm prints."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0 or not check, f"{' '.join(command)}: {done.stderr}"
    return done.stdout.strip()


def wait_until(condition: Callable[[], Any], what: str, log: Callable[[], str] = str) -> Any:
    """The first true value of `condition`. At the deadline an error shows the queue, and the end of a log."""
    return wait_for(condition, lambda: f"{what}; {slurm('squeue', '--states=all', check=False)}; {log()[-1000:]}", DEADLINE_S)


class Submitted:
    """A job of a batch script that `coterie slurm` has written."""

    def __init__(self, folder: Path, script: Path) -> None:
        self.folder, self.script = folder, script
        self.number = slurm("sbatch", "--parsable", f"--chdir={folder}", str(script)).partition(";")[0]

    def log(self) -> str:
        found = [*self.folder.glob(f"*-{self.number}.log")]
        return found[0].read_text() if found else ""

    def states(self) -> set[str]:
        """Of both components."""
        listed = slurm("squeue", "--noheader", "--states=all", f"--jobs={self.number}", "--format=%T", check=False)
        return set(listed.split())

    def reaches(self, number: int, run: Path) -> None:
        """Waits for a round of the run under way."""
        wait_until(lambda: n_rounds(run) >= number or "FAILED" in self.states(), f"round {number}", self.log)
        assert self.states() == {"RUNNING"}, self.log()[-2000:]

    def ends(self, wanted: str) -> None:
        """Waits for the state in which the job ends."""
        wait_until(lambda: self.states() & {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}, "the end", self.log)
        wait_until(lambda: "COMPLETING" not in self.states(), "the last process")
        assert self.states() == {wanted}, self.log()[-2000:]

    def node_of_hosts(self) -> str:
        listed = slurm("squeue", "--noheader", f"--jobs={self.number}", "--format=%i %N").splitlines()
        return next(line.split()[1] for line in listed if line.split()[0] == f"{self.number}+1")

    def starts_again(self) -> None:
        """Waits until the job is in the queue again, where Slurm would keep it for two minutes."""
        wait_until(lambda: self.states() == {"PENDING"}, "another turn")
        for component in (0, 1):
            slurm("scontrol", "update", f"jobid={self.number}+{component}", "starttime=now")


@pytest.fixture
def submit(tmp_path: Path) -> Iterator[Callable[..., Submitted]]:
    """Writes the script of an experiment and submits it; without arguments, submits that script again."""
    jobs: list[Submitted] = []

    def submit(*arguments: str) -> Submitted:
        script = tmp_path / "job.sh"
        if arguments:
            (tmp_path / "long.yaml").write_text(LONG)
            code, out, err = Command(tmp_path, "slurm", *arguments).end()
            assert code == 0, err
            script.write_text(out)
        jobs.append(Submitted(tmp_path, script))
        return jobs[-1]

    try:
        yield submit
    finally:
        for job in jobs:
            slurm("scancel", job.number, check=False)


def test_run_with_slurm_follows_its_job_and_reports(tmp_path: Path) -> None:
    hsb = ("hsb", "--set", "stop.rounds=20")
    code, out, err = Command(tmp_path, "run", *hsb, "--engine", "slurm", "--hosts", "3", "--time", "5").end(DEADLINE_S)
    assert code == 0, err
    assert "Slurm job" in err
    assert "host 'host-3' joined with 54 users" in err
    assert "run folder: runs/hsb" in out
    assert models(tmp_path / "runs/hsb") == models(in_one_process(tmp_path, *hsb))
    assert "role         host" in "\n".join(shown(tmp_path / "runs/hsb.certs")), "members had certificates of a run of their own"
    assert (tmp_path / "runs/hsb.certs/ca.key").stat().st_mode & 0o077 == 0
    assert not [path for path in (tmp_path / "runs/hsb").rglob("*") if path.suffix == ".key"], "a run folder can be given away"


def test_a_job_that_is_left_goes_on_and_says_how_to_follow_it(tmp_path: Path) -> None:
    code, out, err = Command(tmp_path, "run", "schools", "--engine", "slurm", "--hosts", "2", "--detach").end(DEADLINE_S)
    assert code == 0, err
    assert "coterie watch runs/schools" in out
    code, out, err = Command(tmp_path, "watch", "runs/schools", "--patience", "60").end(DEADLINE_S)
    assert code == 0, err
    assert models(tmp_path / "runs/schools") == models(in_one_process(tmp_path, "schools"))


def test_ctrl_c_cancels_the_job_and_resume_goes_on_with_another_one(tmp_path: Path, calm: dict[str, bytes]) -> None:
    (tmp_path / "long.yaml").write_text(LONG)
    command = ("run", "long.yaml", "--engine", "slurm", "--hosts", "2")
    following = Command(tmp_path, *command)
    wait_until(lambda: n_rounds(tmp_path / "runs/long") >= 200, "round 200")
    following.process.send_signal(signal.SIGINT)
    code, _, err = following.end(DEADLINE_S)
    assert code == 130, err
    assert "the same command with --resume goes on with the run" in err
    assert not slurm("squeue", "--noheader", "--name=long")
    assert any("the checkpoint in stage 2/2 pdmm" in text for text in events(tmp_path / "runs/long", "stop"))
    code, _, err = Command(tmp_path, *command, "--resume").end(DEADLINE_S)
    assert code == 0, err
    assert models(tmp_path / "runs/long") == calm


def test_a_preempted_job_waits_and_goes_on(submit: Callable[..., Submitted], tmp_path: Path, calm: dict[str, bytes]) -> None:
    job, run = submit("long.yaml", "--hosts", "2", "--partition", "low", "--requeue"), tmp_path / "runs/long"
    job.reaches(200, run)
    slurm("srun", "--partition=high", "--nodes=4", "--exclusive", "true")
    job.starts_again()
    job.ends("COMPLETED")
    assert len(events(run, "start")) == 2, "it was there, and again"
    assert models(run) == calm


def test_a_job_is_warned_of_its_time_limit_and_the_next_one_goes_on(
    submit: Callable[..., Submitted], tmp_path: Path, calm: dict[str, bytes]
) -> None:
    job, run = submit("long.yaml", "--hosts", "2", "--time", "10"), tmp_path / "runs/long"
    job.reaches(200, run)
    hosts = processes(f"SLURM_JOB_ID={job.number}", "client")
    assert len(hosts) == 2
    for host in hosts:  # so that the run is not over when Slurm looks at its time, which it does every half minute
        os.kill(host, signal.SIGSTOP)
    slurm("scontrol", "update", f"jobid={job.number}+0", "timelimit=1")
    wait_until(lambda: events(run, "stop"), "the warning")
    for host in hosts:
        os.kill(host, signal.SIGCONT)
    job.ends("FAILED")
    assert "the checkpoint in stage 2/2 pdmm" in events(run, "stop")[0]
    submit().ends("COMPLETED")
    assert models(run) == calm


def test_a_job_without_a_node_is_queued_again_and_goes_on(submit: Callable[..., Submitted], tmp_path: Path, calm: dict[str, bytes]) -> None:
    job, run = submit("long.yaml", "--hosts", "2", "--requeue"), tmp_path / "runs/long"
    job.reaches(200, run)
    node = job.node_of_hosts()
    os.kill(int((STATE / f"{node}.pid").read_text()), signal.SIGKILL)
    slurm("pkill", "--signal=KILL", "--full", rf"^slurmstepd: \[{int(job.number) + 1}\.")
    for process in processes(f"SLURMD_NODENAME={node}"):
        os.kill(process, signal.SIGKILL)
    try:
        slurm("scontrol", "update", f"nodename={node}", "state=down", "reason=power")  # at once, and not after SlurmdTimeout
        job.starts_again()
        job.ends("COMPLETED")
    finally:
        subprocess.run([str(SCRIPT), "node", node], check=True, timeout=20)
        slurm("scontrol", "update", f"nodename={node}", "state=resume", check=False)
    assert models(run) == calm


def processes(variable: str, word: str = "") -> list[int]:
    """The processes with NAME=VALUE in their environment, and this word in their command."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            has_it = variable.encode() in (folder / "environ").read_bytes().split(b"\0")
            if has_it and (not word or word.encode() in (folder / "cmdline").read_bytes().split(b"\0")):
                found.append(int(folder.name))
    return found


def test_a_script_is_refused_where_it_could_not_run(tmp_path: Path) -> None:
    for arguments, sentence in (
        (("hsb", "--hosts", "161"), "161 hosts for 160 users"),
        (("hsb", "--time", "soon"), "--time is 'soon', want minutes, H:MM:SS or D-HH:MM:SS"),
        (("hsb", "--sbatch", "account=lab"), "--sbatch is 'account=lab', want an option of sbatch"),
    ):
        assert sentence in Command(tmp_path, "slurm", *arguments).fails(2)
    assert "Slurm has refused the job: sbatch: error: " in Command(
        tmp_path, "run", "hsb", "--engine", "slurm", "--partition", "none-such"
    ).fails(2)
    assert shutil.which("squeue"), "the last one was asked"
