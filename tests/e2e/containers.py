"""A federation in containers, as a user has it: a Compose file written by `coterie compose`, brought up, disturbed, and taken down."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import coterie
from tests.commands import Command, models, wait_for
from tests.e2e.engines import untested

ROOT = Path(__file__).parents[2]
PLUGINS = Path(os.environ.get("TMPDIR", "/tmp")) / "coterie-docker" / "cfg"  # noqa: S108 - where engine.sh puts Compose
DEADLINE_S = 120.0
wait_until = functools.partial(wait_for, seconds=DEADLINE_S)
BASE = "python:3.11-slim"
IMAGES = {"server": "coterie-server", "client": "coterie-client"}


def environment() -> dict[str, str]:
    return {**os.environ, **({"DOCKER_CONFIG": str(PLUGINS)} if PLUGINS.is_dir() else {})}


def docker(*arguments: str, check: bool = True, timeout_s: float = 600.0) -> str:
    """What `docker ARGUMENTS` prints. AssertionError with what it says when it fails."""
    done = subprocess.run(["docker", *arguments], env=environment(), capture_output=True, text=True, check=False, timeout=timeout_s)
    assert done.returncode == 0 or not check, f"docker {' '.join(arguments)}: {done.stderr}"
    return done.stdout.strip() if check else (done.stdout + done.stderr).strip()


@functools.cache
def why_no_engine() -> str | None:
    """Why there is no engine to test with; None when there is one."""
    if shutil.which("docker") is None:
        return "docker is not installed"
    for arguments in (["version"], ["compose", "version"]):
        done = subprocess.run(["docker", *arguments], env=environment(), capture_output=True, text=True, check=False, timeout=60)
        if done.returncode:
            return f"docker {' '.join(arguments)} fails: {done.stderr.strip()[:200]}"
    for command in ("image inspect", "pull -q"):
        done = subprocess.run(["docker", *command.split(), BASE], env=environment(), capture_output=True, text=True, check=False)
        if not done.returncode:
            return None
    return f"{BASE} is not there and cannot be pulled: {done.stderr.strip()[:200]}"


def wants_an_engine() -> None:
    """Skips or fails the test where there is no engine."""
    if reason := why_no_engine():
        untested("CONTAINERS WERE", reason)


@functools.cache
def images_built() -> None:
    """Builds the images of both roles once. They choose the same BLAS kernels as this process, whose bits are compared with theirs."""
    kernels = {name: os.environ[name] for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE") if name in os.environ}
    for target, name in IMAGES.items():
        image = f"{name}:{coterie.__version__}"
        docker("build", "-q", "-f", f"{ROOT}/deploy/Dockerfile", "--target", target, "-t", image, str(ROOT))
        if kernels:
            with tempfile.TemporaryDirectory() as folder:
                lines = [f"FROM {image}", *(f"ENV {key}={value}" for key, value in kernels.items())]
                (Path(folder) / "Dockerfile").write_text("\n".join(lines) + "\n")
                docker("build", "-q", "-t", image, folder)


class Federation:
    """The containers of one Compose file. `name` is the project's and the experiment's."""

    def __init__(self, folder: Path, name: str, file: Path) -> None:
        self.folder, self.name, self.file = folder, name, file

    def compose(self, *arguments: str, check: bool = True) -> str:
        return docker("compose", "-p", self.name, "-f", str(self.file), *arguments, check=check)

    def up(self, *services: str) -> None:
        self.compose("up", "-d", *services)

    def down(self) -> None:
        self.compose("down", "-v", "--timeout", "2", check=False)

    def container(self, service: str) -> str:
        """The id of a service's container."""
        return docker("ps", "-aq", "--filter", f"label=com.docker.compose.project={self.name}", "--filter",
                      f"label=com.docker.compose.service={service}")  # fmt: skip

    def state(self, service: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(docker("inspect", "-f", "{{json .State}}", self.container(service)))
        return found

    def kill(self, service: str) -> None:
        docker("kill", self.container(service))

    def start(self, service: str) -> None:
        docker("start", self.container(service))

    def python(self, service: str, code: str, check: bool = True) -> str:
        """What a piece of Python prints in the container of a service."""
        return docker("exec", self.container(service), "python", "-c", code, check=check)

    def logs(self, service: str) -> str:
        return docker("logs", self.container(service), check=False)

    def carried(self, service: str) -> dict[str, int]:
        """Bytes that a running container has received and sent on each of its networks so far; nothing when it has ended."""
        code = """
import os
for name in os.listdir('/sys/class/net'):
    read = lambda what: open(f'/sys/class/net/{name}/{what}').read().strip()
    print(read('address'), int(read('statistics/rx_bytes')) + int(read('statistics/tx_bytes')))"""
        networks = json.loads(docker("inspect", "-f", "{{json .NetworkSettings.Networks}}", self.container(service)))
        try:
            seen = dict(line.split() for line in self.python(service, code).splitlines())
        except AssertionError:
            return {}
        return {name.removeprefix(f"{self.name}_"): int(seen[network["MacAddress"]]) for name, network in networks.items()}

    def round(self) -> int:
        """The last round that the coordinator has written down; 0 when it cannot be asked."""
        code = f"""
import sqlite3
print(sqlite3.connect('file:/runs/{self.name}/run.db?mode=ro', uri=True).execute('SELECT MAX(round) FROM figures').fetchone()[0] or 0)"""
        with contextlib.suppress(AssertionError, ValueError):
            return int(self.python("coordinator", code))
        return 0

    def reaches(self, number: int) -> None:
        """Waits for a round."""
        wait_until(lambda: self.round() >= number or self.state("coordinator")["Status"] == "exited", f"round {number}")
        assert self.state("coordinator")["Status"] == "running", f"the run ended before round {number}: {self.logs('coordinator')}"

    def ends(self, service: str = "coordinator", seconds: float = DEADLINE_S) -> int:
        """The exit code of a service once it has ended."""
        is_over = lambda: self.state(service)["Status"] == "exited"  # noqa: E731
        wait_for(is_over, lambda: f"the end of {service}: {self.logs(service)[-500:]}", seconds)
        return int(self.state(service)["ExitCode"])

    def is_complete(self) -> bool:
        """Whether the coordinator has ended well."""
        state = self.state("coordinator")
        return (state["Status"], state["ExitCode"]) == ("exited", 0)

    def completes(self, seconds: float = DEADLINE_S) -> None:
        """Waits until the coordinator has ended well, however often it is started again."""
        wait_for(self.is_complete, lambda: f"the end: {self.logs('coordinator')[-800:]}", seconds)

    def run_folder(self) -> Path:
        """A copy of the run folder, taken out of its volume."""
        target = self.folder / "copied"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        docker("cp", f"{self.container('coordinator')}:/runs/{self.name}", str(target))
        return target / self.name


@contextlib.contextmanager
def federation(folder: Path, name: str, experiment: str, *options: str) -> Iterator[Federation]:
    """The containers for an experiment (YAML), not yet up; all of it is gone afterwards."""
    images_built()
    (folder / f"{name}.yaml").write_text(experiment)
    written = Command(folder, "compose", f"{name}.yaml", "--output", f"{name}-compose.yml", *options)
    code, _, err = written.end()
    assert code == 0, err
    made = Federation(folder, name, folder / f"{name}-compose.yml")
    made.down()
    try:
        yield made
    finally:
        made.down()


def same_models(run: Path, other: Path, stages: Sequence[str] = ()) -> None:
    """All final models are the same to the bit."""
    found, wanted = models(run), models(other)
    assert wanted
    assert found == wanted, [stage for stage in wanted if found.get(stage) != wanted[stage]]
