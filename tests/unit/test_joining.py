"""What a member finds out by itself before it joins: why nobody answers, and who its certificate says it is."""

from __future__ import annotations

import asyncio
import re
import socket
from pathlib import Path

import pytest

from coterie.errors import ConfigError, RunError
from coterie.session import dial
from coterie.session.dial import serve_member
from coterie.session.probe import unreachable
from coterie.session.tls import load_tls
from coterie.session.where import Where
from coterie_deploy.containers.certs import Asked, init, issue
from coterie_deploy.roles import joining
from coterie_deploy.roles.joining import own_identity
from coterie_deploy.telemetry.logs import Log
from coterie_deploy.terminal.signals import Stop


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


@pytest.mark.parametrize(
    ("host", "why"),
    [("127.0.0.1", "the connection was refused"), ("nowhere.invalid", "the name 'nowhere.invalid' was not found")],
)
def test_a_member_says_why_no_server_answers(host: str, why: str) -> None:
    address, waits = f"{host}:{free_port()}", list[tuple[str, float]]()

    async def test() -> None:
        await serve_member(lambda *_: None, address, name="a", patience_s=1.5, on_wait=lambda *said: waits.append(said))

    with pytest.raises(RunError, match=rf"^waited 1\.5 s for a server at {address}: none answered \({why}"):
        asyncio.run(test())
    assert len(waits) == 1
    assert waits[0][0].startswith(why)
    assert 1.0 <= waits[0][1] < 1.5


def test_a_long_wait_is_said_again_with_what_is_over_and_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(dial, "SAY_S", 0.05)
    monkeypatch.setattr(dial, "SAY_AGAIN_S", 0.2)
    monkeypatch.setattr(joining, "SAY_AGAIN_S", 0.2)
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(RunError, match=r"^waited 4 s for a server"):
        asyncio.run(
            serve_member(lambda *_: None, address, name="a", **joining.waits(Log(write=lines.append), "a server", address, 4.0, Stop()))
        )
    first, *later = lines
    assert first.startswith(f"waiting for a server at {address} (up to 4 s): the connection was refused")
    assert later
    assert all(
        re.match(rf"waiting for a server at {address} \(\d s so far, up to 4 s\): the connection was refused", line) for line in later
    )


def test_a_port_that_listens_is_reached_and_a_silent_machine_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        assert asyncio.run(unreachable(f"127.0.0.1:{listening.getsockname()[1]}")) == ""

    def silent(*_: object, **__: object) -> socket.socket:
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", silent)
    assert asyncio.run(unreachable("127.0.0.1:1")).startswith("the connection timed out")


def test_a_certificate_gives_name_and_cluster_and_contradictions_are_found_at_once(tmp_path: Path) -> None:
    init(tmp_path)
    host = load_tls(issue(tmp_path, Asked("host", "clinic", cluster="north")), is_server=False)
    aggregator = load_tls(issue(tmp_path, Asked("aggregator", "agg", ["localhost"], cluster="north")), is_server=True)
    for tls, role, name in ((host, "host", "clinic"), (aggregator, "aggregator", "agg")):
        found = own_identity(tls, role, "north")
        assert found is not None
        assert (found.name, found.cluster) == (name, "north")
        with pytest.raises(ConfigError, match=r"is for cluster 'north', but --cluster is 'south'$"):
            own_identity(tls, role, "south")
    assert own_identity(None, "host", "south") is None
    assert own_identity(aggregator, "host", None) is None, "the parent refuses it, and says why"


def test_a_name_that_begins_like_this_machine_is_not_this_machine() -> None:
    for address in ("localhost:7000", "127.8.9.1:7000", "[::1]:7000"):
        Where(address)
    with pytest.raises(ConfigError, match=r"^joining 127\.example:7000 without TLS sends models in plain text"):
        Where("127.example:7000")
