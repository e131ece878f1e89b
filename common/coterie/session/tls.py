"""Mutual TLS: the three files of a member, and the identity in its certificate.

A folder has `ca.crt` (the trusted authority), `tls.crt` and `tls.key` (the member's own), named as in a Kubernetes TLS secret. The identity
is in URIs of the certificate's subject alternative name, which gRPC passes to a server:

    urn:coterie:ROLE:NAME     a coordinator, an aggregator, a host or a monitor of that name
    urn:coterie:cluster:NAME  the only cluster whose users it may speak for
    urn:coterie:users:LIST    the users it may speak for: names and ranges of names, u0..u19,u31

with all names percent-encoded. The certificate of an aggregator has its `peer_name` as a DNS name, too.
"""

import contextlib
import hashlib
import ssl
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import grpc

from coterie.errors import ConfigError
from coterie.text.names import check_name, ends_of, hyphen_ranges

CA, CERTIFICATE, KEY = "ca.crt", "tls.crt", "tls.key"
MEMBERS = ("aggregator", "host")  # roles that join
MONITOR = "monitor"  # may read a server's metrics, and nothing else
ROLES = ("coordinator", *MEMBERS, MONITOR)
_PREFIX = "urn:coterie:"
_KINDS = (*ROLES, "cluster", "users")
_DIGITS = "0123456789"
_MAX_DIGITS = 9  # of a number in a range
_SOON_DAYS = 30
_DAY_S = 86_400
_ROUNDS = 10  # messages in each direction of a handshake in memory; TLS needs three


@dataclass(frozen=True)
class Identity:
    role: str  # of ROLES
    name: str
    cluster: str = ""  # "": any
    users: tuple[str, ...] = ()  # names, and ranges FIRST..LAST; (): any

    def uris(self) -> list[str]:
        """The URIs of its certificate."""
        listed = [f"{_PREFIX}{self.role}:{quote(self.name, safe='')}"]
        listed += [f"{_PREFIX}cluster:{quote(self.cluster, safe='')}"] if self.cluster else []
        listed += [f"{_PREFIX}users:{','.join(quote(token, safe='') for token in self.users)}"] if self.users else []
        return listed

    def why_not_named(self, name: str) -> str | None:
        """Why the holder may not speak as the member `name`, whatever its role; None if it may."""
        if self.role in MEMBERS and self.name == name:
            return None
        wanted = self.role if self.role in MEMBERS else "host"
        return f"its certificate is that of {self.role} {self.name!r}, wanted one of {wanted} {name!r}"

    def why_not(self, name: str, *, is_aggregator: bool, users: Iterable[tuple[str, str]]) -> str | None:
        """Why the holder may not join as `name` with these (user, cluster) pairs; None if it may."""
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
    """The first users in a certificate, for messages."""
    return ", ".join(users[:5]) + (", ..." if len(users) > 5 else "")


def peer_name(aggregator: str) -> str:
    """The DNS name in an aggregator's certificate that others compare, wherever they dial: gRPC shows them no URIs."""
    return f"{hashlib.sha256(aggregator.encode()).hexdigest()[:32]}.aggregator.coterie.invalid"


def identity_of(uris: Iterable[str]) -> Identity | None:
    """The identity in the URIs of a certificate; None if there is none, or more than one, or a part of it is unknown.

    An unknown part may be a limit, and an unreadable limit must not mean "any".
    """
    found: dict[str, str] = {}
    for uri in uris:
        if not uri.lower().startswith(_PREFIX):
            continue
        kind, _, value = uri[len(_PREFIX) :].partition(":")
        if not uri.startswith(_PREFIX) or kind not in _KINDS or kind in found or not value:
            return None
        found[kind] = value
    roles = [role for role in ROLES if role in found]
    users = found["users"].split(",") if "users" in found else []
    if len(roles) != 1 or not all(users):
        return None
    try:
        name, cluster, *listed = (unquote(text, errors="strict") for text in (found[roles[0]], found.get("cluster", ""), *users))
    except UnicodeDecodeError:
        return None
    return Identity(roles[0], name, cluster, tuple(listed))


def check_users(users: Iterable[str]) -> tuple[str, ...]:
    """The users as a certificate may list them. ConfigError for an invalid name, or an invalid range.

    The ends of a range may differ only in the number at their end.
    """
    listed = tuple(token.strip() for token in users)
    for token in listed:
        if (ends := ends_of(token)) is not None and _range(*ends) is None:
            raise ConfigError(f"users {token!r}: want a name, or a range of names that end in numbers without leading zeros, like u0..u19")
        check_name(token, "users")
        for first, last in hyphen_ranges(token):
            if _range(first, last) is not None:
                raise ConfigError(f"users {token!r}: want {first}..{last} for a range")
    return listed


