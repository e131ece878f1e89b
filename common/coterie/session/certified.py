"""Signatures by the keys of TLS certificates: who a text is from, also when a parent has passed it on."""

from __future__ import annotations

import datetime
from collections.abc import Callable

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, padding, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from coterie.errors import ConfigError, ProtocolError
from coterie.session.tls import CERTIFICATE, Tls, identity_of

_PSS = padding.PSS(mgf=padding.MGF1(SHA256()), salt_length=padding.PSS.DIGEST_LENGTH)


def signer_of(tls: Tls) -> Callable[[bytes], tuple[bytes, bytes]]:
    """A function of a text: the member's certificate (PEM), and a signature by its key. ConfigError for a key that cannot sign."""
    try:
        key = load_pem_private_key(tls.key, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ConfigError(f"the key of {tls.folder / CERTIFICATE} cannot sign, want one of {_KINDS}") from None
    own = x509.load_pem_x509_certificate(tls.certificate)
    certificate = own.public_bytes(Encoding.PEM)

    def sign(text: bytes) -> tuple[bytes, bytes]:
        if isinstance(key, ec.EllipticCurvePrivateKey):
            return certificate, key.sign(text, ec.ECDSA(SHA256()))
        if isinstance(key, rsa.RSAPrivateKey):
            return certificate, key.sign(text, _PSS, SHA256())
        if isinstance(key, ed25519.Ed25519PrivateKey | ed448.Ed448PrivateKey):
            return certificate, key.sign(text)
        raise ConfigError(f"the key of {tls.folder / CERTIFICATE} is of type {type(key).__name__}, want one of {_KINDS}")

    sign(b"")  # a key that cannot is found here
    return sign


def check_signed(
    tls: Tls, role: str, name: str, text: bytes, certificate: bytes, signature: bytes, now: datetime.datetime | None = None
) -> None:
    """ProtocolError unless the member `name` of this role has signed the text, with a valid certificate of the authority itself."""
    said = f"what {role} {name!r} has signed"
    try:
        found = x509.load_pem_x509_certificate(certificate)
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound):
        raise ProtocolError(f"{said} came without a certificate that says who it is") from None
    if not any(_is_issued_by(found, authority) for authority in x509.load_pem_x509_certificates(tls.ca)):
        raise ProtocolError(f"{said} came with a certificate of another authority")
    now = now or datetime.datetime.now(datetime.UTC)
    if not found.not_valid_before_utc <= now <= found.not_valid_after_utc:
        raise ProtocolError(f"{said} came with a certificate that has expired, or is not valid yet")
    identity = identity_of(names.get_values_for_type(x509.UniformResourceIdentifier))
    if identity is None or identity.role != role or identity.name != name:
        raise ProtocolError(f"{said} came with a certificate of another member")
    if not _is_signed(found, text, signature):
        raise ProtocolError(f"{said} has a wrong signature")


_KINDS = "EC, RSA, Ed25519 and Ed448"


def _is_issued_by(found: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        found.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _is_signed(found: x509.Certificate, text: bytes, signature: bytes) -> bool:
    try:
        key = found.public_key()
        if isinstance(key, ec.EllipticCurvePublicKey):
            key.verify(signature, text, ec.ECDSA(SHA256()))
        elif isinstance(key, rsa.RSAPublicKey):
            key.verify(signature, text, _PSS, SHA256())
        elif isinstance(key, ed25519.Ed25519PublicKey | ed448.Ed448PublicKey):
            key.verify(signature, text)
        else:
            return False
    except (InvalidSignature, UnsupportedAlgorithm, ValueError):
        return False
    return True
