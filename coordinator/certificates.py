"""TLS certificate of the coordinator: self-signed on first use, or the organiser's own.

Volunteers check it by its SHA-256 in their join link (the pin), so it needs no authority and is
valid for ten years; a new certificate needs new join links.
"""

from __future__ import annotations

import hashlib
import ipaddress
import socket
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec

from shared.errors import Configuration, why
from shared.files import disk_writes
from shared.files.text_file import read_text, unmarked

VALID_DAYS = 3650
CERT_FILE, KEY_FILE = "tls.crt", "tls.key"


class Certificate(msgspec.Struct, frozen=True, kw_only=True):
    """Files for the server and the pin for the join link."""

    cert: Path
    key: Path
    pin: str  # SHA-256 of the DER, hex


def pin_of(pem: str) -> str:
    """Return the SHA-256, in hex, of the DER of the first certificate. Raises Configuration."""
    try:
        der = ssl.PEM_cert_to_DER_cert(_first(pem))
    except ValueError as error:
        raise Configuration("the TLS certificate is not a PEM file") from error
    return hashlib.sha256(der).hexdigest()


def _first(pem: str) -> str:
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    start = pem.find(begin)
    stop = pem.find(end)
    if start < 0 or stop < start:
        raise ValueError("no certificate")
    return pem[start : stop + len(end)]


def given(cert: Path, key: Path) -> Certificate:
    """Return the organiser's own certificate. Raises Configuration for unusable files."""
    try:
        pem = read_text(cert)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key, password=lambda: "")  # never asks for a passphrase
    except ssl.SSLError as error:
        other = error.reason == "KEY_VALUES_MISMATCH"
        raise Configuration(
            f"the TLS key {key} belongs to another certificate than {cert}"
            if other
            else f"the TLS files {cert} and {key} cannot be used: give PEM files (text that begins "
            "with -----BEGIN), the certificate first, the key without a password"
        ) from error
    except (OSError, ValueError) as error:
        raise Configuration(
            f"the TLS files {cert} and {key} cannot be used: {why(error)}"
        ) from error
    return Certificate(cert=cert, key=key, pin=pin_of(pem))


def ends_at(path: Path) -> float:
    """Return when a certificate ends, UTC epoch seconds. Raises Configuration."""
    from cryptography import x509

    try:
        certificate = x509.load_pem_x509_certificate(unmarked(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise Configuration(f"the certificate {path} cannot be read: {why(error)}") from error
    return certificate.not_valid_after_utc.timestamp()


def own(directory: Path) -> Certificate:
    """Return the certificate in the data directory, made there on first use."""
    cert, key = directory / CERT_FILE, directory / KEY_FILE
    if not (cert.exists() and key.exists()):
        _make(cert, key)
    return given(cert, key)


def _make(cert: Path, key: Path) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "volunteer coordinator")])
    now = datetime.now(UTC)
    host = socket.gethostname()
    common_names = [host] if host.isascii() and 0 < len(host) < 64 else []
    names: list[x509.GeneralName] = [x509.DNSName(name) for name in ("localhost", *common_names)]
    names += [x509.IPAddress(ipaddress.ip_address(text)) for text in ("127.0.0.1", "::1")]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))  # clocks of volunteers may be slow
        .not_valid_after(now + timedelta(days=VALID_DAYS))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(private, hashes.SHA256())
    )
    pem = private.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    write_private(key, pem)
    write_private(cert, certificate.public_bytes(form.Encoding.PEM))


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read, whole or not at all. Raises Configuration."""
    try:
        disk_writes.write_private(path, data)
    except OSError as error:
        raise Configuration(f"{path} cannot be written: {error.strerror}") from error
