"""Mutual TLS: the three files that a member holds, and who its certificate says it is.

A folder has `ca.crt` (whom to believe), `tls.crt` and `tls.key` (who one is), the names of a Kubernetes TLS secret. The identity stands in
URIs of the certificate's subject alternative name, which gRPC hands to a server:

    urn:coterie:ROLE:NAME     who it is: a coordinator, an aggregator or a host of that name
    urn:coterie:cluster:NAME  the only cluster whose users it may speak for
    urn:coterie:users:LIST    the users it may speak for: names and ranges of names, u0..u19,u31

with all names percent-encoded.
"""

from __future__ import annotations

import contextlib
import re
import ssl
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from urllib.parse import quote, unquote

import grpc

from coterie.errors import ConfigError

CA, CERTIFICATE, KEY = "ca.crt", "tls.crt", "tls.key"
ROLES = ("coordinator", "aggregator", "host")
_PREFIX = "urn:coterie:"
_NUMBERED = re.compile(r"(.*?)([0-9]+)", re.DOTALL)
_ROUNDS = 10  # messages in each direction of a handshake in memory, of which TLS needs three


@dataclass(frozen=True)
class Identity:
    """Whom a certificate names."""

    role: str  # of ROLES
    name: str
    cluster: str = ""  # "": any
    users: tuple[str, ...] = ()  # names, and ranges FIRST..LAST; (): any

    def uris(self) -> list[str]:
        """As the URIs of a certificate."""
        listed = [f"{_PREFIX}{self.role}:{quote(self.name, safe='')}"]
        listed += [f"{_PREFIX}cluster:{quote(self.cluster, safe='')}"] if self.cluster else []
        listed += [f"{_PREFIX}users:{','.join(quote(token, safe='') for token in self.users)}"] if self.users else []
        return listed

    def why_not(self, name: str, *, is_aggregator: bool, users: Iterable[tuple[str, str]]) -> str | None:
        """Why the holder may not join as `name` with these (user, cluster) pairs; None when it may."""
        wanted = "aggregator" if is_aggregator else "host"
        if (self.role, self.name) != (wanted, name):
            return f"its certificate is that of {self.role} {self.name!r}, wanted one of {wanted} {name!r}"
        may = _Users(self.users) if self.users else None
        for user, cluster in users:
            if self.cluster and cluster != self.cluster:
                found = f"of cluster {cluster!r}" if cluster else "of no known cluster"
                return f"its certificate is for users of cluster {self.cluster!r}, but it brings user {user!r} {found}"
            if may is not None and user not in may:
                return f"its certificate does not let it speak for user {user!r}: it is for {shortened(self.users)}"
        return None


def shortened(users: tuple[str, ...]) -> str:
    """The first of the users in a certificate, for a sentence."""
    return ", ".join(users[:5]) + (", ..." if len(users) > 5 else "")


def identity_of(uris: Iterable[str]) -> Identity | None:
    """The identity in the URIs of a certificate; None when there is none, or more than one."""
    found: dict[str, list[str]] = {}
    for uri in uris:
        if uri.startswith(_PREFIX):
            kind, _, value = uri.removeprefix(_PREFIX).partition(":")
            found.setdefault(kind, []).append(value)
    roles = [role for role in ROLES if role in found]
    if len(roles) != 1 or any(len(values) > 1 for values in found.values()):
        return None
    users = tuple(unquote(token) for token in found.get("users", [""])[0].split(",") if token)
    return Identity(roles[0], unquote(found[roles[0]][0]), unquote(found.get("cluster", [""])[0]), users)


def check_users(users: Iterable[str]) -> tuple[str, ...]:
    """The users as a certificate may list them. ConfigError for a range whose ends do not differ in their last number alone."""
    listed = tuple(token.strip() for token in users)
    for token in listed:
        first, dots, last = token.partition("..")
        if not token or (dots and _range(first, last) is None):
            raise ConfigError(f"users {token!r}: want a name, or a range of names that end in numbers, like u0..u19")
    return listed


def _range(first: str, last: str) -> tuple[str, int, int] | None:
    """Prefix and both numbers of a range of names; None when it is none."""
    low, high = _NUMBERED.fullmatch(first), _NUMBERED.fullmatch(last)
    if low is None or high is None or low[1] != high[1] or len(low[2]) > 9 or len(high[2]) > 9 or int(low[2]) > int(high[2]):
        return None
    return low[1], int(low[2]), int(high[2])


