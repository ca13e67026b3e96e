"""Full check of every invariant: ledger, queue, history, blobs by byte, versions, signatures."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from coordinator.accounts.ledger import Ledger
from coordinator.database import datasets, invariants, runs, versions
from coordinator.runs.definition import definition
from coordinator.storage.blobs import BlobStore
from shared.decoding import decode
from shared.errors import VolunteerError, why
from shared.proofs.signing import SigningKey, verify
from shared.protocol.versions import VersionManifest
from shared.tensors.frame import open_frame

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.database.engine.open_database import Database
    from coordinator.database.runs import RunRow
    from coordinator.database.versions import VersionRow

VERSIONS_MAX = 1_000_000


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of the checked things, and a sentence for each breach."""

    looked_at: dict[str, int]
    breaches: tuple[str, ...]


class Checks:
    """Makes every check and changes no data; may run while the server works."""

    def __init__(self, db: Database, blobs: BlobStore, ledger: Ledger, key: SigningKey) -> None:
        self._db = db
        self._blobs = blobs
        self._ledger = ledger
        self._key = key

    async def run(self) -> CheckReport:
        """Run every check."""
        breaches = list(await self._ledger.check())
        breaches += await self._db.read(invariants.breaches)
        breaches += [
            f'"{name}" cannot be checked: {damage.why}'
            for name, damage in await self._db.read(runs.damaged)
        ]
        looked_at = await self._db.read(invariants.counted)
        count, sentences = await self._check_blobs()
        looked_at["blobs"] = count
        breaches += sentences
        breaches += await self._check_versions()
        return CheckReport(looked_at=looked_at, breaches=tuple(breaches))

    async def _check_blobs(self) -> tuple[int, list[str]]:
        """Check that every registered blob is stored with the right bytes."""
        registered = await self._db.read(datasets.all_registered)
        problems = []
        for sha, size in sorted(registered.items()):
            problem = await self._blob_problem(sha, size)
            # a blob that was deleted meanwhile is no breach
            if problem and sha in await self._db.read(datasets.all_registered):
                problems.append(problem)
        return len(registered), problems

    async def _blob_problem(self, sha: str, size: int) -> str:
        try:
            stored_size = await self._blobs.size(sha)
            if stored_size != size:
                return f"the blob {sha} has {stored_size} bytes, not {size}"
            if await self._blobs.hash(sha) != sha:
                return f"the blob {sha} is damaged: its bytes have another hash"
        except (VolunteerError, OSError) as error:
            return f"the blob {sha} cannot be read: {why(error)}"
        return ""

    async def _check_versions(self) -> list[str]:
        def read(conn: Connection) -> list[tuple[RunRow, VersionRow]]:
            unpruned = []
            for run in runs.every(conn):
                for row, evaluation in versions.listing(conn, run.id, -1, VERSIONS_MAX):
                    if not evaluation.pruned:
                        unpruned.append((run, row))
            return unpruned

        problems = []
        for run, row in await self._db.read(read):
            try:
                path = await self._blobs.local(row.published_sha256)
                await asyncio.to_thread(self._check_version, run, row, path)
            except (VolunteerError, OSError, ValueError) as error:
                problems.append(
                    f'version {row.version} of "{run.name}" does not load: {why(error)}'
                )
        return problems

    def _check_version(self, run: RunRow, row: VersionRow, path: Path) -> None:
        """Check a version: signature, manifest, file by its run's schema. Raises for a breach."""
        verify(self._key.public_key, row.manifest.encode(), bytes.fromhex(row.signature))
        manifest = decode(row.manifest, VersionManifest)
        if (manifest.version, manifest.weights.sha256) != (row.version, row.published_sha256):
            raise ValueError("its manifest describes another version")
        open_frame(path, definition(run).schema).close()
