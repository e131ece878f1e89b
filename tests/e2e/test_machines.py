"""Three machines, as network namespaces, and a federation with certificates between them by the commands of the tutorial."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.commands import Command, in_one_process, models

MACHINES = {"coordinator": "10.88.7.2", "a": "10.88.7.3", "b": "10.88.7.4"}
PUPILS = """
name: NAME
seed: 1
data: {source: csv, path: pupils.csv, user_column: school, target_column: score, test_fraction: 0.2}
problem: {loss: least_squares, l2: 0.001}
method: {name: pdmm, penalty: 0.1}
stop: {rounds: 60}
"""


def pupils(schools: Iterable[int]) -> str:
    """A table of 20 pupils of each school."""
    rows = [f"s{i},{(7 * i + j) % 5 - 2},{(3 * j + i) % 11 / 10},{(i % 2) * j % 7 + i}" for i in schools for j in range(20)]
    return "\n".join(["school,ses,hours,score", *rows]) + "\n"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


@contextlib.contextmanager
def machines() -> Iterator[dict[str, str]]:
    """Namespaces by the machine's name, plugged into a switch in a namespace of its own."""
    prefix = f"ct{os.getpid()}"
    spaces = {name: f"{prefix}-{name}" for name in ("switch", *MACHINES)}
    try:
        for space in spaces.values():
            ip("netns", "add", space)
            ip("-n", space, "link", "set", "lo", "up")
        ip("-n", spaces["switch"], "link", "add", "br0", "type", "bridge")
        ip("-n", spaces["switch"], "link", "set", "br0", "up")
        for name, address in MACHINES.items():
            ip("-n", spaces[name], "link", "add", "eth0", "type", "veth", "peer", "name", f"to-{name}"[:15], "netns", spaces["switch"])
            ip("-n", spaces["switch"], "link", "set", f"to-{name}"[:15], "master", "br0", "up")
            ip("-n", spaces[name], "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", spaces[name], "link", "set", "eth0", "up")
        yield spaces
    finally:
        for space in spaces.values():
            with contextlib.suppress(subprocess.SubprocessError):
                ip("netns", "del", space)


@pytest.mark.e2e
@pytest.mark.skipif(os.geteuid() != 0, reason="NO SEVERAL MACHINES WERE TESTED: only root makes network namespaces")
def test_two_machines_and_a_coordinator_with_certificates(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(PUPILS.replace("NAME", "my"))
    for machine, schools in (("a", range(4)), ("b", range(4, 6)), ("both", range(6))):
        (tmp_path / machine).mkdir()
        (tmp_path / machine / "pupils.csv").write_text(pupils(schools))

    def coterie(*arguments: str) -> None:
        code, _, err = Command(tmp_path, *arguments).end()
        assert code == 0, err

    coterie("certs", "init", "ca")
    coterie("certs", "issue", "ca", "coordinator", "--role", "coordinator", "--address", MACHINES["coordinator"])
    coterie("certs", "issue", "ca", "a", "--role", "host", "--users", "s0..s3")
    coterie("certs", "issue", "ca", "b", "--role", "host", "--users", "s4,s5")
    with machines() as spaces, contextlib.ExitStack() as stack:

        def on(machine: str, *arguments: str) -> subprocess.Popen[bytes]:
            command = ["ip", "netns", "exec", spaces[machine], sys.executable, "-P", "-m", "coterie", *arguments]
            process = stack.enter_context(subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE))
            stack.callback(process.kill)
            return process

        options = ("--hosts", "2", "--tls", "ca/coordinator", "--output", "two")
        served = on("coordinator", "server", "my.yaml", "--listen", "0.0.0.0:5000", *options)
        for machine in ("a", "b"):
            own = ("--name", machine, "--data", machine, "--tls", f"ca/{machine}", "--state", f"state-{machine}", "--accept", "any")
            on(machine, "client", "--server", f"{MACHINES['coordinator']}:5000", *own)
        _, err = served.communicate(timeout=60)
        assert served.returncode == 0, err.decode()
    assert models(tmp_path / "two") == models(in_one_process(tmp_path, "my.yaml", "--data", "both"))
