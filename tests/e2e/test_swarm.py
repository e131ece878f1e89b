"""A stack of Docker Swarm, as a user has it: written by `coterie swarm`, deployed to a Swarm of this one machine, moved, killed, and taken
down by the commands of its own header."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from coterie_deploy.containers.certs import Asked, init, issue
from tests.commands import Command, in_one_process
from tests.e2e.containers import Federation, docker, environment, images_built, same_models, wait_until, wants_an_engine
from tests.e2e.test_containers import PDMM
from tests.e2e.test_machines import PUPILS, pupils

pytestmark = pytest.mark.e2e


@pytest.fixture(autouse=True, scope="module")
def node() -> Iterator[str]:
    """The only node of the Swarm: one that is there, or one that is made for these tests."""
    wants_an_engine()
    is_new = docker("info", "--format", "{{.Swarm.LocalNodeState}}") == "inactive"
    if is_new:
        docker("swarm", "init", "--advertise-addr", "127.0.0.1")
    try:
        nodes = docker("node", "ls", "--format", "{{.Hostname}}", check=False).split()
        if len(nodes) != 1:
            pytest.skip(f"NO SWARM WAS TESTED: the engine belongs to a Swarm of several nodes, or manages none: {nodes}")
        images_built()
        yield nodes[0]
    finally:
        if is_new:
            docker("swarm", "leave", "--force")
            docker("network", "rm", "docker_gwbridge", check=False)  # which stays otherwise


class Stack(Federation):
    """The services of one stack. `name` is the stack's and the experiment's."""

    def in_header(self, *words: str) -> list[str]:
        """The commands of the file's header with all these words, without what it says of them."""
        lines = [line.removeprefix("#   ").partition("      ")[0] for line in self.file.read_text().splitlines() if line.startswith("#   ")]
        found = [line for line in lines if all(word in line for word in words)]
        assert found, words
        return found

    def sh(self, line: str) -> None:
        done = subprocess.run(
            ["sh", "-c", line], cwd=self.folder, env=environment(), capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, f"{line}: {done.stderr}"

    def put(self, member: str, node: str) -> None:
        """The node is where a member belongs."""
        for line in self.in_header("docker node update", f"{self.name}.{member}=true"):
            self.sh(re.sub(r"\bNODE$", node, line))

    def deploy(self) -> None:
        for line in self.in_header("docker stack deploy"):
            self.sh(line)

    def down(self) -> None:
        docker("stack", "rm", self.name, check=False)
        wait_until(lambda: not self.containers(), "the end of all tasks", seconds=60)
        [node] = json.loads(docker("node", "inspect", "self"))
        for label in node["Spec"]["Labels"]:
            if label.startswith(f"{self.name}."):
                docker("node", "update", "--label-rm", label, node["ID"])
        volumes = docker("volume", "ls", "-q", "--filter", f"name=^{self.name}_").split()
        for network in docker("network", "ls", "-q", "--filter", f"name=^{self.name}_").split():
            wait_until(
                lambda found=network: not docker("network", "ls", "-q", "--filter", f"id={found}"), "the end of a network", seconds=60
            )
        if volumes:
            docker("volume", "rm", "-f", *volumes)

    def containers(self) -> list[str]:
        return docker("ps", "-aq", "--filter", f"label=com.docker.stack.namespace={self.name}").split()

    def container(self, service: str) -> str:
        """The newest one of a service."""
        return docker("ps", "-aq", "-n", "1", "--filter", f"label=com.docker.swarm.service.name={self.name}_{service}")

    def task(self, service: str) -> str:
        """What Swarm says of a service's newest task."""
        newest = docker("service", "ps", f"{self.name}_{service}", "--format", "{{.CurrentState}} {{.Error}}", "--no-trunc")
        return (newest.splitlines() or [""])[0]

    def disturbed(self, service: str, *command: str) -> None:
        """Runs a docker command on the container of a service. Swarm starts another container in its place: waits for that one."""
        before = self.container(service)
        docker(*(before if word == "CONTAINER" else word for word in command))
        wait_until(lambda: self.container(service) != before and self.task(service).startswith("Running"), f"another {service}")

    def is_complete(self) -> bool:
        return self.task("coordinator").startswith("Complete")

    def reaches(self, number: int) -> None:
        wait_until(lambda: self.round() >= number or self.is_complete(), f"round {number}")
        assert not self.is_complete(), f"the run ended before round {number}"


@contextlib.contextmanager
def stack(folder: Path, name: str, experiment: str, *options: str) -> Iterator[Stack]:
    """The stack of an experiment (YAML), not yet deployed; all of it is gone afterwards."""
    (folder / f"{name}.yaml").write_text(experiment)
    code, _, err = Command(folder, "swarm", f"{name}.yaml", "--output", "stack.yml", *options).end()
    assert code == 0, err
    made = Stack(folder, name, folder / "stack.yml")
    made.down()
    try:
        yield made
    finally:
        made.down()


def test_a_stack_that_is_moved_and_killed_ends_with_the_bits_of_a_run_in_one_process(tmp_path: Path, node: str) -> None:
    init(tmp_path / "certs")
    for name, of in (("coordinator", {"addresses": ["coordinator"]}), ("host-1", {"users": ["u0..u2"]}), ("host-2", {"users": ["u3..u5"]})):
        issue(tmp_path / "certs", Asked("host" if name.startswith("host") else name, name, **of))  # type: ignore[arg-type]
    experiment = PDMM.replace("NAME", "moved").replace("rounds: 1200", "rounds: 2000")
    with stack(tmp_path, "moved", experiment, "--mtls", "certs") as made:
        for member in ("coordinator", "host-1"):
            made.put(member, node)
        made.deploy()
        wait_until(lambda: made.task("host-1").startswith("Running"), "the first host")
        assert made.task("host-2").startswith("Pending")  # there is no node yet that has its data
        assert "scheduling constraints not satisfied" in made.task("host-2")
        made.put("host-2", node)
        made.reaches(50)
        made.disturbed("host-1", "service", "update", "--force", "--detach", "moved_host-1")
        made.reaches(made.round() + 20)
        made.disturbed("host-2", "kill", "CONTAINER")
        made.reaches(made.round() + 20)
        made.disturbed("coordinator", "kill", "CONTAINER")
        made.reaches(made.round() + 20)
        made.disturbed("coordinator", "service", "update", "--force", "--detach", "moved_coordinator")
        made.completes()
        for service in ("host-1", "host-2"):
            wait_until(lambda service=service: made.task(service).startswith("Complete"), f"the end of {service}", seconds=20)
        [copy] = made.in_header("docker cp")
        made.sh(copy)
        for line in made.in_header("docker stack rm"):
            made.sh(line)
        wait_until(lambda: not made.containers(), "the end of all tasks", seconds=60)
        [remove] = made.in_header("docker volume rm")
        made.sh(remove)
        assert not docker("volume", "ls", "-q", "--filter", "name=^moved_")
    same_models(tmp_path / "moved", in_one_process(tmp_path, "moved.yaml"))


def test_a_host_starts_only_where_the_folder_of_its_data_is_and_is_confined(tmp_path: Path, node: str) -> None:
    """The folder of the second host comes late. Swarm rejects its task until then, and makes no folder in its place."""
    tables = {"host-1": pupils(range(3)), "host-2": pupils(range(3, 6)), "both": pupils(range(6))}
    private, experiment = tmp_path / "private", PUPILS.replace("NAME", "tables")
    with stack(tmp_path, "tables", experiment, "--hosts", "2", "--private-data", str(private), "--place", f"*=hostname={node}") as made:
        for host in ("host-1", "both"):
            (private / host).mkdir(parents=True)
            (private / host / "pupils.csv").write_text(tables[host])
        made.deploy()
        wait_until(lambda: "bind source path does not exist" in made.task("host-2"), "the refusal of Swarm")
        assert not (private / "host-2").exists()
        (private / "host-2").mkdir()
        (private / "host-2/pupils.csv").write_text(tables["host-2"])
        made.completes()
        found = json.loads(docker("inspect", made.container("coordinator")))[0]
        assert (found["HostConfig"]["ReadonlyRootfs"], found["HostConfig"]["CapDrop"], found["Config"]["User"]) == (
            True,
            ["ALL"],
            "10001:10001",
        )
        assert {mount["Destination"]: mount["Type"] for mount in found["Mounts"]}["/tmp"] == "tmpfs"  # noqa: S108
        run = made.run_folder()
    same_models(run, in_one_process(tmp_path, "tables.yaml", "--data", str(private / "both")))
