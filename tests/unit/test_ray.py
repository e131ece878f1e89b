"""Hosts on Ray without Ray: what they are started with, where they belong, and what the actor does with a process."""

from __future__ import annotations

import ast
import json
import os
import threading
from pathlib import Path

import pytest

from coterie.errors import ConfigError
from coterie.session.failures import FAILURE, left_failure
from coterie_deploy.containers.certs import federation
from coterie_deploy.engines.hosts import HostNotes, host_process
from coterie_deploy.engines.interface import LOG
from coterie_deploy.engines.ray_engine import TLS_NAME, Places, RayEngine
from coterie_deploy.engines.ray_member import TOKEN, RayMember
from coterie_deploy.read.shipped import load
from tests.rooms import PACKAGES, sources


def test_ray_is_imported_in_the_modules_of_its_engine_alone_and_never_beside_a_coordinator() -> None:
    importers = set()
    for path in (path for package in PACKAGES for path in sources(package)):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            names += [str(word.value) for word in node.args if isinstance(word, ast.Constant)] if isinstance(node, ast.Call) else []
            if {"ray"} & {name.partition(".")[0] for name in names if name.isascii()}:
                importers.add(path.name)
    assert importers == {"ray_driver.py"}


def test_a_host_is_started_with_its_share_its_certificate_and_its_place(tmp_path: Path) -> None:
    federation(tmp_path / "certs", 2, [TLS_NAME])
    members = [host_process(f"host-{i}", ("--users", f"#{i}"), tmp_path / f"run/hosts/host-{i}", tmp_path / "data") for i in (1, 2)]
    places = Places(0.5, ["host-2=nodeB"])
    engine = RayEngine(load("hsb", hosts=2), members, HostNotes(None, None), "auto", places, tmp_path / "certs")
    first, second = (json.loads(json.dumps(engine.start_of(member, "10.0.0.1:4000", "word"))) for member in members)
    assert (first["cpus"], first["resources"], second["resources"]) == (0.5, {}, {"nodeB": 0.001})
    arguments = " ".join(second["arguments"])
    assert arguments.startswith("client --server 10.0.0.1:4000 --launched --name host-2 --state {state} ")
    assert arguments.endswith(f"--users #2 --data {tmp_path}/data --tls {{tls}} --tls-name coordinator.run")
    assert second["tls"]["tls.key"] == (tmp_path / "certs/host-2/tls.key").read_text()
    assert first["tls"]["tls.key"] != second["tls"]["tls.key"]
    assert "ca.key" not in second["tls"], "who has it could join as anybody"


@pytest.mark.parametrize(
    ("resources", "sentence"),
    [
        (["nodeA"], "--resources is 'nodeA', want HOST=NAME, such as host-1=nodeA"),
        (["host-1="], "--resources is 'host-1=', want HOST=NAME"),
        (["host-4=nodeA"], "--resources is 'host-4=nodeA', but the hosts are host-1 to host-3"),
        (["host-1=a", "host-1=b"], "--resources names host-1 twice: 'a' and 'b'"),
    ],
)
def test_places_that_do_not_fit_are_refused(resources: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"^{sentence}"):
        Places(1.0, resources).of(["host-1", "host-2", "host-3"])


@pytest.mark.parametrize("cpus", [-1.0, float("nan"), float("inf")])
def test_cpus_are_a_number(cpus: float) -> None:
    with pytest.raises(ConfigError, match=r"^--cpus is .*, want CPUs for each host, 0 or more"):
        Places(cpus)


def member(folder: Path, *arguments: str, token: str = "word") -> RayMember:  # noqa: S107
    return RayMember(arguments, os.fspath(folder), token, {"tls.key": "secret"}, os.fspath(folder.parent))


def test_an_actor_that_shares_the_folder_has_its_state_there(tmp_path: Path) -> None:
    folder = tmp_path / "host-1"
    folder.mkdir()
    (folder / TOKEN).write_text("word")
    actor = member(folder, "client", "--server", "nowhere", "--launched", "--state", "{state}", "--tls", "{tls}")
    assert actor.place() == (os.uname().nodename, True)
    assert actor.run() == (2, b"", None)
    assert "error: --server is 'nowhere', want HOST:PORT" in (folder / LOG).read_text()


def test_an_actor_elsewhere_brings_its_log_and_its_failure_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder = tmp_path / "host-1"
    folder.mkdir()
    (folder / TOKEN).write_text("of an older run")
    actor = member(folder, "client", "--server", "127.0.0.1:1", "--launched", "--state", "{state}", "--patience", "0")
    assert actor.place() == (os.uname().nodename, False)
    assert actor.state.is_relative_to(tmp_path / "home")
    code, log, failure = actor.run()
    assert code == 3
    assert b"error: waited 0 s for a server at 127.0.0.1:1" in log
    assert failure is not None
    (folder / FAILURE).write_bytes(failure)
    assert left_failure(folder) is not None
    assert not (folder / LOG).exists(), "the driver writes it"


def test_the_end_of_an_actor_ends_its_process(tmp_path: Path) -> None:
    folder = tmp_path / "host-1"
    folder.mkdir()
    (folder / TOKEN).write_text("word")
    actor = member(folder, "client", "--server", "127.0.0.1:1", "--launched", "--state", "{state}", "--patience", "50")
    codes: list[int] = []
    running = threading.Thread(target=lambda: codes.append(actor.run()[0]))
    running.start()
    actor.end(20.0)
    running.join(30.0)
    assert codes == [143]
