"""Data of the card: the run with the volunteer's most contributions, all its versions, the time
given to it, and the pictures of its first and newest version.
"""

from __future__ import annotations

import asyncio
from typing import Protocol, TypeVar

import msgspec

from shared.errors import NotFound, VolunteerError
from shared.protocol import endpoints
from shared.protocol.accounts import RunInfo
from shared.protocol.endpoints import Endpoint
from shared.protocol.versions import VersionInfo
from shared.sentences import Sentence

T = TypeVar("T")

VERSIONS_MAX = 20_000
PICTURE_SIDE = 160  # pixels, the longer one: of many images the upper left ones, as many as fit


class Source(Protocol):
    """Source of the data: the coordinator itself, or a running volunteer that queries it."""

    async def query(self, endpoint: Endpoint[T], **args: str | int) -> T: ...

    async def picture(self, run: str, version: int) -> bytes: ...


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A run, all its versions, and the volunteer's part in it."""

    info: RunInfo
    versions: tuple[VersionInfo, ...]
    device_s: float | None = None  # given to this run; None: hidden, or not known
    before: tuple[int, bytes] | None = None  # version and the PNG that it drew
    after: tuple[int, bytes] | None = None


async def part(source: Source, name: str = "") -> Part:
    """Return a run and the volunteer's part in it; without a name the run with most of its work.

    Raises NotFound.
    """
    infos = [info for info in await source.query(endpoints.RUNS) if name in ("", info.name)]
    if not infos:
        raise NotFound(
            Sentence('there is no run "{name}" here', name=name)
            if name
            else Sentence("this coordinator has no run yet")
        )
    listed = [(info, await _versions(source, info.name)) for info in infos]
    info, versions = max(listed, key=lambda pair: sum(version.mine for version in pair[1]))
    leaders = await source.query(endpoints.LEADERBOARD, run=info.name)
    drawn = [version.version for version in versions if version.picture is not None]
    return Part(
        info=info,
        versions=versions,
        device_s=next((row.device_s for row in leaders if row.me), None),
        before=await _drawn(source, info.name, drawn[:1]),
        after=await _drawn(source, info.name, drawn[1:][-1:]),
    )


async def _versions(source: Source, run: str) -> tuple[VersionInfo, ...]:
    """Page by page, up to a limit."""
    found: list[VersionInfo] = []
    while len(found) < VERSIONS_MAX:
        cursor = str(found[-1].version) if found else ""
        page = await source.query(endpoints.VERSIONS, run=run, cursor=cursor)
        fresh = [v for v in page if not found or v.version > found[-1].version]
        if not fresh:
            break
        found += fresh
    return tuple(found)


async def _drawn(source: Source, run: str, versions: list[int]) -> tuple[int, bytes] | None:
    """Return a version with its picture, small; None where it cannot be had: the card has room
    for words instead.
    """
    for version in versions:
        try:
            png = await source.picture(run, version)
            return version, await asyncio.to_thread(_small, png)
        except VolunteerError:
            return None
    return None


def _small(png: bytes) -> bytes:
    """Return a picture as a small PNG of our own writing. Raises BadRequest for what is none."""
    from shared.workloads.data.image_files import read_png, write_png
    from shared.workloads.data.resize import corner, resize

    pixels = read_png(png)
    while max(pixels.shape[:2]) > 2 * PICTURE_SIDE:
        pixels = corner(pixels)
    scale = min(1.0, PICTURE_SIDE / max(pixels.shape[:2]))
    height, width = (max(1, round(side * scale)) for side in pixels.shape[:2])
    return write_png(resize(pixels, height, width))
