"""Mutual TLS between real processes: who may join as whom, and what is said, on both sides, when certificates do not fit."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import grpc
import pytest

from coterie.session.dial import SERVICE
from coterie.session.tls import load_tls
from coterie.v1 import session_pb2
from coterie.wire.codec import PROTOCOL_VERSION
from coterie_deploy.containers.certs import Asked, init, issue
from tests.commands import Command, commands_in, events, in_one_process, models, wait_for

EXPERIMENT = """
name: small
seed: 3
data: {source: ellipses, users_per_cluster: 2, test_per_class: 50}
problem: {loss: squared_hinge, l2: 0.001}
method: {name: squared, penalty: 0.07}
"""
TIERS = """
name: tiers
seed: 4
data: {source: hlm, clusters: 2, users_per_cluster: 2, rows_per_user: 4, d: 3}
problem: {loss: least_squares, l2: 0.1, intercept: false}
method: {name: async_l2gd, iterations: 30, gamma: 1.0, alpha: 0.4, p0: 0.3, p: 0.3, collect_models: true}
federation: {topology: clusters, hosts: 2}
"""
MASKED = """
name: masked
seed: 3
data: {source: ellipses, users_per_cluster: 2, test_per_class: 50}
problem: {loss: squared_hinge, l2: 0.001}
method: {name: global}
exact_sums: true
federation: {hosts: 2, sums: masked}
"""
LOCAL = ("127.0.0.1",)


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of two authorities, good ones and others."""
    ours, others = tmp_path_factory.mktemp("ours"), tmp_path_factory.mktemp("others")
    for folder in (ours, others):
        init(folder)
        issue(folder, Asked("coordinator", "coordinator", LOCAL))
        issue(folder, Asked("host", "a", users=["u0..u2"]))
    issue(ours, Asked("host", "b", users=["u3", "u4..u5"]))
    issue(ours, Asked("host", "anybody"))
    with mock.patch("coterie_deploy.containers.certs._LOCAL", ()):
        issue(ours, Asked("coordinator", "elsewhere", ["coordinator.example"]))
    issue(ours, Asked("aggregator", "c0", LOCAL, cluster="c0"))
    issue(ours, Asked("aggregator", "c1", LOCAL, cluster="c1"))
    issue(ours, Asked("host", "host-of-c0", cluster="c0"))
    issue(ours, Asked("host", "host-of-c1", cluster="c1"))
    (ours / "others").symlink_to(others)
    return ours


@pytest.fixture
def start(tmp_path: Path, certs: Path) -> Iterator[Callable[..., Command]]:
    (tmp_path / "small.yaml").write_text(EXPERIMENT)
    (tmp_path / "tiers.yaml").write_text(TIERS)
    (tmp_path / "masked.yaml").write_text(MASKED)
    (tmp_path / "open.yaml").write_text(MASKED.replace("masked", "open"))
    (tmp_path / "ca").symlink_to(certs)
    with commands_in(tmp_path) as run:
        yield run


def server(start: Callable[..., Command], *options: str) -> tuple[Command, str]:
    command = start("server", "small.yaml", "--listen", "127.0.0.1:0", "--hosts", "2", *options)
    return command, command.address()


def client(start: Callable[..., Command], address: str, name: str, users: str, *options: str) -> Command:
    return start("client", "--server", address, "--name", name, "--users", users, "--state", f"state-{name}", *options)


def booked(served: Command, folder: Path, kind: str) -> list[str]:
    """The events of a server that is asked to stop."""
    served.process.terminate()
    served.end()
    return events(folder / "runs/small", kind)


def test_a_federation_with_certificates_has_the_bits_of_one_process(start: Callable[..., Command], tmp_path: Path) -> None:
    served, address = server(start, "--tls", "ca/coordinator", "--output", "runs/tls")
    assert start("health", address, "--tls", "ca/coordinator").end()[:2] == (0, "SERVING\n")
    for name, users in (("a", "#0..#2"), ("b", "#3..#5")):
        client(start, address, name, users, "--tls", f"ca/{name}")
    assert served.end()[0] == 0
    assert models(tmp_path / "runs/tls") == models(in_one_process(tmp_path, "small.yaml"))


