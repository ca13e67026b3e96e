"""Certificates as a coordinator makes its own."""

from __future__ import annotations

import datetime
import hashlib
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


def certificate(path: Path, days: int = 1, host: str = "") -> tuple[Path, str]:
    """A self-signed certificate with its key in one file, and its SHA-256; of a host, it may be
    trusted like an authority's.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "coordinator")])
    now = datetime.datetime.now(datetime.UTC)
    request = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=days))
    )
    if host:
        names = x509.SubjectAlternativeName([x509.DNSName(host)])
        request = request.add_extension(names, critical=False)
    made = request.sign(key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    form = serialization.PrivateFormat.PKCS8
    file = path / "server.pem"
    file.write_bytes(
        made.public_bytes(pem) + key.private_bytes(pem, form, serialization.NoEncryption())
    )
    return file, hashlib.sha256(made.public_bytes(serialization.Encoding.DER)).hexdigest()
