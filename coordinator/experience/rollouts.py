"""Rollouts to look at: the newest judged answers of a run, as texts."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from coordinator.database import experience, runs
from coordinator.runs.definition import Definition, definition
from shared.errors import BadRequest
from shared.workloads.experience import Rollout

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from sqlalchemy import Connection

    from coordinator.database.engine.open_database import Database
    from coordinator.storage.blobs import BlobStore

FILES_MAX = 64  # newest files that are searched
ROLLOUTS_MAX = 1000


async def newest(
    db: Database, blobs: BlobStore, name: str, *, version: int | None, limit: int
) -> tuple[Rollout, ...]:
    """Return the newest answers of a run, or of one of its versions; only groups with unequal
    rewards are stored. Raises NotFound, BadRequest for a run without answers.
    """
    if not 1 <= limit <= ROLLOUTS_MAX:
        raise BadRequest(f"limit lies between 1 and {ROLLOUTS_MAX}, not {limit}")

    def read(conn: Connection) -> tuple[Definition, list[str]]:
        run = runs.by_name(conn, name)
        return definition(run), experience.newest_files(conn, run.id, FILES_MAX)

    about, hashes = await db.read(read)
    declaration = about.declaration
    if declaration.taught_by != "experience" or declaration.output != "text":
        raise BadRequest(f'"{name}" does not learn from answers of its own: it has no rollouts')
    refs = about.workload.files(about.file.model)
    files = {key: await blobs.local(ref.sha256) for key, ref in refs.items()}
    rollouts: list[Rollout] = []
    for sha256 in hashes:
        path = await blobs.local(sha256)
        answers = await asyncio.to_thread(_read, about, path, files)
        rollouts += [row for row in answers if version is None or row.version == version]
        if len(rollouts) >= limit:
            break
    return tuple(rollouts[:limit])


def _read(about: Definition, path: Path, files: Mapping[str, Path]) -> list[Rollout]:
    """Return the answers of a file."""
    experience_of_run = about.workload.experience
    if experience_of_run is None:
        return []
    config = about.file.model
    return list(experience_of_run.rollouts(config, path.read_bytes(), files.__getitem__))