class _Users:
    """The users that a list of names and ranges stands for."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self._names = set(tokens)
        self._ranges: dict[str, list[tuple[int, int]]] = {}
        for token in self._names:
            first, dots, last = token.partition("..")
            if dots and (found := _range(first, last)) is not None:
                self._ranges.setdefault(found[0], []).append(found[1:])

    def __contains__(self, user: str) -> bool:
        if user in self._names:
            return True
        match = _NUMBERED.fullmatch(user)
        if match is None or len(match[2]) > 9 or (match[2] != "0" and match[2].startswith("0")):
            return False  # u007 is not u7
        return any(low <= int(match[2]) <= high for low, high in self._ranges.get(match[1], ()))


@dataclass(frozen=True)
class Tls:
    """The contents of a member's three files."""

    folder: Path
    ca: bytes = field(repr=False)
    certificate: bytes = field(repr=False)
    key: bytes = field(repr=False)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For whoever dials."""
        return grpc.ssl_channel_credentials(self.ca, self.key, self.certificate)

    def server_credentials(self) -> grpc.ServerCredentials:
        """For whoever listens: nobody joins without a certificate of the same authority."""
        return grpc.ssl_server_credentials([(self.key, self.certificate)], self.ca, require_client_auth=True)

    @cached_property
    def dialling(self) -> ssl.SSLContext:
        """The same as `channel_credentials`, for Python's own TLS."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_verify_locations(cadata=self.ca.decode("ascii"))
        context.load_cert_chain(self.folder / CERTIFICATE, self.folder / KEY)
        context.verify_mode = ssl.CERT_REQUIRED
        context.set_alpn_protocols(["h2"])
        return context

    def check(self, *, is_server: bool) -> None:
        """Shows the certificate to oneself. ConfigError when it has expired, is not of the authority in `ca.crt`, or may not serve."""
        dialling, listening = self._context(ssl.PROTOCOL_TLS_CLIENT), self._context(ssl.PROTOCOL_TLS_SERVER)
        dialling.check_hostname = False
        # The side that is shown the certificate verifies it; the other side is left out of the check.
        (listening if is_server else dialling).verify_mode = ssl.CERT_NONE
        try:
            _shake_hands(dialling, listening)
        except ssl.SSLCertVerificationError as error:
            raise ConfigError(f"the certificate {self.folder / CERTIFICATE} is no good: {why(error)}") from None
        except ssl.SSLError as error:
            raise ConfigError(f"the certificate {self.folder / CERTIFICATE} cannot be used: {error.reason}") from None


def _shake_hands(dialling: ssl.SSLContext, listening: ssl.SSLContext) -> None:
    """A handshake in memory. Raises ssl.SSLError."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [dialling.wrap_bio(down, up), listening.wrap_bio(up, down, server_side=True)]
    for _ in range(_ROUNDS):
        for side in sides:
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()


_REASONS = {
    "certificate has expired": "it has expired",
    "certificate is not yet valid": "it is not valid yet (is the clock right?)",
    "unable to get local issuer certificate": f"it was not issued by the authority in {CA}",
    "self-signed certificate": f"it was not issued by the authority in {CA}",
    "self-signed certificate in certificate chain": f"it was not issued by the authority in {CA}",
    "certificate signature failure": f"it was not issued by the authority in {CA}",
    "unsuitable certificate purpose": "it was issued for another role",
}


def why(error: ssl.SSLCertVerificationError) -> str:
    """Why a certificate was not believed, in our words."""
    return _REASONS.get(error.verify_message, error.verify_message.rstrip("."))


def load_tls(folder: Path, *, is_server: bool) -> Tls:
    """The files of a member, checked. ConfigError names the file that is missing or wrong."""
    contents = {}
    for name in (CA, CERTIFICATE, KEY):
        try:
            contents[name] = (folder / name).read_bytes()
        except OSError as error:
            wanted = f"want {CA}, {CERTIFICATE} and {KEY} in {folder} (see coterie certs)"
            raise ConfigError(f"cannot read {folder / name}: {error.strerror or error}; {wanted}") from None
    tls = Tls(folder, contents[CA], contents[CERTIFICATE], contents[KEY])
    try:
        tls.dialling  # noqa: B018 - it is made here, where what is wrong with the files can be said
    except (ssl.SSLError, ValueError) as error:
        text = error.reason if isinstance(error, ssl.SSLError) else str(error)
        raise ConfigError(f"the files in {folder} are no certificate of an authority with its key: {text}") from None
    tls.check(is_server=is_server)
    return tls