def _range(first: str, last: str) -> tuple[str, int, int] | None:
    """Prefix and both numbers of a range of names, or None."""
    (prefix, low), (other, high) = _numbered(first), _numbered(last)
    if low is None or high is None or prefix != other or low > high:
        return None
    return prefix, low, high


def _numbered(name: str) -> tuple[str, int | None]:
    """A name without its final digits, and their number: None without digits, with too many, or with a leading zero."""
    prefix = name.rstrip(_DIGITS)  # linear time, since a peer's name may be long
    digits = name[len(prefix) :]
    is_number = 0 < len(digits) <= _MAX_DIGITS and (digits == "0" or digits[0] != "0")  # u007 is not u7
    return prefix, int(digits) if is_number else None


class _Users:
    def __init__(self, tokens: Iterable[str]) -> None:
        self._names: set[str] = set()
        self._ranges: dict[str, list[tuple[int, int]]] = {}
        for token in tokens:
            ends = ends_of(token)
            if ends is None:
                self._names.add(token)
            elif (found := _range(*ends)) is not None:
                self._ranges.setdefault(found[0], []).append(found[1:])

    def __contains__(self, user: str) -> bool:
        if user in self._names:
            return True
        prefix, number = _numbered(user)
        return number is not None and any(low <= number <= high for low, high in self._ranges.get(prefix, ()))


@dataclass(frozen=True)
class Tls:
    folder: Path
    ca: bytes = field(repr=False)
    certificate: bytes = field(repr=False)
    key: bytes = field(repr=False)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For clients."""
        return grpc.ssl_channel_credentials(self.ca, self.key, self.certificate)

    def server_credentials(self) -> grpc.ServerCredentials:
        """For servers. Clients need a certificate of the same authority. Files that are replaced count from the next handshake on."""
        shown = self

        def replaced() -> grpc.ServerCertificateConfiguration | None:
            nonlocal shown
            before, shown = shown, shown.renewed(is_server=True)
            return None if shown is before else shown._configuration()

        # None leaves what is in use, which the types do not know.
        fetch: Any = replaced
        return grpc.dynamic_ssl_server_credentials(self._configuration(), fetch, require_client_authentication=True)

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(self.key, self.certificate)], self.ca)

    def renewed(self, *, is_server: bool) -> "Tls":
        """The files as they are now. These remain in use while those cannot be used: one may be replaced before the other."""
        try:
            if [(self.folder / name).read_bytes() for name in (CA, CERTIFICATE, KEY)] == [self.ca, self.certificate, self.key]:
                return self
            return load_tls(self.folder, is_server=is_server)
        except (ConfigError, OSError):
            return self

    @cached_property
    def dialling(self) -> ssl.SSLContext:
        """As `channel_credentials`, for Python's own TLS."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def https(self) -> ssl.SSLContext:
        """For servers of web pages. Clients need a certificate of the same authority."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        return context

    @cached_property
    def _both(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        """Client and server for `check`. The files are read once, since they may be gone or changed by the next check."""
        dialling, listening = self._context(ssl.PROTOCOL_TLS_CLIENT), self._context(ssl.PROTOCOL_TLS_SERVER)
        dialling.check_hostname = False
        return dialling, listening

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_verify_locations(cadata=self.ca.decode("ascii"))
        # Without a password, OpenSSL would ask for that of an encrypted key on the terminal.
        context.load_cert_chain(self.folder / CERTIFICATE, self.folder / KEY, password="")
        context.verify_mode = ssl.CERT_REQUIRED
        context.set_alpn_protocols(["h2"])
        return context

    def identity(self, *, is_server: bool) -> Identity | None:
        """Who the own certificate says this member is; None if it says nothing. ConfigError as for `check`."""
        shown: Any = (self._verified(is_server=is_server).getpeercert() or {}).get("subjectAltName", ())
        return identity_of(value for kind, value in shown if kind == "URI")

    def check_peer_name(self, aggregator: str) -> None:
        """ConfigError when others would not know this aggregator by the own certificate."""
        shown: Any = (self._verified(is_server=True).getpeercert() or {}).get("subjectAltName", ())
        if ("DNS", wanted := peer_name(aggregator)) not in shown:
            again = f"issue another one with `coterie certs issue`, or with the DNS name {wanted}"
            raise ConfigError(f"other aggregators would not know {aggregator!r} by {self.folder / CERTIFICATE}: {again}")

    def check(self, *, is_server: bool) -> None:
        """Verifies the own certificate. ConfigError when it or its authority has expired, or it is of another authority or purpose."""
        self._verified(is_server=is_server)

    def soon_expired(self, *, is_server: bool) -> Iterator[str]:
        """A sentence for each certificate that ends within 30 days. ConfigError as for `check`."""
        own: Any = self._verified(is_server=is_server).getpeercert() or {}
        again = {CERTIFICATE: "issue another one with `coterie certs issue`", CA: "make another authority with `coterie certs init`"}
        for file, shown in ((CERTIFICATE, own), *((CA, found) for found in self.dialling.get_ca_certs())):
            left_s = ssl.cert_time_to_seconds(shown["notAfter"]) - time.time()
            if left_s < _SOON_DAYS * _DAY_S:
                left = f"in {left_s / _DAY_S:.0f} days" if left_s > 2 * _DAY_S else "within two days"
                yield f"the certificate {self.folder / file} expires {left}, on {shown['notAfter']}: {again[file]}"

    def _is_authority_out_of_time(self) -> bool:
        times = [(found["notBefore"], found["notAfter"]) for found in self.dialling.get_ca_certs()]
        return any(not ssl.cert_time_to_seconds(str(first)) <= time.time() <= ssl.cert_time_to_seconds(str(last)) for first, last in times)

    def _verified(self, *, is_server: bool) -> ssl.SSLObject:
        """The end of a handshake in memory that has verified the own certificate."""
        dialling, listening = self._both
        # Only the side that receives the certificate verifies.
        dialling.verify_mode, listening.verify_mode = (
            (ssl.CERT_REQUIRED, ssl.CERT_NONE) if is_server else (ssl.CERT_NONE, ssl.CERT_REQUIRED)
        )
        try:
            return _shake_hands(dialling, listening)[0 if is_server else 1]
        except ssl.SSLCertVerificationError as error:
            # OpenSSL does not say which certificate of the chain has the wrong time.
            file = CA if error.verify_code in _OF_TIME and self._is_authority_out_of_time() else CERTIFICATE
            raise ConfigError(f"the certificate {self.folder / file} is no good: {distrust_reason(error)}") from None
        except ssl.SSLError as error:
            raise ConfigError(f"the certificate {self.folder / CERTIFICATE} cannot be used: {error.reason}") from None


_OF_TIME = (9, 10)  # codes of OpenSSL: not valid yet, expired


def _shake_hands(dialling: ssl.SSLContext, listening: ssl.SSLContext) -> list[ssl.SSLObject]:
    """A handshake in memory: the ends that dial and listen. Raises ssl.SSLError."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [dialling.wrap_bio(down, up), listening.wrap_bio(up, down, server_side=True)]
    for _ in range(_ROUNDS):
        for side in sides:
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    return sides