@pytest.mark.slow
def test_masked_sums_with_certificates_have_signed_keys_and_the_bits_of_open_sums_in_one_process(
    start: Callable[..., Command], tmp_path: Path
) -> None:
    served = start("server", "masked.yaml", "--listen", "127.0.0.1:0", "--tls", "ca/coordinator", "--output", "runs/tls")
    address = served.address()
    for name, users in (("a", "#0..#2"), ("b", "#3..#5")):
        client(start, address, name, users, "--tls", f"ca/{name}")
    assert served.end()[0] == 0
    assert not [text for text in events(tmp_path / "runs/tls", "warning") if "signed" in text]
    assert models(tmp_path / "runs/tls") == models(in_one_process(tmp_path, "open.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["clusters", "peers"])
def test_two_tiers_with_certificates(start: Callable[..., Command], tmp_path: Path, topology: str) -> None:
    served = start(
        "server", "tiers.yaml", "--topology", topology, "--listen", "127.0.0.1:0", "--tls", "ca/coordinator", "--output", "runs/tls"
    )
    address = served.address()
    for cluster in ("c0", "c1"):
        options = ("--cluster", cluster, "--listen", "127.0.0.1:0", "--hosts", "1", "--state", f"state-{cluster}")
        aggregator = start("aggregator", "--server", address, *options, "--tls", f"ca/{cluster}")
        assert aggregator.process.stdout is not None
        found = next(match[1] for line in aggregator.process.stdout if (match := re.search(r"listens on (\S+)", line)))
        name = f"host-of-{cluster}"
        start("client", "--server", found, "--name", name, "--cluster", cluster, "--state", name, "--tls", f"ca/{name}")
    code, _, err = served.end()
    assert code == 0, err


@pytest.mark.parametrize(
    ("options", "code", "sentence"),
    [
        (
            ("b", "#0..#2", "--tls", "ca/b"),
            2,
            "host 'b' is refused: its certificate does not let it speak for user 'u0': it is for u3, u4..u5",
        ),
        (("b", "#3..#5", "--tls", "ca/a"), 2, "host 'b' is refused: its certificate is that of host 'a', wanted one of host 'b'"),
        (("c0", "#0..#2", "--tls", "ca/c0"), 2, "its certificate is that of aggregator 'c0', wanted one of host 'c0'"),
        (("host-of-c0", "#0..#2", "--tls", "ca/host-of-c0"), 2, "for users of cluster 'c0', but it brings user 'u2' of cluster 'c1'"),
    ],
)
def test_a_certificate_decides_for_whom_a_host_speaks(
    start: Callable[..., Command], tmp_path: Path, options: tuple[str, ...], code: int, sentence: str
) -> None:
    served, address = server(start, "--tls", "ca/coordinator")
    name, users, *more = options
    assert sentence in client(start, address, name, users, *more).fails(code)
    assert sentence in served.line(sentence)
    assert sentence in "".join(booked(served, tmp_path, "refused"))


@pytest.mark.parametrize("name", ["b", ""])
def test_nobody_speaks_in_the_name_of_another_before_it_has_joined(
    start: Callable[..., Command], certs: Path, tmp_path: Path, name: str
) -> None:
    """Neither to ask, nor to say that the other cannot come."""
    served, address = server(start, "--tls", "ca/coordinator")
    failure = session_pb2.JoinRequest(failure=session_pb2.Failure(config=True)).SerializeToString()
    hello = session_pb2.JoinRequest(hello=session_pb2.Hello(protocol=PROTOCOL_VERSION, host=name, more=True)).SerializeToString()
    said = session_pb2.Finding(rule="J1")
    asked = [session_pb2.GetExperimentRequest(protocol=PROTOCOL_VERSION, host=name, finding=finding) for finding in (None, said)]
    sentence = f"host {name!r} is refused: its certificate is that of host 'a', wanted one of host {name!r}"
    with grpc.secure_channel(address, load_tls(certs / "a", is_server=False).channel_credentials()) as channel:
        ask, join = channel.unary_unary(f"/{SERVICE}/GetExperiment"), channel.stream_stream(f"/{SERVICE}/Join")
        for call in (*((ask, request.SerializeToString()) for request in asked), (join, iter([hello, failure])), (join, iter([failure]))):
            with pytest.raises(grpc.RpcError) as caught:
                list(call[0](call[1], timeout=5.0))
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
            assert "is refused: its certificate is that of host 'a'" in caught.value.details()
    said = "".join(booked(served, tmp_path, "refused"))
    assert sentence in said
    assert "give" not in said


def test_a_handshake_that_fails_is_named_by_the_client(start: Callable[..., Command], tmp_path: Path) -> None:
    _, address = server(start, "--tls", "ca/coordinator")
    # A client of another authority does not believe the server either, and says so first.
    others = client(start, address, "a", "#0..#2", "--tls", "ca/others/a").fails(2)
    assert "its certificate is not believed: it was not issued by the authority in ca.crt" in others
    # One that believes the server, with a certificate of another authority.
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    for name, folder in (("ca.crt", "ca"), ("tls.crt", "ca/others/a"), ("tls.key", "ca/others/a")):
        (mixed / name).write_bytes((tmp_path / folder / name).read_bytes())
    assert "the certificate mixed/tls.crt is no good: it was not issued by" in client(
        start, address, "a", "#0..#2", "--tls", "mixed"
    ).fails(2)
    # In plain text.
    plain = client(start, address, "a", "#0..#2").fails(2)
    assert f"host 'a' cannot join the server at {address}: it wants TLS: give this member its certificate with --tls" in plain


def test_a_client_whose_certificate_is_not_believed_hears_it(start: Callable[..., Command], certs: Path, tmp_path: Path) -> None:
    """The server trusts another authority than the one that issued both certificates."""
    odd = tmp_path / "odd"
    odd.mkdir()
    for name, folder in (("ca.crt", certs / "others"), ("tls.crt", certs / "coordinator"), ("tls.key", certs / "coordinator")):
        (odd / name).write_bytes((folder / name).read_bytes())
    assert "odd/tls.crt is no good: it was not issued by the authority in ca.crt" in start(
        "server", "small.yaml", "--listen", "127.0.0.1:0", "--hosts", "2", "--tls", "odd"
    ).fails(2)
    # With both authorities in the server's ca.crt, hosts of either are believed; with the other's alone in the client's, the server is not.
    (odd / "ca.crt").write_bytes((certs / "ca.crt").read_bytes() + (certs / "others/ca.crt").read_bytes())
    _, address = server(start, "--tls", "odd")
    assert "it was not issued by the authority" in client(start, address, "a", "#0..#2", "--tls", "ca/others/a").fails(2)


def test_tls_against_a_server_in_plain_text_is_named_on_both_sides(start: Callable[..., Command], tmp_path: Path) -> None:
    served, address = server(start)
    assert "it speaks plain text, wanted TLS" in client(start, address, "a", "#0..#2", "--tls", "ca/a").fails(2)
    served.line("host 'a' will not join: it wants TLS, but this server speaks plain text (start it with --tls)")
    assert len(booked(served, tmp_path, "refused")) == 1


def test_a_server_with_a_certificate_for_another_address_is_not_believed(start: Callable[..., Command]) -> None:
    _, address = server(start, "--tls", "ca/elsewhere")
    sentence = client(start, address, "a", "#0..#2", "--tls", "ca/a").fails(2)
    assert "its certificate is not for '127.0.0.1': issue one with --address 127.0.0.1, or dial a name that it is for" in sentence


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--tls", "nowhere"), "cannot read nowhere/ca.crt: No such file or directory; want ca.crt, tls.crt and tls.key in nowhere"),
        (("--tls", "expired"), "the certificate expired/tls.crt is no good: it has expired"),
        (("--tls", "early"), "the files in early are no certificate of an authority with its key: "),
        (("--tls", "ca/a"), "the certificate ca/a/tls.crt is no good: it was issued for another role"),
    ],
)
def test_a_server_does_not_start_with_a_bad_certificate(
    start: Callable[..., Command], certs: Path, tmp_path: Path, options: tuple[str, ...], sentence: str
) -> None:
    if not (certs / "gone").exists():
        issue(certs, Asked("coordinator", "gone", LOCAL, days=1e-6))
    (tmp_path / "expired").symlink_to(certs / "gone")
    early = tmp_path / "early"
    early.mkdir()
    for name, folder in (("ca.crt", certs), ("tls.crt", certs / "coordinator"), ("tls.key", certs / "a")):
        (early / name).write_bytes((folder / name).read_bytes())
    command = start("server", "small.yaml", "--listen", "127.0.0.1:0", *options)
    assert sentence in command.fails(2)
    assert not (tmp_path / "runs/small").exists()


