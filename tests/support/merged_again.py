"""Merge a run's log once more: the stored lists of contributions must give the stored hashes.

It begins at the oldest version from which on everything is still there; contributions go an hour
after their merge.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from coordinator.aggregation import merge_step
from coordinator.aggregation.shards import split
from coordinator.database import contributions, merge_jobs, merges, runs, versions
from coordinator.database.versions import VersionRow
from coordinator.merging import merge_recipe as recipes
from coordinator.merging.merge_recipe import MergeRecipe, MergeTerms
from shared.decoding import decode
from shared.errors import NotFound

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.database.engine.open_database import Database
    from coordinator.storage.blobs import BlobStore

VERSIONS_MAX = 1_000_000


class Remade(msgspec.Struct, frozen=True, kw_only=True):
    """Result of merging once more."""

    run: str
    base: int  # the version it began from
    head: int
    merges: int  # made once more
    wrong: int | None  # the first version that came out otherwise


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """One version of the log."""

    row: VersionRow
    kept: bool  # its files are still there
    state: tuple[str, ...]
    recipe: MergeRecipe | None  # None where nothing was merged


@dataclass(frozen=True, kw_only=True)
class _Files:
    """The files of a version, remade or stored."""

    weights: Path
    state: tuple[Path, ...]


class Remerge:
    """Merges logs of runs again, into files that nobody keeps."""

    def __init__(self, db: Database, blobs: BlobStore, threads: Executor) -> None:
        self._db = db
        self._blobs = blobs
        self._threads = threads

    async def run(self, name: str, *, shards: int = 0, threads: int = 1) -> Remade:
        """Merge as much of a run's log as is still there, in so many shards (0 = at once).

        Raises NotFound when there is nothing to begin from.
        """
        log = await self._db.read(partial(_log, name=name))
        start = await self._start(log)
        folder = self._blobs.scratch() / f"remerge-{secrets.token_hex(8)}"
        folder.mkdir()
        wanted = {entry.row.master_sha256 for entry in log if entry.row.kind == "rollback"}
        found: dict[str, _Files] = {}
        files, merges = await self._stored(log[start]), 0
        wrong = None
        try:
            for entry in log[start + 1 :]:
                if entry.recipe is None:
                    files = found.get(entry.row.master_sha256) or await self._stored(entry)
                    continue
                order = await entry.recipe.order_on(
                    self._blobs, base=files.weights, state=files.state, threads=threads
                )
                before, made = files, folder / str(entry.row.version)
                made.mkdir()
                sha256, files = await asyncio.get_running_loop().run_in_executor(
                    self._threads, _merge, order, shards, made
                )
                merges += 1
                if sha256 != entry.row.master_sha256:
                    wrong = entry.row.version
                    break
                if sha256 in wanted:
                    found[sha256] = files
                if before.weights.is_relative_to(folder) and before not in found.values():
                    shutil.rmtree(before.weights.parent)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return Remade(
            run=name,
            base=log[start].row.version,
            head=log[-1].row.version,
            merges=merges,
            wrong=wrong,
        )

    async def _start(self, log: Sequence[_Entry]) -> int:
        """The oldest place in the log whose files are there, and with them all that came after."""
        start = None
        for place in reversed(range(len(log))):
            if log[place].kept:
                start = place
            if not await self._is_there(log[place].recipe):
                break
        if start is None:
            raise NotFound(
                "the files of the newest version are gone: `coordinator check` says more"
            )
        return start

    async def _is_there(self, recipe: MergeRecipe | None) -> bool:
        try:
            for row in recipe.rows if recipe else ():
                await self._blobs.size(row.sha256)
        except NotFound:
            return False
        return True

    async def _stored(self, entry: _Entry) -> _Files:
        return _Files(
            weights=await self._blobs.local(entry.row.master_sha256),
            state=tuple([await self._blobs.local(sha) for sha in entry.state]),
        )


def _log(conn: Connection, name: str) -> list[_Entry]:
    run = runs.by_name(conn, name)
    pairs = versions.listing(conn, run.id, -1, VERSIONS_MAX)
    if not pairs:
        raise NotFound(f'"{name}" has not been started: there is no version yet')
    by_version = {row.version: row for row, _ in pairs}
    found = []
    for row, seen in pairs:
        recipe = None
        if row.kind == "merge" and row.parent is not None:
            merge = merges.of_base(conn, run.id, row.parent)
            recipe = recipes.of_contributions(
                conn,
                run=run,
                base=by_version[row.parent],
                rows=contributions.by_ids(conn, decode(row.contributions, list[int])),
                terms=decode(merge.terms, MergeTerms) if merge else MergeTerms(),
            )
        state = merge_jobs.state_files(conn, row.state_sha256)
        found.append(_Entry(row=row, kept=not seen.pruned, state=state, recipe=recipe))
    return found


def _merge(order: merge_step.MergeOrder, shards: int, folder: Path) -> tuple[str, _Files]:
    """Merge once into a folder; return hash and files of the result."""
    weights, state = folder / "weights", folder / "state"
    if not shards:
        outcome = merge_step.merge_model(order, weights, state)
        return outcome.weights.sha256, _Files(
            weights=weights, state=(state,) if outcome.state else ()
        )
    pieces = split(order.schema, shards, order.plan.shard_by)
    held = [index for index, shard in enumerate(pieces) if shard]
    surveys = [folder / f"survey-{index}" for index in held]
    for index, survey in zip(held, surveys, strict=True):
        merge_step.survey_shard(order, pieces[index], survey)
    made, states = {}, []
    for index in held:
        made[index] = folder / f"part-{index}"
        part = folder / f"state-{index}"
        if merge_step.merge_shard(order, pieces[index], surveys, made[index], part).state:
            states.append(part)
    written = merge_step.assemble(order.schema, pieces, made, weights, order.metadata)
    return written.sha256, _Files(weights=weights, state=tuple(states))
