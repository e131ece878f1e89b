"""The batch script with which Slurm runs an experiment: one component of the job for the coordinator, one for the hosts.

The script is all that Slurm needs, and people can read it, change it and submit it again. Hosts find the coordinator by the address file in
the run folder. Certificates are made at the start, for this run alone: others who reach the machines of the cluster cannot join.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from coterie.errors import ConfigError
from coterie.experiment.config import Experiment, named_code
from coterie.experiment.consent import consent_hash
from coterie.session.where import ADDRESS
from coterie_client.data import list_users
from coterie_deploy.engines.shares import divided
from coterie_deploy.read.shipped import HOSTS, changing
from coterie_deploy.terminal.printable import printable

PATIENCE_S = 600.0  # of hosts: a shared file system may show a new file late, and the coordinator may come back on another node
WARNED_S = 60  # before the time limit
_TIME = re.compile(r"[0-9]+(:[0-9]{2}){0,2}|[0-9]+-[0-9]+(:[0-9]{2}){0,2}|UNLIMITED|INFINITE")


@dataclass(frozen=True)
class Asked:
    """The job that is asked for."""

    experiment: str  # as the command names it
    folder: Path  # of the run
    n_hosts: int
    time: str | None = None  # None: the partition's
    partition: str | None = None
    requeue: bool = False
    apptainer: str | None = None  # the image that has `coterie`; None: it is on the PATH
    data: Path | None = None
    overrides: Sequence[str] = ()
    seed: int | None = None
    sbatch: Sequence[str] = ()  # more options of both components
    host_sbatch: Sequence[str] = ()  # and of the hosts
    allow_code: bool = False


def script(asked: Asked, experiment: Experiment, command: str) -> str:
    """The script; `command` is the one that wrote it. ConfigError if the experiment cannot run so."""
    _check(asked, experiment)
    return "\n".join([*_directives(asked, experiment, command), "", *_body(asked, experiment), ""])


def certificates(folder: Path) -> Path:
    """The folder of the certificates of a run: beside its own, which may be given away."""
    return folder.with_name(f"{folder.name}.certs")


def log_of(experiment: Experiment, job: str = "%j") -> str:
    """The file with what a job prints, in the folder where it is submitted. %j is the job's number to Slurm."""
    return f"{_safe_name(experiment)}-{job}.log"


def _safe_name(experiment: Experiment) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", experiment.name)


def _check(asked: Asked, experiment: Experiment) -> None:
    if experiment.federation.is_two_tier:
        found = f"an experiment with federation.topology {experiment.federation.topology!r} has aggregators"
        raise ConfigError(f"{found}, want --set federation.topology=flat on Slurm")
    if asked.time is not None and not _TIME.fullmatch(asked.time):
        raise ConfigError(f"--time is {asked.time!r}, want minutes, H:MM:SS or D-HH:MM:SS")
    for option in (*asked.sbatch, *asked.host_sbatch):
        if not option.startswith("-") or not option.isprintable():
            raise ConfigError(f"--sbatch is {option!r}, want an option of sbatch on one line, such as --account=lab")
    if (code := named_code(experiment)) and not asked.allow_code:
        raise ConfigError(f"the experiment wants to import {code[0]!r} on the hosts; allow it with --allow-code of `coterie slurm`")
    divided(range(len(list_users(experiment.data, experiment.seed, asked.data))), asked.n_hosts)


def _directives(asked: Asked, experiment: Experiment, command: str) -> Iterator[str]:
    yield "#!/bin/bash"
    yield f"# {experiment.name} with {asked.n_hosts} hosts on Slurm, written by: {printable(command)}"
    yield "# Submit it with sbatch, in the folder that its paths start in. Submitted again, it goes on with a run that has not finished."
    yield f"# coterie watch {shlex.quote(str(asked.folder))} follows the run; scancel ends the job, whose run has its checkpoint then."
    both = [*(["--time=" + asked.time] if asked.time else []), *(["--partition=" + asked.partition] if asked.partition else [])]
    both += ["--cpus-per-task=1", *asked.sbatch]
    head = [f"--job-name={_safe_name(experiment)}", f"--output={log_of(experiment)}", "--open-mode=append"]
    head += ["--requeue" if asked.requeue else "--no-requeue"]
    for option in (*head, f"--signal=B:USR1@{WARNED_S}", "--ntasks=1", *both):
        yield f"#SBATCH {option}"
    yield "#SBATCH hetjob"
    for option in (f"--ntasks={asked.n_hosts}", *both, *asked.host_sbatch):
        yield f"#SBATCH {option}"


def _body(asked: Asked, experiment: Experiment) -> Iterator[str]:
    changes = changing(asked.overrides, asked.seed)
    if "join_timeout_s" not in experiment.federation.model_fields_set:
        changes += ["--set", f"federation.join_timeout_s={PATIENCE_S:g}"]
    coterie = "coterie" if asked.apptainer is None else 'apptainer exec --bind "$PWD" "$image" coterie'
    name = f"coordinator.{re.sub(r'[^a-z0-9]+', '-', experiment.name.lower()).strip('-') or 'run'}"
    n = asked.n_hosts
    served = shlex.join([asked.experiment, "--hosts", str(n), *changes])
    data = "" if asked.data is None else ' --data "$data"'
    named = {"run": asked.folder, "certs": certificates(asked.folder), "data": asked.data, "image": asked.apptainer}
    code = " --allow-code" if asked.allow_code else ""
    link = f'--tls "$certs/host-$i" --tls-name {name}'
    host = f'{coterie} client --server "@$run/{ADDRESS}" --users "$i/{n}" --name "host-$i" --state "$run/{HOSTS}/host-$i"'
    yield from f"""\
export {" ".join(f"{key}={shlex.quote(str(value))}" for key, value in named.items() if value is not None)}
umask 077
rm -f "$run/{ADDRESS}"
# An authority of this run alone, and a certificate for each member. Those that are there are kept.
{coterie} certs federation "$certs" --hosts {n} --address {name} || exit

{coterie} server {served} --listen 0.0.0.0:0 \\
  --output "$run" --or-resume --tls "$certs/coordinator" &
server=$!
srun --het-group=1 --label --kill-on-bad-exit=0 --wait=0 bash -c 'i=$((SLURM_PROCID + 1))
exec {host} \\
  {link} --patience {PATIENCE_S:g} --accept {consent_hash(experiment)}{data}{code}' &
hosts=$!

# Asked to stop, the coordinator writes its checkpoint: {WARNED_S} s before the time limit, and when the job is cancelled or preempted.
trap 'kill -TERM "$server"' USR1 TERM
until wait "$server"; code=$?; ! kill -0 "$server" 2>/dev/null; do :; done
[ "$code" = 0 ] || timeout 5 scancel --quiet --signal=TERM "$SLURM_JOB_ID" 2>/dev/null  # hosts that have not heard of it
until wait "$hosts"; ! kill -0 "$hosts" 2>/dev/null; do :; done
exit "$code"
""".splitlines()
