"""A private certificate authority in a folder: `coterie certs init`, `coterie certs issue` and `coterie certs show`.

The folder has `ca.crt` and `ca.key`, and for every member a folder with the three files that the member needs. Keep `ca.key` there: whoever
has it can certify anybody.
"""

import datetime
import ipaddress
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from coterie.errors import ConfigError, RunError
from coterie.session.tls import CA, CERTIFICATE, KEY, MEMBERS, MONITOR, ROLES, Identity, check_users, identity_of, peer_name
from coterie.text.names import check_name

CA_KEY = "ca.key"
_CLOCKS_DIFFER = datetime.timedelta(minutes=10)
_LISTENING = ("coordinator", "aggregator")
_LOCAL = ("localhost", "127.0.0.1", "::1")  # where a health check finds the server beside it
_FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_DNS = re.compile(r"(?=.{1,253}$)(\*\.)?([A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?)(\.[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?)*")
_MAX_COMMON_NAME = 64
_USAGES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
    *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)


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
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "coterie certificate authority")])
    extensions = [(x509.BasicConstraints(ca=True, path_length=0), True), (_usage("key_cert_sign", "crl_sign"), True)]
    made = _signed(name, name, key.public_key(), key, days, extensions)
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
    # A coordinator dials too, for its own health check. Its role says what it may not do.
    purposes = [ExtendedKeyUsageOID.CLIENT_AUTH] + ([ExtendedKeyUsageOID.SERVER_AUTH] if asked.role in _LISTENING else [])
    names = [_address(text) for text in dict.fromkeys((*asked.addresses, *_LOCAL))] if asked.role in _LISTENING else []
    names += [x509.DNSName(peer_name(asked.name))] if asked.role == "aggregator" else []
    extensions: list[tuple[x509.ExtensionType, bool]] = [
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_usage("digital_signature"), True),
        (x509.ExtendedKeyUsage(purposes), False),
        (x509.SubjectAlternativeName([*names, *map(x509.UniformResourceIdentifier, identity.uris())]), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(key_of_authority.public_key()), False),
    ]
    made = _signed(subject, authority.subject, key.public_key(), key_of_authority, asked.days, extensions, authority.not_valid_after_utc)
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


def federation(folder: Path, n_hosts: int, addresses: Sequence[str], days: float = 365.0) -> int:
    """An authority, the certificate of a coordinator, and those of host-1 to host-N: how many were made. Those that are there are kept."""
    if not (folder / CA_KEY).exists():
        init(folder)
    members = [
        Asked("coordinator", "coordinator", addresses, days=days),
        *(Asked("host", f"host-{i}", days=days) for i in range(1, n_hosts + 1)),
    ]
    missing = [asked for asked in members if not (folder / asked.name / CERTIFICATE).exists()]
    for asked in missing:
        issue(folder, asked)
    return len(missing)


def shown(folder: Path) -> Iterator[str]:
    """What the certificates in the folder of a member or of an authority say, as lines. ConfigError when it has none."""
    members = [folder] if (folder / CERTIFICATE).exists() else sorted(path.parent for path in folder.glob(f"*/{CERTIFICATE}"))
    if not members and not (folder / CA).exists():
        raise ConfigError(f"{folder} has no certificate, want a folder with {CERTIFICATE} or {CA} (see coterie certs init)")
    if members != [folder]:
        yield from _lines(folder / CA, folder / CA)
    for member in members:
        yield from _lines(member / CERTIFICATE, member / CA)


def _lines(path: Path, authority: Path) -> Iterator[str]:
    found, issuer = _read(path), _read(authority)
    left = found.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    until = _until(found)
    about = {
        "subject": found.subject.rfc4514_string(),
        **_about_member(found),
        "valid until": f"{until}: expired" if left < datetime.timedelta() else f"{until}, {left.days:,} days left",
        "authority": f"{found.issuer.rfc4514_string()}, {'that' if _is_issued_by(found, issuer) else 'but not that'} of {authority}",
    }
    yield f"{path}"
    yield from (f"  {name:<13}{value}" for name, value in about.items())


def valid_until(member: Path) -> str:
    """The end of a member's certificate. It is never later than that of its authority."""
    return _until(_read(member / CERTIFICATE))


def _until(found: x509.Certificate) -> str:
    return found.not_valid_after_utc.strftime("%Y-%m-%d %H:%M UTC")


def _about_member(found: x509.Certificate) -> Mapping[str, str]:
    """What it says about its holder; nothing for an authority."""
    try:
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return {}
    identity = identity_of(names.get_values_for_type(x509.UniformResourceIdentifier))
    if identity is None:
        return {"role": "none that Coterie knows"}
    addresses = [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]
    speaks = {"cluster": identity.cluster or "any", "users": ", ".join(identity.users) or "any"} if identity.role in MEMBERS else {}
    return {"role": identity.role, "name": identity.name, **speaks, **({"addresses": ", ".join(addresses)} if addresses else {})}


def _is_issued_by(found: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        found.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _read(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"{path} is no certificate, want one in PEM") from None


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


def _signed(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    key_of_issuer: ec.EllipticCurvePrivateKey,
    days: float,
    extensions: Sequence[tuple[x509.ExtensionType, bool]],
    latest: datetime.datetime | None = None,
) -> x509.Certificate:
    """A certificate from now on, not beyond `latest`, with these extensions and whether each is critical."""
    now = datetime.datetime.now(datetime.UTC)
    try:
        end = now + datetime.timedelta(days=days)
    except OverflowError:
        raise ConfigError(f"--days is {days:g}, want fewer") from None
    made = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key).serial_number(x509.random_serial_number())
    made = made.not_valid_before(now - _CLOCKS_DIFFER).not_valid_after(end if latest is None else min(end, latest))
    for extension, is_critical in ((x509.SubjectKeyIdentifier.from_public_key(key), False), *extensions):
        made = made.add_extension(extension, critical=is_critical)
    return made.sign(key_of_issuer, hashes.SHA256())


def _usage(*allowed: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{name: name in allowed for name in _USAGES})


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
