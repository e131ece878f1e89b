"""A private certificate authority in a folder: `coterie certs init` and `coterie certs issue`.

The folder has `ca.crt` and `ca.key`, and for every member a folder of its own with the three files that the member needs. `ca.key` stays
where it is: whoever has it can make itself anybody.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from coterie.errors import ConfigError, RunError
from coterie.session.tls import CA, CERTIFICATE, KEY, MONITOR, ROLES, Identity, check_users
from coterie.text.names import check_name

CA_KEY = "ca.key"
_CLOCKS_DIFFER = datetime.timedelta(minutes=10)
_LISTENING = ("coordinator", "aggregator")
_LOCAL = ("localhost", "127.0.0.1", "::1")  # where a health check finds the server beside it
_FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_DNS = re.compile(r"(?=.{1,253}$)(\*\.)?([A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?)(\.[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?)*")
_MAX_COMMON_NAME = 64


@dataclass(frozen=True)
class Asked:
    """The certificate that is asked for."""

    role: str
    name: str
    addresses: Sequence[str] = ()  # DNS names and IP addresses at which a coordinator or an aggregator is found
    cluster: str | None = None  # None: any
    users: Sequence[str] = ()
    days: float = 365.0


def init(folder: Path, days: float = 3650.0) -> None:
    """Makes an authority. ConfigError when the folder has one."""
    _check_days(days)
    if any(os.path.lexists(folder / name) for name in (CA_KEY, CA)):
        raise ConfigError(f"{folder} already has a certificate authority, want a new folder")
    key, name = (
        ec.generate_private_key(ec.SECP256R1()),
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "coterie certificate authority")]),
    )
    made = (
        _builder(name, name, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    _make_folder(folder, exist_ok=True)
    _write(folder / CA_KEY, _pem_of_key(key), is_secret=True)
    try:
        _write(folder / CA, made.public_bytes(serialization.Encoding.PEM))
    except BaseException:  # half an authority would be in the way of a whole one
        (folder / CA_KEY).unlink()
        raise


def issue(folder: Path, asked: Asked) -> Path:
    """Issues a certificate into a folder of its own, which is returned. ConfigError for what cannot be certified, and when there is one."""
    _check(asked)
    authority, key_of_authority = _load(folder)
    target = folder / asked.name
    identity = Identity(asked.role, asked.name, asked.cluster or "", check_users(asked.users))
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, asked.name[:_MAX_COMMON_NAME])])
    # A coordinator dials too: its own health check does. What it may not do is said by its role.
    purposes = [ExtendedKeyUsageOID.CLIENT_AUTH] + ([ExtendedKeyUsageOID.SERVER_AUTH] if asked.role in _LISTENING else [])
    names = [_address(text) for text in (*asked.addresses, *_LOCAL)] if asked.role in _LISTENING else []
    made = (
        _builder(subject, authority.subject, key.public_key(), asked.days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(
            x509.SubjectAlternativeName([*names, *map(x509.UniformResourceIdentifier, identity.uris())]),
            critical=False,
        )
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key_of_authority.public_key()), critical=False)
        .sign(key_of_authority, hashes.SHA256())
    )
    try:
        _make_folder(target, exist_ok=False)
    except FileExistsError:
        raise ConfigError(f"{target} already has a certificate: delete it to issue another one") from None
    try:
        _write(target / KEY, _pem_of_key(key), is_secret=True)
        _write(target / CERTIFICATE, made.public_bytes(serialization.Encoding.PEM))
        _write(target / CA, authority.public_bytes(serialization.Encoding.PEM))
    except BaseException:  # also when interrupted
        shutil.rmtree(target, ignore_errors=True)
        raise
    return target


def _check(asked: Asked) -> None:
    if asked.role not in ROLES:
        raise ConfigError(f"--role is {asked.role!r}, want one of {', '.join(ROLES)}")
    if not _FOLDER.fullmatch(asked.name):
        wanted = "at most 100 letters, digits, dots, hyphens and underscores, of which the first is a letter or a digit"
        raise ConfigError(f"the name is {asked.name!r}, want {wanted}")
    if asked.name.lower() in (CA, CA_KEY):
        raise ConfigError(f"the name is {asked.name!r}, which is a file of the authority, want another one")
    _check_days(asked.days)
    if asked.cluster is not None:  # an empty one must not come to mean any
        check_name(asked.cluster, "--cluster")
    if asked.role not in _LISTENING and asked.addresses:
        raise ConfigError(f"a {asked.role} listens nowhere, but --address is {asked.addresses[0]!r}")
    if asked.role in _LISTENING and not asked.addresses:
        raise ConfigError(f"{asked.role} {asked.name!r} has no --address, want the names and addresses at which it is found")
    if asked.role in ("coordinator", MONITOR) and (asked.users or asked.cluster):
        raise ConfigError(f"a {asked.role} speaks for no users, want neither --users nor --cluster")
    if asked.role == "aggregator" and not asked.cluster:
        raise ConfigError(f"aggregator {asked.name!r} has no --cluster, want the one it speaks for")


def _check_days(days: float) -> None:
    if not days > 0:
        raise ConfigError(f"--days is {days:g}, want a number above 0")


def _address(text: str) -> x509.GeneralName:
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        if not _DNS.fullmatch(text) or re.fullmatch(r"[0-9.]+", text):
            raise ConfigError(f"--address is {text!r}, want a DNS name or an IP address, without a port") from None
        return x509.DNSName(text)
    if found.is_unspecified or "%" in text:
        raise ConfigError(f"--address is {text!r}, want an address that hosts dial, without a zone")
    return x509.IPAddress(found)


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: float) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    try:
        end = now + datetime.timedelta(days=days)
    except OverflowError:
        raise ConfigError(f"--days is {days:g}, want fewer") from None
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_DIFFER)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(*, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _load(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    try:
        authority = x509.load_pem_x509_certificate((folder / CA).read_bytes())
        key = serialization.load_pem_private_key((folder / CA_KEY).read_bytes(), None)
    except FileNotFoundError as error:
        raise ConfigError(f"there is no {error.filename}: make an authority first with `coterie certs init {folder}`") from None
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename}: {error.strerror}") from None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{folder} is no certificate authority: {error}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{folder / CA_KEY} is not an elliptic-curve key, want one made by `coterie certs init`")
    if authority.public_key() != key.public_key():
        raise ConfigError(f"{folder / CA_KEY} is not the key of {folder / CA}, want the two files of one `coterie certs init`")
    if authority.not_valid_after_utc < datetime.datetime.now(datetime.UTC):
        raise ConfigError(f"{folder / CA} has expired: make another authority with `coterie certs init`")
    return authority, key


def _pem_of_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _make_folder(folder: Path, *, exist_ok: bool) -> None:
    """FileExistsError unless `exist_ok`, RunError when it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=exist_ok)
    except OSError as error:
        if isinstance(error, FileExistsError) and not exist_ok:
            raise
        raise RunError(f"cannot write {folder}: {error.strerror or error}") from error


def _write(path: Path, content: bytes, *, is_secret: bool = False) -> None:
    """A key is readable by its owner alone from its first byte."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if is_secret else 0o644)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error
