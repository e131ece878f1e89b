"""Hosts as actors of Ray, on nodes that are started here: placed, killed, lost with their node, and ended with the command.

Each run ends with the bits of an undisturbed one in one process.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.commands import LONG, Command, commands_in, events, in_one_process, models, n_rounds, wait_for
from tests.e2e.engines import untested

pytestmark = pytest.mark.e2e

DEADLINE_S = 90.0  # many processes start here, maybe on a busy machine
wait_until = functools.partial(wait_for, seconds=DEADLINE_S)


def processes(*words: str) -> list[int]:
    """The processes with all of these in their command lines."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (folder / "cmdline").read_bytes().decode("utf-8", "replace")
            if line and all(word in line for word in words):
                found.append(int(folder.name))
    return found


class Cluster:
    """A head and further nodes on this machine. They listen on free ports and have little memory for objects."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ray-"))  # pytest's own is too long for the names of sockets
        self._nodes: list[subprocess.Popen[bytes]] = []
        with contextlib.ExitStack() as stack:
            found = [stack.enter_context(socket.socket()) for _ in range(2)]
            for one in found:
                one.bind(("127.0.0.1", 0))
            port, other = (one.getsockname()[1] for one in found)
        self.address = f"127.0.0.1:{port}"
        head = (f"--port={port}", f"--ray-client-server-port={other}", f"--temp-dir={self.folder}", "--include-dashboard=false")
        self.add("--head", *head, resource="nodeA")

    def add(self, *options: str, resource: str, launcher: Sequence[str] = ()) -> None:
        """Starts a node. A launcher is words of a command that ends with executing what follows them."""
        where = options or (f"--address={self.address}",)
        ray = [*launcher, sys.executable, "-c", "import sys; from ray.scripts.scripts import main; sys.exit(main())", "start", "--block"]
        with (self.folder / "nodes.log").open("ab") as log:
            self._nodes.append(
                subprocess.Popen(
                    [
                        *(*ray, *where, "--num-cpus=2", "--object-store-memory=80000000", "--disable-usage-stats"),
                        f"--resources={json.dumps({resource: 1})}",
                    ],
                    env={
                        **os.environ,
                        "HOME": str(self.folder),
                        "RAY_health_check_period_ms": "1000",
                        "RAY_health_check_timeout_ms": "5000",
                    },
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )
        said = f"{len(self._nodes)} started"
        wait_until(lambda: (self.folder / "nodes.log").read_text().count("Ray runtime started") == len(self._nodes), said)

    def kill(self, resource: str) -> None:
        """A node is gone, as without power: Ray's own process, and what it has started."""
        (raylet,) = processes("raylet/raylet", str(self.folder), f"{resource},1")
        os.kill(raylet, signal.SIGKILL)

    def end(self) -> None:
        for node in reversed(self._nodes):
            node.terminate()
        for node in self._nodes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.wait(20)
        for process in processes(str(self.folder)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes, each with a resource of its own."""
    if importlib.util.find_spec("ray") is None:
        untested("RAY WAS", "it is not installed")
    made = Cluster()
    try:
        made.add(resource="nodeB")
        yield made
    finally:
        made.end()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Starts commands; kills what a failed test leaves running."""
    (tmp_path / "long.yaml").write_text(LONG)
    with commands_in(tmp_path) as commands:
        yield commands


def on(cluster: Cluster, *experiment: str, second: str = "nodeB") -> tuple[str, ...]:
    """A run with two hosts, each on a node of its own."""
    places = ("--resources", "host-1=nodeA", "--resources", f"host-2={second}")
    return ("run", *experiment, "--engine", "ray", "--ray-address", cluster.address, "--hosts", "2", *places)


@pytest.mark.parametrize("experiment", [("hsb", "--set", "stop.rounds=20"), ("schools", "--set", "stop.rounds=20")])
def test_a_run_on_ray_reports_and_has_the_bits_of_one_process(cluster: Cluster, tmp_path: Path, experiment: tuple[str, ...]) -> None:
    code, out, err = Command(tmp_path, *on(cluster, *experiment)).end(DEADLINE_S)
    assert code == 0, err
    assert "stage 1/" in err, "progress is shown as that of a local run"
    assert f"run folder: runs/{experiment[0]}" in out
    assert models(tmp_path / "runs" / experiment[0]) == models(in_one_process(tmp_path, *experiment))
    assert len(events(tmp_path / "runs" / experiment[0], "placed")) == 2
    assert not processes(str(tmp_path)), "nothing outlives the command"


def test_a_killed_host_and_a_lost_node_are_replaced_and_no_bit_changes(
    cluster: Cluster, start: Callable[..., Command], tmp_path: Path, calm: dict[str, bytes]
) -> None:
    running, run = start(*on(cluster, "long.yaml")), tmp_path / "runs/long"
    wait_until(lambda: n_rounds(run) >= 150, "round 150")
    (host,) = processes("client", str(run / "hosts/host-1"))
    os.kill(host, signal.SIGKILL)
    wait_until(lambda: n_rounds(run) >= 350, "round 350")
    cluster.kill("nodeB")
    wait_until(lambda: not processes("client", str(run / "hosts/host-2")), "the end of the node's host")
    cluster.add(resource="nodeB")
    code, _, err = running.end(DEADLINE_S)
    assert code == 0, err
    killed, lost = events(run, "restart")
    assert killed == "host 'host-1' was killed by SIGKILL and is started again"
    assert lost.startswith("host 'host-2' was lost by Ray (Actor")
    assert models(run) == calm


def test_a_node_that_does_not_share_the_run_folder_keeps_the_state_and_brings_the_log_back(
    cluster: Cluster, start: Callable[..., Command], tmp_path: Path, calm: dict[str, bytes]
) -> None:
    if subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "none", str(tmp_path)], check=False, timeout=10).returncode:
        pytest.skip("NO NODE WITHOUT THE RUN FOLDER WAS TESTED: only root that may mount hides a folder from a node")
    hidden = ("unshare", "--mount", "sh", "-c", f'mount -t tmpfs none {tmp_path} && exec "$@"', "node")
    cluster.add(resource="nodeC", launcher=hidden)
    running, run = start(*on(cluster, "long.yaml", second="nodeC")), tmp_path / "runs/long"
    wait_until(lambda: n_rounds(run) >= 150, "round 150")
    (host,) = processes("client", "host-2", str(cluster.folder))
    os.kill(host, signal.SIGKILL)
    code, _, err = running.end(DEADLINE_S)
    assert code == 0, err
    assert "host 'host-2' is an actor of Ray on" in err
    assert "has its state there: a loss of that node would lose it" in err
    assert events(run, "restart") == ["host 'host-2' was killed by SIGKILL and is started again"]
    assert models(run) == calm
    assert "host 'host-2' with" in (run / "hosts/host-2/log.txt").read_text()
    assert not [*(run / "hosts/host-2").glob("*.snapshot")]
    assert [*cluster.folder.glob(".cache/coterie/ray/*/host-2/*.snapshot")]


