"""Releases of the program: announced by a coordinator and signed with its key, never fetched by
itself.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Literal

import msgspec

from shared.decoding import decode
from shared.errors import BadRequest, why
from shared.protocol.accounts import Release, SignedRelease
from shared.sentences import Sentence
from shared.signing import verify_text
from shared.units import GIB

PAYLOAD_CHARS_MAX = 1000
FILE_BYTES_MAX = GIB
_VERSION = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6}){0,3}")
_SHA256 = re.compile(r"[0-9a-f]{64}")

State = Literal["newer", "same", "none"]


def announced(signed: SignedRelease | None, public_key: str) -> Release | None:
    """Return the release that a coordinator announces; None where it announces none.

    Raises BadSignature for one that its key did not sign, BadRequest for one that names none.
    """
    if signed is None:
        return None
    payload = signed.payload[:PAYLOAD_CHARS_MAX]
    verify_text(public_key, payload, signed.signature)
    try:
        found = decode(payload, Release)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(
            Sentence("the coordinator announces a release that cannot be read")
        ) from error
    if found.kind != "release" or not _VERSION.fullmatch(found.version):
        raise BadRequest(Sentence("the coordinator announces a release without a version"))
    if not _SHA256.fullmatch(found.sha256):
        raise BadRequest(Sentence("the coordinator announces a release without a hash"))
    return found


def is_newer(version: str, own: str) -> bool:
    """Return True if a version is newer than ours; what cannot be compared is not."""
    if not (_VERSION.fullmatch(version) and _VERSION.fullmatch(own)):
        return False
    new, old = ([int(part) for part in text.split(".")] for text in (version, own))
    length = max(len(new), len(old))
    return new + [0] * (length - len(new)) > old + [0] * (length - len(old))


def notice(release: Release) -> str:
    """Return the sentence about a newer release."""
    return Sentence(
        "version {version} is announced (sha256 {sha256}...): `volunteer update` says "
        "how to check and install it",
        version=release.version,
        sha256=release.sha256[:12],
    )


def steps(release: Release) -> tuple[tuple[str, str], ...]:
    """Return what a person types: to get the file, check it, and install it."""
    version = release.version
    file = f"volunteer-{version}-py3-none-any.whl"
    return (
        (Sentence("get"), f"pip download --no-deps volunteer=={version}"),
        (Sentence("check"), f"volunteer update --check {file}"),
        (Sentence("install"), f"pipx install --force ./{file}"),
    )


def check_file(release: Release, path: Path) -> bool:
    """Return True if a file is the announced one. Raises BadRequest for one that cannot be read."""
    found = hashlib.sha256()
    try:
        with path.open("rb") as file:
            left = FILE_BYTES_MAX
            while left > 0 and (part := file.read(min(left, 1 << 20))):
                found.update(part)
                left -= len(part)
    except OSError as error:
        raise BadRequest(
            Sentence("{path} cannot be read: {why}", path=path, why=why(error))
        ) from error
    return found.hexdigest() == release.sha256
