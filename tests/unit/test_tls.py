"""Who a certificate says its holder is, what is certified, and what a dialler says of handshakes: all without another process."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from coterie.errors import ConfigError, CoterieError, RunError
from coterie.session import probe
from coterie.session.probe import PLAIN, mismatch
from coterie.session.tls import Identity, check_users, identity_of, load_tls
from coterie_deploy.containers import certs
from coterie_deploy.containers.certs import Asked, init, issue
from coterie_deploy.roles.health import check_server

HOST = "urn:coterie:host:a"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("authority")
    init(folder)
    issue(folder, Asked("host", "a"))
    issue(folder, Asked("coordinator", "c", ["::1", "c.example", "*.c.example"]))
    issue(folder, Asked("host", "gone", days=1e-9))
    return folder


def refusal(work: Callable[[], object], error: type[CoterieError] = ConfigError) -> str:
    with pytest.raises(error) as caught:
        work()
    return str(caught.value)


# ---- identities


@pytest.mark.parametrize(
    "identity",
    [
        Identity("coordinator", "c"),
        Identity("host", "a", "c0", ("u0..u19", "u31")),
        Identity("host", "a", "c0:x,y%2C", ("u,v", "ü%", "a b", "urn:coterie:host:b", "u..")),
    ],
)
def test_an_identity_is_what_its_uris_say(identity: Identity) -> None:
    assert identity_of(identity.uris()) == identity
    assert all(uri.isascii() for uri in identity.uris())


@pytest.mark.parametrize(
    "uris",
    [
        [],
        ["DNS:a", "urn:other:host:a"],
        [HOST, "urn:coterie:host:b"],
        [HOST, "urn:coterie:aggregator:a"],
        ["urn:coterie:host:"],
        ["urn:coterie:users:u0"],
        [HOST, "urn:coterie:cluster:c0", "urn:coterie:cluster:c1"],
        # A limit that says nothing, or that is not understood, does not mean "any".
        [HOST, "urn:coterie:cluster:"],
        [HOST, "urn:coterie:users:"],
        [HOST, "urn:coterie:users:u0,,u1"],
        [HOST, "urn:coterie:clusters:c0"],
        [HOST, "URN:coterie:users:u0"],
        [HOST, "urn:coterie:users"],
        [HOST, "urn:coterie:users:%ff"],
    ],
)
def test_uris_that_are_not_wholly_understood_are_nobody(uris: list[str]) -> None:
    assert identity_of(uris) is None


def may(users: tuple[str, ...], *asked: str) -> list[bool]:
    identity = Identity("host", "a", users=users)
    return [identity.why_not("a", is_aggregator=False, users=[(user, "")]) is None for user in asked]


def test_a_range_is_the_numbers_between_its_ends() -> None:
    assert may(("u2..u10", "v"), "u2", "u9", "u10", "v") == [True] * 4
    assert not any(may(("u2..u10", "v"), "u1", "u11", "u02", "u2 ", "u", "2", "w2", "u2..u10", "", "u\u0663", "v0", "u2\n"))
    assert may(("0..9",), "0", "9", "00", "10", "-1") == [True, True, False, False, False]
    assert may(("u0..u999999999",), "u999999999", "u1000000000", "u" + "9" * 5000) == [True, False, False]


def test_a_long_name_is_looked_at_in_linear_time() -> None:
    assert may(("u0..u9",), "1" * 1_000_000 + "x") == [False]


@pytest.mark.parametrize(
    "token", ["", " ", "u1..", "..u1", "u5..u2", "u1..v2", "u00..u09", "u0..u09", "u0..u9999999999", "u1..u2..u3", "\udcff", "a\nb"]
)
def test_a_certificate_lists_names_and_ranges_alone(token: str) -> None:
    assert refusal(lambda: check_users([token])).startswith("users")
    assert check_users([" u0..u9 ", "ü"]) == ("u0..u9", "ü")


@pytest.mark.parametrize(
    ("identity", "is_aggregator", "cluster", "reason"),
    [
        (Identity("host", "a", "c0"), False, "c0", None),
        (Identity("aggregator", "a", "c0"), True, "c0", None),
        (Identity("host", "b"), False, "", "its certificate is that of host 'b', wanted one of host 'a'"),
        (Identity("host", "A"), False, "", "its certificate is that of host 'A', wanted one of host 'a'"),
        (Identity("host", "a"), True, "", "its certificate is that of host 'a', wanted one of aggregator 'a'"),
        (Identity("aggregator", "a"), False, "", "its certificate is that of aggregator 'a', wanted one of host 'a'"),
        (Identity("coordinator", "a"), False, "", "its certificate is that of coordinator 'a', wanted one of host 'a'"),
        (Identity("host", "a", "c0"), False, "c1", "its certificate is for users of cluster 'c0', but it brings user 'u' of cluster 'c1'"),
        (
            Identity("host", "a", "c0"),
            False,
            "",
            "its certificate is for users of cluster 'c0', but it brings user 'u' of no known cluster",
        ),
    ],
)
def test_nobody_joins_as_another(identity: Identity, is_aggregator: bool, cluster: str, reason: str | None) -> None:
    assert identity.why_not("a", is_aggregator=is_aggregator, users=[("u", cluster)]) == reason


def test_nobody_speaks_as_another_before_joining() -> None:
    assert Identity("host", "a").why_not_named("a") is None
    assert Identity("aggregator", "a").why_not_named("a") is None
    assert Identity("host", "a").why_not_named("b") == "its certificate is that of host 'a', wanted one of host 'b'"
    assert Identity("coordinator", "a").why_not_named("a") == "its certificate is that of coordinator 'a', wanted one of host 'a'"


# ---- certificates


def certificate(folder: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate((folder / "tls.crt").read_bytes())


def test_a_certificate_is_for_its_role_and_its_key_for_its_owner(authority: Path) -> None:
    names = certificate(authority / "c").extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert set(names.get_values_for_type(x509.DNSName)) == {"c.example", "*.c.example", "localhost"}
    assert {str(found) for found in names.get_values_for_type(x509.IPAddress)} == {"127.0.0.1", "::1"}
    own = certificate(authority / "a").extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [name.value for name in own] == [HOST]
    for key in (authority / "ca.key", authority / "a/tls.key"):
        assert key.stat().st_mode & 0o777 == 0o600
    assert "it was issued for another role" in refusal(lambda: load_tls(authority / "a", is_server=True))
    load_tls(authority / "c", is_server=True)
    load_tls(authority / "c", is_server=False)  # for its own health check


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (Asked("host", "a"), "a already has a certificate: delete it to issue another one"),
        *((Asked("host", name), f"the name is {name!r}") for name in ("..", ".", "", "x/y", "-x", "ü", "x\n", "ca.crt", "CA.key")),
        (Asked("host", "x", cluster=""), "--cluster: the name is empty"),
        (Asked("host", "x", users=[""]), "users: the name is empty"),
        (Asked("host", "x", addresses=["x"]), "a host listens nowhere"),
        (Asked("guest", "x"), "--role is 'guest', want one of coordinator, aggregator, host"),
        (Asked("aggregator", "x", ["x"]), "aggregator 'x' has no --cluster"),
        (Asked("coordinator", "x"), "coordinator 'x' has no --address"),
        (Asked("coordinator", "x", ["x"], users=["u"]), "a coordinator speaks for no users"),
        *((Asked("host", "x", days=days), f"--days is {days:g}, want") for days in (0.0, -1.0, float("nan"), float("inf"), 1e9)),
        *(
            (Asked("coordinator", "x", [text]), f"--address is {text!r}, want")
            for text in ("x:7000", "[::1]", "*", "a.*", "a b", "ü.example", "300.1.1.1", "", "0.0.0.0", "::", "fe80::1%eth0", "x.")  # noqa: S104
        ),
    ],
)
def test_what_cannot_be_certified_leaves_no_folder(authority: Path, asked: Asked, sentence: str) -> None:
    before = sorted(authority.rglob("*"))
    assert sentence in refusal(lambda: issue(authority, asked))
    assert sorted(authority.rglob("*")) == before


@pytest.mark.parametrize("error", [RunError("no space"), KeyboardInterrupt()])
@pytest.mark.parametrize("n_written", [0, 1, 2])
def test_a_certificate_is_issued_whole_or_not_at_all(authority: Path, error: BaseException, n_written: int) -> None:
    written = certs._write

    def failing(path: Path, content: bytes, *, is_secret: bool = False) -> None:
        if len(list(path.parent.iterdir())) >= n_written:
            raise error
        written(path, content, is_secret=is_secret)

    with mock.patch.object(certs, "_write", failing), pytest.raises(type(error)):
        issue(authority, Asked("host", "half"))
    assert not (authority / "half").exists()


def test_an_authority_is_made_whole_or_not_at_all_and_once(tmp_path: Path) -> None:
    written = certs._write

    def failing(path: Path, content: bytes, *, is_secret: bool = False) -> None:
        written(path, content, is_secret=is_secret)
        if not is_secret:
            path.unlink()
            raise RunError("no space")

    with mock.patch.object(certs, "_write", failing):
        refusal(lambda: init(tmp_path), RunError)
    assert not list(tmp_path.iterdir())
    refusal(lambda: init(tmp_path, days=float("nan")))
    init(tmp_path)
    assert "already has a certificate authority" in refusal(lambda: init(tmp_path))


def test_an_existing_folder_is_left_alone(authority: Path) -> None:
    (authority / "taken").symlink_to(authority / "nowhere")
    refusal(lambda: issue(authority, Asked("host", "taken")))
    assert not (authority / "nowhere").exists()
    (authority / "taken").unlink()


def test_an_authority_has_its_own_key_and_is_valid(authority: Path, tmp_path: Path) -> None:
    assert "make an authority first with `coterie certs init" in refusal(lambda: issue(tmp_path, Asked("host", "a")))
    init(tmp_path, days=1e-9)
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=2)
    with mock.patch("coterie_deploy.containers.certs.datetime.datetime", wraps=datetime.datetime) as clock:
        clock.now.return_value = later
        assert "ca.crt has expired" in refusal(lambda: issue(tmp_path, Asked("host", "a")))
    (tmp_path / "ca.crt").write_bytes((authority / "ca.crt").read_bytes())
    assert "ca.key is not the key of" in refusal(lambda: issue(tmp_path, Asked("host", "a")))


# ---- the files of a member


def copied(authority: Path, target: Path, name: str = "a") -> Path:
    for file in ("ca.crt", "tls.crt", "tls.key"):
        (target / file).write_bytes((authority / name / file).read_bytes())
    return target


def test_bad_files_are_named(authority: Path, tmp_path: Path) -> None:
    def loaded() -> str:
        return refusal(lambda: load_tls(tmp_path, is_server=False))

    assert f"cannot read {tmp_path / 'ca.crt'}" in loaded()
    copied(authority, tmp_path)
    for file in ("ca.crt", "tls.crt", "tls.key"):
        for content in (b"", b"\xff\x00", b"-----BEGIN CERTIFICATE-----\nxx\n-----END CERTIFICATE-----\n"):
            (tmp_path / file).write_bytes(content)
            assert "are no certificate of an authority with its key: " in loaded()
        copied(authority, tmp_path)
    (tmp_path / "tls.key").write_bytes((authority / "c/tls.key").read_bytes())
    assert "are no certificate of an authority with its key: " in loaded()


def test_nobody_is_asked_for_the_password_of_a_key(authority: Path, tmp_path: Path) -> None:
    copied(authority, tmp_path)
    key = serialization.load_pem_private_key((tmp_path / "tls.key").read_bytes(), None)
    locked = serialization.BestAvailableEncryption(b"secret")
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked)
    (tmp_path / "tls.key").write_bytes(pem)
    code = f"from coterie.session.tls import load_tls; from pathlib import Path; load_tls(Path({str(tmp_path)!r}), is_server=False)"
    found = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL, start_new_session=True
    )
    assert "coterie.errors.ConfigError: the files in" in found.stderr
    assert "phrase" not in found.stderr


def test_files_that_go_away_are_not_missed(authority: Path, tmp_path: Path) -> None:
    tls = load_tls(copied(authority, tmp_path), is_server=False)
    for file in tmp_path.iterdir():
        file.unlink()
    tls.check(is_server=False)
    assert "it was issued for another role" in refusal(lambda: tls.check(is_server=True))


def test_an_expired_certificate_says_so(authority: Path) -> None:
    assert "gone/tls.crt is no good: it has expired" in refusal(lambda: load_tls(authority / "gone", is_server=False))


def test_an_expired_authority_is_not_blamed_on_the_member(tmp_path: Path) -> None:
    hour_ago = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)
    clock = SimpleNamespace(datetime=SimpleNamespace(now=lambda _: hour_ago), timedelta=datetime.timedelta, UTC=datetime.UTC)
    with mock.patch("coterie_deploy.containers.certs.datetime", clock):
        init(tmp_path, days=1 / 1440)
        member = issue(tmp_path, Asked("host", "a"))
    assert refusal(lambda: load_tls(member, is_server=False)) == f"the certificate {member / 'ca.crt'} is no good: it has expired"


def test_a_certificate_is_no_longer_valid_than_its_authority(tmp_path: Path) -> None:
    init(tmp_path, days=20)
    member = issue(tmp_path, Asked("host", "a"))
    assert certificate(member).not_valid_after_utc == x509.load_pem_x509_certificate((tmp_path / "ca.crt").read_bytes()).not_valid_after_utc


def test_what_ends_within_a_month_is_said_with_its_cure(authority: Path, tmp_path: Path) -> None:
    assert not [*load_tls(authority / "a", is_server=False).soon_expired(is_server=False)]
    member = issue(authority, Asked("host", "short", days=12.5))
    (said,) = load_tls(member, is_server=False).soon_expired(is_server=False)
    assert said.startswith(f"the certificate {member / 'tls.crt'} expires in 12 days, on ")
    assert said.endswith(": issue another one with `coterie certs issue`")
    init(tmp_path, days=0.5)
    both = [*load_tls(issue(tmp_path, Asked("host", "a", days=0.4)), is_server=False).soon_expired(is_server=False)]
    assert [re.sub(", on .*GMT", "", line) for line in both] == [
        f"the certificate {tmp_path / 'a/tls.crt'} expires within two days: issue another one with `coterie certs issue`",
        f"the certificate {tmp_path / 'a/ca.crt'} expires within two days: make another authority with `coterie certs init`",
    ]


def test_certificates_are_shown_with_whom_they_are_for_and_until_when(authority: Path, tmp_path: Path) -> None:
    init(tmp_path)
    member = issue(tmp_path, Asked("host", "b", cluster="north", users=["u0..u3", "u7"], days=20.5))
    told = "\n".join(certs.shown(member))
    for line in ("subject      CN=b", "role         host", "name         b", "cluster      north", "users        u0..u3, u7"):
        assert f"  {line}\n" in told
    assert re.search(r"  valid until  20\d\d-\d\d-\d\d \d\d:\d\d UTC, 20 days left\n", told)
    assert told.endswith(f"  authority    CN=coterie certificate authority, that of {member / 'ca.crt'}")
    (member / "ca.crt").write_bytes((authority / "ca.crt").read_bytes())
    assert [*certs.shown(member)][-1].endswith(f", but not that of {member / 'ca.crt'}")
    listed = [*certs.shown(authority)]
    assert [line for line in listed if not line.startswith(" ")] == [
        str(authority / "ca.crt"),
        *(str(authority / name / "tls.crt") for name in sorted(path.parent.name for path in authority.glob("*/tls.crt"))),
    ]
    assert "  addresses    c.example, *.c.example, localhost, ::1, 127.0.0.1" in listed
    assert any(line.endswith("UTC: expired") for line in listed)
    assert "has no certificate, want a folder with tls.crt or ca.crt" in refusal(lambda: [*certs.shown(tmp_path / "nowhere")])
    (member / "tls.crt").write_text("x")
    assert refusal(lambda: [*certs.shown(member)]) == f"{member / 'tls.crt'} is no certificate, want one in PEM"


# ---- why nobody answers


class Listener:
    """Accepts connections, and does with each what it is told."""

    def __init__(self, serve: Callable[[socket.socket, int], None]) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self._serve = serve
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        n = 0
        try:
            while True:
                with self._socket.accept()[0] as connection:
                    connection.settimeout(2.0)
                    self._serve(connection, n)
                n += 1
        except OSError:
            return

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def listening() -> Iterator[Callable[[Callable[[socket.socket, int], None]], str]]:
    listeners: list[Listener] = []

    def start(serve: Callable[[socket.socket, int], None]) -> str:
        listeners.append(Listener(serve))
        return listeners[-1].address

    with mock.patch.object(probe, "_PROBE_S", 10.0), mock.patch.object(probe, "_AGAIN_S", 0.01):
        yield start
    for listener in listeners:
        listener.close()


def impatient() -> contextlib.AbstractContextManager[object]:
    """For who says nothing: all others are waited for, on a busy machine too."""
    return mock.patch.object(probe, "_PROBE_S", 0.1)


def closes(_: socket.socket, __: int) -> None:
    """As a proxy without a backend does."""


def is_silent(connection: socket.socket, _: int) -> None:
    while connection.recv(1000):
        pass


def speaks_plain_text(connection: socket.socket, _: int) -> None:
    connection.sendall(bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
    connection.recv(1000)


def restarts(connection: socket.socket, n: int) -> None:
    """Closes the connection of the first look in plain text, and is there for the one with TLS."""
    if n % 2:
        speaks_plain_text(connection, n)


def shakes_hands_and(then: Callable[[socket.socket, int], None], folder: Path) -> Callable[[socket.socket, int], None]:
    context = load_tls(folder, is_server=True)._both[1]

    def serve(connection: socket.socket, n: int) -> None:
        with context.wrap_socket(connection, server_side=True) as secured:
            then(secured, n)

    return serve


@pytest.mark.parametrize("behaviour", [closes, is_silent, restarts])
@pytest.mark.parametrize("is_secure", [False, True])
def test_who_is_only_restarting_is_waited_for(
    authority: Path, listening: Callable[..., str], behaviour: Callable[[socket.socket, int], None], is_secure: bool
) -> None:
    if is_secure and behaviour is restarts:
        behaviour = closes
    tls = load_tls(authority / "a", is_server=False) if is_secure else None
    with impatient() if behaviour is is_silent else contextlib.nullcontext():
        assert asyncio.run(mismatch(listening(behaviour), tls)) is None


def test_what_waiting_does_not_cure_is_named(authority: Path, listening: Callable[..., str]) -> None:
    tls = load_tls(authority / "a", is_server=False)

    def found(behaviour: Callable[[socket.socket, int], None], ours: object = tls) -> str:
        return str(asyncio.run(mismatch(listening(behaviour), ours)))  # type: ignore[arg-type]

    secured = authority / "c"
    assert found(speaks_plain_text) == PLAIN
    assert found(speaks_plain_text, None) == "None"
    assert found(shakes_hands_and(speaks_plain_text, secured)) == "None"
    with impatient():
        assert found(shakes_hands_and(is_silent, secured)) == "None"  # it is only slow
    assert "it does not believe" in found(shakes_hands_and(closes, secured))


@pytest.mark.parametrize("host", [".x.example", "x" * 70])
@mock.patch.object(probe, "_AGAIN_S", 0.01)
def test_a_name_that_is_none_is_said(host: str, authority: Path) -> None:
    for tls in (None, load_tls(authority / "a", is_server=False)):
        assert asyncio.run(mismatch(f"{host}:7000", tls)) == f"{host!r} is no name of a host"


@pytest.mark.parametrize("address", ["", "x", ":7000", "x:", "x:0", "x:65536", "x:abc", "x:-1", "x:" + "9" * 5000, "x:\u0663"])
def test_a_health_check_wants_an_address(address: str) -> None:
    assert refusal(lambda: check_server(address, None, 0.1)) == f"the address is {address!r}, want HOST:PORT"


def test_a_health_check_says_what_does_not_fit(authority: Path, listening: Callable[..., str]) -> None:
    address = listening(speaks_plain_text)
    tls = load_tls(authority / "a", is_server=False)
    assert refusal(lambda: check_server(address, tls, 0.1), RunError) == f"no answer from {address} within 0.1 s: {PLAIN}"


def test_a_range_as_clients_write_it_is_not_taken_for_a_name() -> None:
    with pytest.raises(ConfigError, match=re.escape("users 's0-s3': want s0..s3 for a range")):
        check_users(["s0-s3"])
    assert check_users(["north-west", "a-1"]) == ("north-west", "a-1")
