"""A Swarm of two nodes: this machine's engine, and another one in a network namespace of its own, with a name and volumes of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import coterie
from tests.commands import in_one_process
from tests.e2e.containers import docker, images_built, same_models, wait_until, wants_an_engine
from tests.e2e.test_containers import PDMM
from tests.e2e.test_machines import ip
from tests.e2e.test_swarm import stack

pytestmark = pytest.mark.e2e
HERE, THERE = "10.88.9.1", "10.88.9.2"


@contextlib.contextmanager
def two_nodes() -> Iterator[tuple[str, str]]:
    """The names of both nodes, of which the first is the manager."""
    name = f"ct{os.getpid()}"
    folder = Path(tempfile.mkdtemp(prefix=name))
    other = ("-H", f"unix://{folder}/docker.sock")
    folders = [word for kind in ("data", "exec") for word in (f"--{kind}-root", f"{folder}/{kind}")]
    engine = ["dockerd", *other, *folders, "--pidfile", f"{folder}/pid"]
    renamed = ["unshare", "--uts", "sh", "-c", f'hostname {name} && exec nsenter --net=/var/run/netns/{name} "$@"', "sh", *engine]
    with contextlib.ExitStack() as undo:
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        ip("netns", "add", name)
        undo.callback(ip, "netns", "del", name)
        ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("addr", "add", f"{HERE}/30", "dev", name)
        ip("link", "set", name, "up")
        ip("-n", name, "addr", "add", f"{THERE}/30", "dev", "eth0")
        for device in ("lo", "eth0"):
            ip("-n", name, "link", "set", device, "up")
        ip("-n", name, "route", "add", "default", "via", HERE)
        log = undo.enter_context((folder / "log").open("w"))
        process = undo.enter_context(subprocess.Popen(renamed, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True))
        undo.callback(process.terminate)
        wait_until(lambda: process.poll() is not None or "Server:" in docker(*other, "version", check=False), "another engine")
        assert process.poll() is None, (folder / "log").read_text()[-500:]
        image = f"coterie-client:{coterie.__version__}"
        docker("save", "-o", f"{folder}/image.tar", image)
        docker(*other, "load", "-i", f"{folder}/image.tar")
        docker("swarm", "init", "--advertise-addr", HERE)
        undo.callback(docker, "swarm", "leave", "--force")
        manager = docker("node", "inspect", "self", "--format", "{{.Description.Hostname}}")
        docker(*other, "swarm", "join", "--token", docker("swarm", "join-token", "-q", "worker"), "--advertise-addr", THERE, f"{HERE}:2377")
        undo.callback(docker, *other, "swarm", "leave", "--force")
        yield manager, name


def test_a_member_whose_node_is_emptied_waits_for_it_and_finds_its_state_there(tmp_path: Path) -> None:
    wants_an_engine()
    if os.geteuid() != 0 or shutil.which("dockerd") is None or docker("info", "--format", "{{.Swarm.LocalNodeState}}") != "inactive":
        pytest.skip("NO SWARM OF TWO NODES WAS TESTED: it wants root, dockerd, and an engine that is in no Swarm")
    images_built()
    with two_nodes() as (manager, other):
        places = [
            f"--place={member}=hostname={node}" for member, node in (("coordinator", manager), ("host-1", manager), ("host-2", other))
        ]
        with stack(tmp_path, "nodes", PDMM.replace("NAME", "nodes"), *places) as made:
            made.deploy()
            made.reaches(50)
            docker("node", "update", "--availability", "drain", other)
            wait_until(lambda: made.task("host-2").startswith("Pending"), "the wait for the node")
            docker("node", "update", "--availability", "active", other)
            made.completes()
            run = made.run_folder()
            tasks = docker("service", "ps", "nodes_host-2", "--format", "{{.Node}} {{.CurrentState}}").splitlines()
    assert [line.split()[:2] for line in tasks] == [[other, "Complete"], [other, "Shutdown"]]
    same_models(run, in_one_process(tmp_path, "nodes.yaml"))