def test_ctrl_c_ends_the_actors_and_resume_goes_on(
    cluster: Cluster, start: Callable[..., Command], tmp_path: Path, calm: dict[str, bytes]
) -> None:
    running, run = start(*on(cluster, "long.yaml")), tmp_path / "runs/long"
    wait_until(lambda: n_rounds(run) >= 200, "round 200")
    running.process.send_signal(signal.SIGINT)
    places = "--resources host-1=nodeA --resources host-2=nodeB"
    assert f"coterie run runs/long --resume --engine ray --ray-address {cluster.address} {places}" in running.fails(130)
    assert not processes(str(tmp_path)), "nothing outlives the command"
    code, _, err = start(*on(cluster, "runs/long", "--resume")).end(DEADLINE_S)
    assert code == 0, err
    assert models(run) == calm


def test_hosts_end_with_a_command_that_is_killed(cluster: Cluster, start: Callable[..., Command], tmp_path: Path) -> None:
    running = start(*on(cluster, "long.yaml"))
    wait_until(lambda: n_rounds(tmp_path / "runs/long") >= 100, "round 100")
    running.process.kill()
    wait_until(lambda: not processes(str(tmp_path)), "the end of the hosts")
    running.process.communicate(timeout=10)


def test_a_host_without_a_place_is_named_and_a_cluster_that_is_not_there_too(cluster: Cluster, start: Callable[..., Command]) -> None:
    lonely = ("--resources", "host-1=nodeZ", "--set", "federation.join_timeout_s=8")
    code, _, err = start("run", "hsb", "--engine", "ray", "--ray-address", cluster.address, "--hosts", "1", *lonely).end(DEADLINE_S)
    assert code == 3, err
    assert re.search(r"host 'host-1' has waited \d s for Ray to start it on a node with free CPUs \(1\) and the resource 'nodeZ'", err), err
    sentence = start("run", "hsb", "--engine", "ray", "--ray-address", "127.0.0.1:9").fails(2)
    assert "there is no Ray cluster at '127.0.0.1:9'" in sentence
