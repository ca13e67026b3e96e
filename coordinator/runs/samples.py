"""Samples of versions, for people: the newest picture, any earlier one, and all of them as a
time-lapse.

Pictures are kept as PNG when a version is evaluated, for as long as the run exists, also when the
version's weights are pruned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from PIL import Image

from coordinator.database import evaluations, runs
from shared.clock import Clock
from shared.errors import NotFound
from shared.workloads.data.image_files import SHOWN_PIXELS_MAX, open_image

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.database.engine.open import Database
    from coordinator.storage.blobs import BlobStore

Kind = Literal["gif", "webp"]

FRAMES_MAX = 120  # evenly spread over the run, the first and the last among them
FRAME_MS = 120
LAST_MS = 2000  # the newest stays a while
SIDE_MAX = 640  # pixels of a frame
KEPT_S = 20.0  # a time-lapse may be this old while versions come
KEPT_MAX = 8


class Drawn(msgspec.Struct, frozen=True, kw_only=True):
    """Sample of one version: a PNG by its hash, or a text."""

    version: int
    text: str
    sha256: str = ""


class _Film(msgspec.Struct, frozen=True, kw_only=True):
    frames: tuple[str, ...]  # hashes of the pictures
    made_at: float
    data: bytes


class Samples:
    """Reads samples and makes time-lapses, one at a time."""

    def __init__(self, db: Database, clock: Clock, blobs: BlobStore, threads: Executor) -> None:
        self._db = db
        self._clock = clock
        self._blobs = blobs
        self._threads = threads
        self._films: dict[tuple[str, Kind], _Film] = {}
        self._making = asyncio.Lock()

    async def of(self, name: str, version: int | None = None) -> Drawn:
        """Return what a version made, or the newest that was looked at. Raises NotFound."""

        def read(conn: Connection) -> Drawn:
            run = runs.by_name(conn, name)
            found = evaluations.samples(conn, run.id, version)
            if not found:
                which = "no version" if version is None else f"version {version}"
                raise NotFound(f'of "{name}" {which} has a sample')
            row = found[-1]
            return Drawn(version=row.version, text=row.sample, sha256=row.sample_sha256 or "")

        return await self._db.read(read)

    async def picture(self, drawn: Drawn) -> bytes:
        """The PNG of a sample. Raises NotFound when it is a text."""
        if not drawn.sha256:
            raise NotFound(f"the sample of version {drawn.version} is a text")
        path = await self._blobs.local(drawn.sha256)
        return await asyncio.get_running_loop().run_in_executor(self._threads, path.read_bytes)

    async def timelapse(self, name: str, kind: Kind) -> bytes:
        """All pictures of a run as one animation, at most twenty seconds old.

        Raises NotFound when it draws none.
        """
        frames = await self._db.read(lambda conn: _frames(conn, name))
        async with self._making:
            known = self._films.get((name, kind))
            now = self._clock.monotonic()
            if known and (known.frames == frames or now < known.made_at + KEPT_S):
                return known.data
            paths = [await self._blobs.local(sha256) for sha256 in frames]
            loop = asyncio.get_running_loop()
            data = await loop.run_in_executor(self._threads, film, paths, kind)
            self._films.pop((name, kind), None)
            while len(self._films) >= KEPT_MAX:
                del self._films[next(iter(self._films))]
            self._films[name, kind] = _Film(frames=frames, made_at=now, data=data)
            return data


def _frames(conn: Connection, name: str) -> tuple[str, ...]:
    found = evaluations.samples(conn, runs.by_name(conn, name).id)
    pictures = [row.sample_sha256 for row in found if row.sample_sha256]
    if not pictures:
        raise NotFound(f'"{name}" has no pictures (yet)')
    last = len(pictures) - 1
    count = min(len(pictures), FRAMES_MAX)
    return tuple(pictures[index * last // max(1, count - 1)] for index in range(count))


def film(paths: Sequence[Path], kind: Kind) -> bytes:
    """An animation of PNG files that runs for ever. Raises BadRequest for what is no PNG."""
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
    """Every frame has the size of the first."""
    return frame if frame.size == first.size else frame.resize(first.size)
