"""Near copies: each update gets a secret sketch, which is compared with those of the updates and
the merges before it.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec

from coordinator.database import sketches, versions
from coordinator.database.contributions import ContributionRow
from coordinator.rules import similarity, validation
from coordinator.rules.similarity import Suspect
from coordinator.rules.validation import Judgement
from coordinator.storage.blobs import in_pool
from shared.errors import NotFound, VolunteerError
from shared.tensors import sketch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from sqlalchemy import Connection

    from coordinator.database.engine.open import Database
    from coordinator.runs.definition import Definition
    from coordinator.storage.blobs import BlobStore
    from shared.signing import SigningKey

MERGES = 4  # newest of them that are compared with
VERSIONS_MAX = 64  # whose sketches are remembered


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """Sketches of an update, and of what the last versions moved the model by."""

    sketch: bytes
    merges: tuple[bytes, ...] = ()


class Sketches:
    """Makes, keeps and compares the sketches of one server."""

    def __init__(self, db: Database, blobs: BlobStore, key: SigningKey) -> None:
        self._db = db
        self._blobs = blobs
        self._secret = hashlib.sha256(key.sign(b"volunteer: secret of sketches")).digest()
        self._versions: dict[tuple[int, int], NDArray[np.float32]] = {}

    async def of(self, row: ContributionRow, about: Definition) -> Seen | None:
        """Return the sketches of an update that was measured; None where none can be made."""
        secret = self._secret + row.run_id.to_bytes(8, "big")
        path = await self._blobs.local(row.sha256)
        try:
            found = await in_pool(sketch.of_update, path, about.schema, row.codec, secret)
        except VolunteerError:  # unreadable: the verdict says so
            return None
        merges = []
        for version in range(row.base_version, max(0, row.base_version - MERGES), -1):
            before, after = [
                await self._of_version(row.run_id, number, about, secret)
                for number in (version - 1, version)
            ]
            if before is not None and after is not None:
                merges.append((before - after).tobytes())
        return Seen(sketch=found.tobytes(), merges=tuple(merges))

    async def _of_version(
        self, run_id: int, version: int, about: Definition, secret: bytes
    ) -> NDArray[np.float32] | None:
        """Return the sketch of a version's weights; None where its files are pruned."""
        known = self._versions.get((run_id, version))
        if known is not None:
            return known
        try:
            of = await self._db.read(lambda conn: versions.get(conn, run_id, version))
            path = await self._blobs.local(of.master_sha256)
        except NotFound:
            return None
        made = await in_pool(sketch.of_version, path, about.schema, secret)
        while len(self._versions) >= VERSIONS_MAX:
            del self._versions[next(iter(self._versions))]
        self._versions[run_id, version] = made
        return made

    def refusal(
        self, conn: Connection, row: ContributionRow, seen: Seen | None
    ) -> Judgement | None:
        """Return the verdict on a near copy; None for an update of its own."""
        if seen is None:
            return None
        suspect = Suspect(
            volunteer=row.volunteer_id,
            task=row.task_id,
            base_version=row.base_version,
            sketch=seen.sketch,
        )
        of = similarity.copied(suspect, sketches.known(conn, row), seen.merges)
        return validation.near_copy(of) if of else None

    def keep(self, conn: Connection, row: ContributionRow, seen: Seen | None) -> None:
        """Remember the sketch of an update that was accepted."""
        if seen is not None:
            sketches.keep(conn, row, seen.sketch)
