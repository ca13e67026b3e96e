"""Samples of versions, for display: the newest one or any earlier one.

An evaluation stores its picture as PNG for as long as the run exists, even after the version's
weights are pruned.
"""

from __future__ import annotations

import asyncio

from coordinator.database import evaluations, runs
from coordinator.database.evaluations import Sampled
from coordinator.platform import Platform, PlatformService
from coordinator.ttl_cache import REST, KeyedCache
from shared.errors import NotFound

NEWEST_S = 1.0  # greatest age of the newest sample that is served


class Samples(PlatformService):
    """Reads samples.

    Anybody may request them, so simultaneous requests share the query of the newest sample, and a
    slow query is repeated less often.
    """

    def __init__(self, on: Platform) -> None:
        super().__init__(on)
        self._newest: KeyedCache[str, tuple[Sampled, ...]] = KeyedCache(
            NEWEST_S, on.clock, rest=REST
        )

    async def of(self, name: str, version: int | None = None) -> Sampled:
        """Return the sample of a version, or the newest one, which may be a second old. Raises
        NotFound.
        """
        run_id = await self._db.read(lambda conn: runs.by_name(conn, name).id)

        async def load() -> tuple[Sampled, ...]:
            found = await self._db.read(lambda conn: evaluations.sample(conn, run_id, version))
            return () if found is None else (found,)

        drawn = await (self._newest.get(name, load) if version is None else load())
        if not drawn:
            if version is None:
                raise NotFound(f'no version of "{name}" has a sample')
            raise NotFound(f'version {version} of "{name}" has no sample')
        return drawn[0]

    async def picture(self, drawn: Sampled) -> bytes:
        """Return the PNG of a sample. Raises NotFound if it is a text."""
        if not drawn.sha256:
            raise NotFound(f"the sample of version {drawn.version} is a text")
        path = await self._blobs.local(drawn.sha256)
        return await asyncio.get_running_loop().run_in_executor(self._threads, path.read_bytes)
