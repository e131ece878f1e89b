"""Slurm: a run as a heterogeneous job, submitted as the script of `slurm_script`."""

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from coterie.errors import ConfigError, RunError
from coterie.experiment.config import Experiment
from coterie_deploy.engines.interface import Job, JobEngine, JobState, Phase
from coterie_deploy.engines.slurm_script import Asked, log_of, script

ANSWER_S = 60.0  # for one command
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_RUNNING = ("RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT", "SUSPENDED", "STOPPED", "RESIZING")
_UNKNOWN = "Invalid job id"  # to Slurm after some minutes


@dataclass(frozen=True)
class SlurmEngine(JobEngine):
    """The job that is asked for; `command` is the one that asks."""

    asked: Asked
    experiment: Experiment
    command: str

    def submit(self) -> "SlurmJob":
        text = script(self.asked, self.experiment, self.command)
        if shutil.which("sbatch") is None:
            raise ConfigError("sbatch is not here: want a login node of a Slurm cluster, or `coterie slurm` for the script alone")
        code, out, err = _said(["sbatch", "--parsable"], text)
        found = re.match(r"[0-9]+", out)
        if code or found is None:
            raise ConfigError(f"Slurm has refused the job: {err or out or f'sbatch has ended with code {code}'}")
        return SlurmJob(int(found[0]), Path(log_of(self.experiment, found[0])))


class SlurmJob(Job):
    def __init__(self, number: int, log: Path) -> None:
        self.number, self.name, self.log, self.cancel = number, f"Slurm job {number}", log, f"scancel {number}"

    def state(self) -> JobState:
        """The state of the coordinator's component, which waits, starts and ends with the other."""
        code, out, err = _said(["squeue", "--noheader", "--states=all", f"--jobs={self.number}", "--format=%i|%T|%r"])
        if code and _UNKNOWN not in err:
            raise RunError(f"squeue has ended with code {code}: {err or out}")
        for line in out.splitlines():
            number, _, rest = line.partition("|")
            state, _, reason = rest.partition("|")
            if number in (str(self.number), f"{self.number}+0"):
                phase = Phase.waiting if state in _WAITING else Phase.running if state in _RUNNING else Phase.ended
                return JobState(phase, state if reason in ("", "None") else f"{state}, {reason}")
        return JobState(Phase.ended, "not known to Slurm any more")

    def end(self) -> None:
        code, out, err = _said(["scancel", str(self.number)])
        if code and _UNKNOWN not in err:
            raise RunError(f"scancel has ended with code {code}: {err or out}")


def _said(command: list[str], text: str = "") -> tuple[int, str, str]:
    """Exit code, output and errors of a command of Slurm. RunError when it does not answer."""
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=ANSWER_S, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        raise RunError(f"{command[0]} has not answered for {ANSWER_S:g} s") from None
    except OSError as error:
        raise RunError(f"cannot start {command[0]}: {error.strerror or error}") from error
    return done.returncode, done.stdout.strip(), " ".join(done.stderr.split())