def test_a_resume_with_a_bad_certificate_is_no_attempt(start: Callable[..., Command], tmp_path: Path) -> None:
    served, _ = server(start)
    served.process.terminate()
    served.end()
    again = start("server", "runs/small", "--listen", "127.0.0.1:0", "--resume", "--tls", "ca/a")
    assert "ca/a/tls.crt is no good: it was issued for another role" in again.fails(2)
    assert len(events(tmp_path / "runs/small", "start")) == 1


def test_a_host_whose_certificate_expires_while_it_waits_says_so(start: Callable[..., Command], certs: Path, tmp_path: Path) -> None:
    issue(certs, Asked("host", "short", days=4 / 86_400))
    waiting = start("client", "--server", "127.0.0.1:9", "--name", "short", "--state", "s", "--tls", "ca/short")
    assert "ca/short/tls.crt is no good: it has expired" in waiting.fails(2)


def test_members_stay_on_this_machine_without_tls(start: Callable[..., Command]) -> None:
    refused = start("client", "--server", "192.0.2.1:7000", "--state", "s").fails(2)
    assert "joining 192.0.2.1:7000 without TLS sends models in plain text: give a certificate with --tls" in refused
    warned = start("server", "small.yaml", "--listen", "0.0.0.0:0", "--insecure")
    assert "anyone who reaches it can join and read the models" in warned.line("warning: ")


def test_health_tells_a_server_from_none(start: Callable[..., Command]) -> None:
    served, address = server(start)
    assert start("health", address).end()[:2] == (0, "SERVING\n")
    assert start("health", "--state", "state-a").fails(3).endswith("state-a: No such file or directory")
    client(start, address, "a", "#0..#2")
    wait_for(lambda: start("health", "--state", "state-a").end()[:2] == (0, "ALIVE\n"))
    served.process.terminate()
    served.end()
    assert f"no answer from {address} within 0.5 s: the connection was refused, so nothing listens" in start(
        "health", address, "--timeout", "0.5"
    ).fails(3)
