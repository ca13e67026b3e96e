"""Ed25519 signatures: the coordinator signs its manifests and receipts, and volunteers check them
against a pinned fingerprint.

`cryptography` is imported late, because command lines import this module.
"""

from __future__ import annotations

import base64
import hashlib
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec

from shared.errors import BadSignature, Configuration
from shared.files.disk_writes import write_private
from shared.files.text_file import unmarked
from shared.sentences import Sentence

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_KEY_FILE_BYTES_MAX = 4096
_FINGERPRINT_BYTES = 15  # 120 bits make 24 characters without padding


class SigningKey:
    """Ed25519 private key, stored in a file that only its owner can read."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private

    @classmethod
    def new(cls) -> Self:
        """Return a new, unstored key."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load_or_create(cls, path: Path) -> Self:
        """Return the key in `path`, which is created if missing. Raises Configuration if the file
        cannot be created, or as `load` does.
        """
        if not path.exists():
            from cryptography.hazmat.primitives import serialization as form

            pem = cls.new()._private.private_bytes(
                form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption()
            )
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_private(path, pem, publish=_publish)
            except OSError as error:
                raise Configuration(
                    f"the signing key cannot be stored in {path}: {error.strerror}"
                ) from error
        return cls.load(path)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Return the key in `path` (PEM, PKCS #8). Raises Configuration for a file that holds no
        such key, is unreadable, or is readable by others.
        """
        from cryptography.hazmat.primitives import serialization as form
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        try:
            loaded = form.load_pem_private_key(_read_private(path), password=None)
        except (ValueError, TypeError) as error:
            raise Configuration(f"{path} is not a signing key; restore it from a backup") from error
        if not isinstance(loaded, Ed25519PrivateKey):
            raise Configuration(f"{path} holds a key of another kind; Ed25519 is needed")
        return cls(loaded)

    @property
    def public_key(self) -> bytes:
        """Return the 32 public bytes."""
        return self._private.public_key().public_bytes_raw()

    def sign(self, payload: bytes) -> bytes:
        """Return the 64-byte signature, deterministic for a payload (RFC 8032)."""
        return self._private.sign(payload)

    def secret(self, purpose: str) -> bytes:
        """Return 32 secret bytes for one purpose, the same for each call, derived from the key."""
        return hashlib.sha256(self.sign(f"volunteer: {purpose}".encode())).digest()


def identity_payload(nonce: str, at: str = "") -> bytes:
    """Return the payload that a coordinator signs to prove its key for a caller's nonce, and that
    it serves `at` this address or with this certificate (see `links.bound_address`).
    """
    return f"volunteer coordinator {nonce}{at and f' at {at}'}".encode()


def verify(public_key: bytes, payload: bytes, signature: bytes) -> None:
    """Raise BadSignature unless `signature` is that of `payload` by the key of `public_key`."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, payload)
    except (InvalidSignature, ValueError) as error:
        raise BadSignature(Sentence("the signature does not fit")) from error


def verify_text(public_key: str, payload: str, signature: str) -> None:
    """Raise BadSignature as `verify` does, also for a key or signature that is not hexadecimal."""
    try:
        key, data, signature_bytes = (
            bytes.fromhex(public_key),
            payload.encode(),
            bytes.fromhex(signature),
        )
    except ValueError as error:
        raise BadSignature(Sentence("the signature does not fit")) from error
    verify(key, data, signature_bytes)


def fingerprint(public_key: bytes) -> str:
    """Return a public key's fingerprint: 24 characters in groups of four, `mzxw-6ytb-...`."""
    short = hashlib.sha256(public_key).digest()[:_FINGERPRINT_BYTES]
    letters = base64.b32encode(short).decode().lower()
    return "-".join(letters[start : start + 4] for start in range(0, len(letters), 4))


def is_whole_fingerprint(typed: str) -> bool:
    """Return True if a typed fingerprint has all its characters, hyphens and spaces aside."""
    return len("".join(typed.split()).replace("-", "")) == _FINGERPRINT_BYTES * 8 // 5


def fingerprint_fits(public_key: bytes, expected: str) -> bool:
    """Return True if `expected` is the fingerprint of the key; case, spaces and hyphens are
    ignored.
    """
    typed = "".join(expected.split()).replace("-", "").lower()
    return secrets.compare_digest(fingerprint(public_key).replace("-", "").encode(), typed.encode())


def canonical(document: object) -> bytes:
    """Return the canonical JSON form of a value: sorted keys, no spaces.

    Sign and send exactly these bytes, since a receiver of another version may encode the value
    differently.
    """
    return msgspec.json.encode(document, order="sorted")


def digest(payload: bytes) -> str:
    """Return the SHA-256 in hex."""
    return hashlib.sha256(payload).hexdigest()


def _publish(temporary: Path, path: Path) -> None:
    """Give the file `temporary` the name `path` by a hard link, which unlike a rename does not
    replace a key that another process has stored.
    """
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass  # another process was first, and its key is loaded next
    except OSError:
        temporary.replace(path)  # this file system has no links


def _read_private(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(_KEY_FILE_BYTES_MAX)
    except OSError as error:
        raise Configuration(f"the signing key {path} cannot be read: {error.strerror}") from error
    if os.name == "posix" and mode & 0o077:
        raise Configuration(f"others can read the signing key: chmod 600 {path}")
    return unmarked(data)