_REASONS = {
    "certificate has expired": "it has expired",
    "certificate is not yet valid": "it is not valid yet (is the clock right?)",
    "unable to get local issuer certificate": f"it was not issued by the authority in {CA}",
    "self-signed certificate": f"it was not issued by the authority in {CA}",
    "self-signed certificate in certificate chain": f"it was not issued by the authority in {CA}",
    "certificate signature failure": f"it was not issued by the authority in {CA}",
    "unsuitable certificate purpose": "it was issued for another role",
}


def distrust_reason(error: ssl.SSLCertVerificationError) -> str:
    """In our words."""
    return _REASONS.get(error.verify_message, error.verify_message.rstrip("."))


def load_tls(folder: Path, *, is_server: bool) -> Tls:
    """The files of a member, checked. ConfigError names a missing or invalid file."""
    contents = {}
    for name in (CA, CERTIFICATE, KEY):
        try:
            contents[name] = (folder / name).read_bytes()
        except OSError as error:
            wanted = f"want {CA}, {CERTIFICATE} and {KEY} in {folder} (see coterie certs)"
            raise ConfigError(f"cannot read {folder / name}: {error.strerror or error}; {wanted}") from None
    tls = Tls(folder, contents[CA], contents[CERTIFICATE], contents[KEY])
    try:
        tls.dialling, tls._both  # noqa: B018 - made here, where errors can name the files
    except (OSError, ValueError) as error:
        text = (isinstance(error, ssl.SSLError) and error.reason) or str(error)
        raise ConfigError(f"the files in {folder} are no certificate of an authority with its key: {text}") from None
    tls.check(is_server=is_server)
    return tls
