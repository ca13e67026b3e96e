"""A list of runs open to everyone, published by a third party at an address that the owner of the
machine chose.
"""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from urllib.parse import urlsplit

import msgspec

from shared.decoding import decode
from shared.errors import BadRequest, Unreachable, VolunteerError
from shared.links import is_loopback, parse_link
from shared.sentences import Sentence
from shared.text import printable
from volunteer.control.commands import PublicRun

BYTES_MAX = 256 << 10
RUNS_MAX = 200
TIMEOUT_S = 10.0


async def public_runs(url: str) -> tuple[PublicRun, ...]:
    """Return the entries whose links can be read. Raises BadRequest, Unreachable."""
    parts = urlsplit(url)
    if parts.scheme != "https" and not (
        parts.scheme == "http" and is_loopback(parts.hostname or "")
    ):
        raise BadRequest(
            Sentence("the list of public runs needs an address that begins with https://")
        )
    data = await asyncio.to_thread(_fetch, url)
    try:
        entries = decode(data, tuple[PublicRun, ...])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(
            Sentence("{hostname} does not give a list of public runs", hostname=parts.hostname)
        ) from error
    return tuple(_clean(entry) for entry in entries[:RUNS_MAX] if _joinable(entry.link))


def _fetch(url: str) -> bytes:
    request = urllib.request.Request(url, headers={"User-Agent": "volunteer"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
            data: bytes = reply.read(BYTES_MAX + 1)
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise Unreachable(
            Sentence("the list of public runs cannot be read: {error}", error=error)
        ) from error
    if len(data) > BYTES_MAX:
        raise BadRequest(Sentence("the list of public runs is too long"))
    return data


def _joinable(link: str) -> bool:
    try:
        parse_link(link)
    except VolunteerError:
        return False
    return True


def _clean(entry: PublicRun) -> PublicRun:
    return PublicRun(
        name=printable(entry.name, 64),
        description=printable(entry.description, 200),
        link=entry.link,
    )
