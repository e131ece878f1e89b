"""What an aggregator tells callers who are no peers, and whom it believes at the other end, over gRPC."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import grpc
import pytest

from coterie.errors import ConfigError, RunError
from coterie.session.tls import Tls, load_tls
from coterie.v1 import session_pb2
from coterie.wire.codec import PROTOCOL_VERSION
from coterie_deploy.containers.certs import Asked, init, issue
from coterie_server.session.peering import Peering
from coterie_server.transport.peers import SERVICE, PeerDialler, PeerDoor
from tests.two_tier import QUICK, small

RULES = {**QUICK, "topology": "peers", "on_loss": "stop", "absence_timeout_s": 1.0}
RECORDER = SimpleNamespace(times=Counter, book=lambda *_, **__: None, book_host=lambda *_: None, flush=lambda: None)


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ca")
    init(folder)
    for name in ("c0", "c1", "c2"):
        issue(folder, Asked("aggregator", name, ["127.0.0.1"], cluster=name))
    with mock.patch("coterie_deploy.containers.certs.peer_name", return_value="another.example"):
        issue(folder, Asked("aggregator", "old", ["127.0.0.1"], cluster="old"))
    return folder


def peering(name: str, port: int, notes: list[str] | None = None) -> Peering:
    """One of three aggregators, which are all at this port."""

    def note(kind: str, text: str, **_: Any) -> None:
        if notes is not None:
            notes.append(f"{kind}: {text}")

    found: Any = Peering(name, small(federation=RULES), "run", RECORDER, note, 1)  # type: ignore[arg-type]
    listed = [session_pb2.Peer(name=f"c{i}", address=f"127.0.0.1:{port}", cluster=i) for i in range(3)]
    found.meet(session_pb2.PeerList(peers=listed))
    found.begin(session_pb2.Task(seq=5), 0)
    return found


def with_door(own: Peering, tls: Tls | None, act: Callable[[int], Any]) -> Any:
    """Acts while an aggregator serves its peers at a port."""

    async def run() -> Any:
        async with asyncio.timeout(30):
            server = grpc.aio.server()
            server.add_generic_rpc_handlers((PeerDoor(own, wants_identity=tls is not None).handler(),))
            at = "127.0.0.1:0"
            port = server.add_insecure_port(at) if tls is None else server.add_secure_port(at, tls.server_credentials())
            await server.start()
            try:
                return await act(port)
            finally:
                await server.stop(0)

    return asyncio.run(run())


@pytest.mark.parametrize(("wanted", "said"), [("c1", "refuses aggregator 'c0'.* has been forgotten"), ("c2", "has not been reached")])
def test_a_peer_is_believed_by_its_name_and_not_by_its_address(certs: Path, wanted: str, said: str) -> None:
    """All three have certificates for 127.0.0.1, where c1 listens."""
    own = peering("c1", 1)
    for place in (0, 2):
        own.said_durable(place, 4)  # so it answers at once, that the message of exchange 3 is forgotten

    async def fetch(port: int) -> None:
        other = peering("c0", port)
        dialler = PeerDialler(other, load_tls(certs / "c0", is_server=False))
        try:
            await dialler.fetch([f"c{i}" for i in range(3)].index(wanted), 3, 0, 3)
        finally:
            await dialler.close()

    with pytest.raises(RunError, match=said):
        with_door(own, load_tls(certs / "c1", is_server=True), fetch)


def test_an_aggregator_whose_certificate_has_no_name_for_others_does_not_start(certs: Path) -> None:
    load_tls(certs / "c1", is_server=True).check_peer_name("c1")
    for folder, name in (("old", "old"), ("c1", "c2")):
        with pytest.raises(ConfigError, match=rf"other aggregators would not know '{name}' by \S+tls.crt: issue another one"):
            load_tls(certs / folder, is_server=True).check_peer_name(name)


def test_callers_who_are_no_peers_are_refused_and_do_not_fill_the_disk() -> None:
    notes: list[str] = []
    right = session_pb2.FetchRequest(protocol=PROTOCOL_VERSION, run_id="run", aggregator="c0", seq=5, durable_seq=3)
    wrong = {
        "of another run": {"run_id": "other"},
        "speaks protocol 0": {"protocol": 0},
        "is no other aggregator of this run": {"aggregator": "c1"},
        "which its snapshots up to 5 contain": {"durable_seq": 5},
    }

    async def ask(port: int) -> list[str]:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            fetch = channel.unary_stream(f"/{SERVICE}/Fetch", request_serializer=session_pb2.FetchRequest.SerializeToString)
            details = []
            for changes in [*wrong.values(), *[{"run_id": "other"}] * 100]:
                asked = session_pb2.FetchRequest.FromString(right.SerializeToString())
                for field, value in changes.items():
                    setattr(asked, field, value)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await fetch(asked).read()
                details.append(caught.value.details() or "")
            return details

    found = with_door(peering("c1", 1, notes), None, ask)
    assert all(said in detail for said, detail in zip(wrong, found[: len(wrong)], strict=True)), found[: len(wrong)]
    assert 20 <= len(notes) < 30


def test_a_peer_that_lies_about_its_snapshots_cannot_have_messages_forgotten_that_are_still_needed() -> None:
    own = peering("c1", 1)
    for place in (0, 2):
        own.said_durable(place, 1 << 60)
    assert own.is_forgotten(4)
    assert not own.is_forgotten(5)
