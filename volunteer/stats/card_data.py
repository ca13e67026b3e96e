"""Data of the card: the run with the volunteer's most contributions, and all its versions.

A card is made of it.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from shared.errors import NotFound
from shared.protocol import endpoints
from shared.protocol.accounts import RunInfo
from shared.protocol.endpoints import Endpoint
from shared.protocol.versions import VersionInfo

T = TypeVar("T")

VERSIONS_MAX = 20_000


class Source(Protocol):
    """Source of the data: the coordinator itself, or a running volunteer that queries it."""

    async def query(self, endpoint: Endpoint[T], **args: str | int) -> T: ...


async def deeds(source: Source, name: str = "") -> tuple[RunInfo, tuple[VersionInfo, ...]]:
    """A run and all its versions; without a name the one with most work of mine.

    Raises NotFound.
    """
    infos = [info for info in await source.query(endpoints.RUNS) if name in ("", info.name)]
    if not infos:
        raise NotFound(
            f'there is no run "{name}" here' if name else "this coordinator has no run yet"
        )
    listed = [(info, await _versions(source, info.name)) for info in infos]
    return max(listed, key=lambda pair: sum(version.mine for version in pair[1]))


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
