"""Signatures by the keys of certificates: who signed, and every way in which another one could have."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa

from coterie.errors import ConfigError, ProtocolError
from coterie.session import certified
from coterie.session.certified import check_signed, signer_of
from coterie.session.tls import CERTIFICATE, KEY, Tls, load_tls
from coterie_deploy.containers.certs import CA_KEY, Asked, init, issue


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("authority")
    init(folder)
    for name in ("a", "b"):
        issue(folder, Asked("host", name))
    issue(folder, Asked("coordinator", "c", ["::1"]))
    init(folder / "others")
    issue(folder / "others", Asked("host", "a"))
    return folder


def tls_of(folder: Path) -> Tls:
    return load_tls(folder, is_server=False)


def test_what_a_host_has_signed_is_taken_from_it_alone(authority: Path) -> None:
    certificate, signature = signer_of(tls_of(authority / "a"))(b"text")
    own = tls_of(authority / "b")
    check_signed(own, "host", "a", b"text", certificate, signature)
    for name, text, signed, said in (
        ("a", b"other", signature, "what host 'a' has signed has a wrong signature"),
        ("a", b"text", signature[:-1] + bytes([signature[-1] ^ 1]), "has a wrong signature"),
        ("a", b"text", b"", "has a wrong signature"),
        ("b", b"text", signature, "what host 'b' has signed came with a certificate of another member"),
    ):
        with pytest.raises(ProtocolError, match=said):
            check_signed(own, "host", name, text, certificate, signed)


def test_a_coordinator_cannot_sign_for_a_host_of_its_own_name_nor_another_authority_for_ours(authority: Path) -> None:
    own = tls_of(authority / "b")
    with pytest.raises(ProtocolError, match="of another member"):
        check_signed(own, "host", "c", b"text", *signer_of(tls_of(authority / "c"))(b"text"))
    with pytest.raises(ProtocolError, match="of another authority"):
        check_signed(own, "host", "a", b"text", *signer_of(tls_of(authority / "others" / "a"))(b"text"))
    for nothing in (b"", b"no certificate", (authority / "ca.crt").read_bytes()):
        with pytest.raises(ProtocolError, match="without a certificate that says who it is"):
            check_signed(own, "host", "a", b"text", nothing, b"")


def test_a_certificate_outside_its_time_is_refused(authority: Path) -> None:
    signed = signer_of(tls_of(authority / "a"))(b"text")
    now = datetime.datetime.now(datetime.UTC)
    for days in (-2, 800):
        with pytest.raises(ProtocolError, match="has expired, or is not valid yet"):
            check_signed(tls_of(authority / "b"), "host", "a", b"text", *signed, now=now + datetime.timedelta(days=days))


@pytest.mark.parametrize("kind", ["rsa", "ed25519"])
def test_certificates_that_others_have_made_may_have_keys_of_other_kinds(authority: Path, tmp_path: Path, kind: str) -> None:
    key = rsa.generate_private_key(65537, 2048) if kind == "rsa" else ed25519.Ed25519PrivateKey.generate()
    issuer_key = serialization.load_pem_private_key((authority / CA_KEY).read_bytes(), None)
    issuer = x509.load_pem_x509_certificate((authority / "ca.crt").read_bytes())
    model = x509.load_pem_x509_certificate((authority / "a" / CERTIFICATE).read_bytes())
    builder = x509.CertificateBuilder(
        issuer.subject, model.subject, key.public_key(), 7, model.not_valid_before_utc, model.not_valid_after_utc
    )
    for extension in model.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    made = builder.sign(issuer_key, hashes.SHA256())
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (tmp_path / KEY).write_bytes(pem)
    (tmp_path / CERTIFICATE).write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (tmp_path / "ca.crt").write_bytes((authority / "ca.crt").read_bytes())
    signed = signer_of(tls_of(tmp_path))(b"text")
    check_signed(tls_of(authority / "b"), "host", "a", b"text", *signed)
    with pytest.raises(ProtocolError, match="wrong signature"):
        check_signed(tls_of(authority / "b"), "host", "a", b"texts", *signed)


def test_a_key_that_cannot_sign_is_a_mistake_of_the_configuration(authority: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certified, "load_pem_private_key", lambda *_, **__: object())
    with pytest.raises(ConfigError, match=r"the key of .*tls.crt is of type object, want one of EC, RSA"):
        signer_of(tls_of(authority / "a"))
