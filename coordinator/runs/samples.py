"""Samples of versions, for people: the newest picture, any earlier one, or a time-lapse of all.

Pictures are kept as PNG when a version is evaluated, for as long as the run exists, also when the
version's weights are pruned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import msgspec
from PIL import Image

from coordinator.database import evaluations, runs
from coordinator.database.evaluations import Sampled
from coordinator.platform import Platform, PlatformService
from coordinator.ttl_cache import REST, KeyedCache
from shared.errors import NotFound
from shared.workloads.data.image_files import SHOWN_PIXELS_MAX, open_image

Kind = Literal["gif", "webp"]

FRAMES_MAX = 120  # frames spread evenly over the run, with the first and the last
FRAME_MS = 120
LAST_MS = 2000  # time for which the last frame is shown
SIDE_MAX = 640  # largest side of a frame in pixels
NEWEST_S = 1.0  # greatest age of the newest sample that is served
KEPT_S = 20.0  # greatest age of a time-lapse that is served while versions come
KEPT_MAX = 8


class _Film(msgspec.Struct, frozen=True, kw_only=True):
    frames: tuple[str, ...]  # hashes of the pictures
    data: bytes


class Samples(PlatformService):
    """Reads samples and makes time-lapses, one at a time.

    Anybody may ask for them, so what would search a history (the newest sample, the frames of a
    time-lapse) is shared by all who ask meanwhile, and asked of the database less often the
    longer it took.
    """

    def __init__(self, on: Platform) -> None:
        super().__init__(on)
        self._newest: KeyedCache[str, tuple[Sampled, ...]] = KeyedCache(
            NEWEST_S, on.clock, rest=REST
        )
        self._given: KeyedCache[tuple[str, Kind], bytes] = KeyedCache(
            KEPT_S, on.clock, rest=REST, most=KEPT_MAX
        )
        self._films: dict[tuple[str, Kind], _Film] = {}
        self._making = asyncio.Lock()

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
        """Return the PNG of a sample. Raises NotFound when it is a text."""
        if not drawn.sha256:
            raise NotFound(f"the sample of version {drawn.version} is a text")
        path = await self._blobs.local(drawn.sha256)
        return await asyncio.get_running_loop().run_in_executor(self._threads, path.read_bytes)

    async def timelapse(self, name: str, kind: Kind) -> bytes:
        """Return a run's pictures as one animation, cached a while. Raises NotFound for none."""
        run_id = await self._db.read(lambda conn: runs.by_name(conn, name).id)
        data = await self._given.get((name, kind), lambda: self._film(run_id, name, kind))
        if not data:
            raise NotFound(f'"{name}" has no pictures (yet)')
        return data

    async def _film(self, run_id: int, name: str, kind: Kind) -> bytes:
        """Return the animation of the present pictures; b"" without any."""
        frames = tuple(
            await self._db.read(lambda conn: evaluations.pictures(conn, run_id, FRAMES_MAX))
        )
        if not frames:
            return b""
        async with self._making:
            known = self._films.pop((name, kind), None)
            if known is None or known.frames != frames:
                paths = [await self._blobs.local(sha256) for sha256 in frames]
                loop = asyncio.get_running_loop()
                data = await loop.run_in_executor(self._threads, film, paths, kind)
                known = _Film(frames=frames, data=data)
            self._films[name, kind] = known
            while len(self._films) > KEPT_MAX:
                del self._films[next(iter(self._films))]
            return known.data


def film(paths: Sequence[Path], kind: Kind) -> bytes:
    """Return an endless animation of PNG files. Raises BadRequest for any other file."""
    frames: list[Image.Image] = []
    for path in paths:
        image = open_image(path.read_bytes(), ("PNG",), SHOWN_PIXELS_MAX)
        frame = image.convert("L" if image.mode == "L" else "RGB")
        if max(frame.size) > SIDE_MAX:
            frame.thumbnail((SIDE_MAX, SIDE_MAX))
        frames.append(frame if not frames else _like(frame, frames[0]))
    options: dict[str, Any] = {"loop": 0, "save_all": True, "append_images": frames[1:]}
    options["duration"] = [*[FRAME_MS] * (len(frames) - 1), LAST_MS]
    if kind == "webp":
        options |= {"quality": 80, "method": 2}
    out = BytesIO()
    frames[0].save(out, kind.upper(), **options)
    return out.getvalue()


def _like(frame: Image.Image, first: Image.Image) -> Image.Image:
    """Return the frame in the size of the first."""
    return frame if frame.size == first.size else frame.resize(first.size)
