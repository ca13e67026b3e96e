"""Shards of a merge as jobs: opened by the leading process, done by every free thread and replica.

    leader    begin ── take, make, finish ──┬── all done: assemble ──> the merger commits
    others            take, make, finish ───┘

A part is leased like the merge itself. The result of a job is a file in the blob store whose hashed
bytes include the part's attempt, so that two processes that make the same part write different
files.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import structlog

from coordinator.aggregation import merge_step
from coordinator.database import key_values, merge_jobs, merges, unreferenced_blobs
from coordinator.database.merge_jobs import MergedPart, PartRow, Phase, StateFile
from coordinator.merging import merge_recipe as recipes
from coordinator.merging.lease_keeper import LeaseKeeper
from coordinator.merging.merge_recipe import MergeRecipe
from coordinator.merging.shard_files import ShardFiles
from coordinator.platform import Platform, PlatformService
from shared.errors import Conflict, InvalidFrame, StorageFull, Unavailable, VolunteerError
from shared.files.deletions import delete_file
from shared.tensors.frame import WrittenFile

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.database.merges import MergeRow
    from coordinator.storage.blobs import BlobStore

POLL_S = 1.0
THREADS_MAX = 256
TOPIC = "merges"

log = structlog.get_logger("parts")


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionDraft:
    """Unpublished version."""

    weights: WrittenFile  # a scratch file
    norm: float  # norm of the update
    state: WrittenFile | None = None  # a scratch file
    states: tuple[StateFile, ...] = ()  # files in the store, one for each shard

    async def store_state(self, blobs: BlobStore, path: Path) -> WrittenFile | None:
        """Store a version's optimiser state; return the blob that refers to it: the file, or a list
        of files.
        """
        if self.states:
            listed = msgspec.json.encode([file._asdict() for file in self.states])
            return WrittenFile(sha256=await blobs.put_bytes(listed), size=len(listed))
        if self.state is not None:
            await blobs.put_file(self.state.sha256, path)
        return self.state

    def blobs(self) -> list[tuple[str, int, str]]:
        """Return hash, size and kind of the files of a state in shards, to be registered."""
        return [(file.sha256, file.size, "state") for file in self.states]


class PartFailed(InvalidFrame):
    """A part could not be made from its inputs."""


class SpentFiles(NamedTuple):
    """Files of an ended merge's parts, held for deletion."""

    holder: str
    names: tuple[str, ...]


NO_FILES = SpentFiles("", ())


class Parts(PlatformService):
    """Makes parts of merges."""

    def __init__(self, on: Platform, leases: LeaseKeeper) -> None:
        super().__init__(on)
        self._pool = ThreadPoolExecutor(max_workers=THREADS_MAX, thread_name_prefix="part")
        self._leases = leases
        # one take at a time: behind a frozen replica's row they would hold every place of a writer
        self._taking = asyncio.Lock()
        self.threads = 1

    def begin(self, conn: Connection, merge: MergeRow, recipe: MergeRecipe) -> None:
        """Open the parts of a merge within the transaction that leases the merge."""
        phases: list[Phase] = ["survey", "merge"] if recipe.rule.surveys else ["merge"]
        shards = [index for index, shard in enumerate(recipe.shards) if shard]
        merge_jobs.begin(conn, merge.id, phases, shards)

    async def build(self, merge: MergeRow, recipe: MergeRecipe, weights: Path) -> VersionDraft:
        """Wait until every part is made, here or elsewhere, and assemble the weights in a file.

        Raises PartFailed if a part cannot be made from its inputs, StorageFull, Conflict if another
        process has taken over the merge.
        """
        self._signals.notify(TOPIC)
        slots = range(min(self.threads, recipe.terms.shards))
        ends = await asyncio.gather(
            *(self._make_all(merge.id) for _ in slots), return_exceptions=True
        )
        for end in ends:  # errors are raised only after every thread has ended
            if end is not None:
                raise end
        rows = await self._db.read(lambda conn: merge_jobs.of_merge(conn, merge.id))
        if not rows:
            raise Conflict("the merge was taken over, and has ended")
        failed = next((row for row in rows if row.state == "failed"), None)
        if failed is not None:
            raise PartFailed(f"shard {failed.shard}: {failed.message}")
        return await self._assemble(recipe, rows, weights)

    async def _make_all(self, merge_id: int) -> None:
        """Make parts on one thread, until all parts of a merge are done or one has failed."""
        watch = self._signals.watch(TOPIC)
        while True:
            part = await self._take(merge_id)
            if part is not None:
                await self._make(part)
                continue
            rows = await self._db.read(lambda conn: merge_jobs.of_merge(conn, merge_id))
            states = {row.state for row in rows}
            if "failed" in states or states <= {"done"}:
                return
            await watch.wait(POLL_S)

    async def help(self) -> bool:
        """Make parts of other replicas' merges, one for each thread. Return True if a part was
        made.
        """
        helped = await asyncio.gather(*(self._make_next() for _ in range(self.threads)))
        return any(helped)

    async def _make_next(self) -> bool:
        part = await self._take()
        if part is not None:
            await self._make(part)
        return part is not None

    async def _take(self, merge_id: int | None = None) -> PartRow | None:
        # tests end the process before, within and after the functions `take_part`, `finish_part`
        def take_part(conn: Connection) -> PartRow | None:
            leases, now = self._leases, self._clock.now()
            return merge_jobs.take(conn, leases.owner, now, leases.lease_s, merge_id)

        async with self._taking:
            return await self._db.write(take_part)

    async def _make(self, part: PartRow) -> None:
        """Make one part and store its result. Raises StorageFull, after releasing the part."""
        async with self._leases.renewing(merge_jobs.JOBS, part):
            await self._try(part)
        self._signals.notify(TOPIC)

    async def _try(self, part: PartRow) -> None:
        try:
            await self._finish(part, await self._compute(part))
        except StorageFull:
            await self._db.write(partial(merge_jobs.JOBS.release, job=part))
            raise
        except (OSError, Unavailable) as error:
            await self._failed(part, str(error), content=False)
        except (VolunteerError, ValueError) as error:
            await self._failed(part, str(error), content=True)

    async def _finish(self, part: PartRow, result: MergedPart) -> None:
        def finish_part(conn: Connection) -> SpentFiles | None:
            if merge_jobs.finish(conn, part, result):
                names = {result.sha256, result.state_sha256} - {""}
                serials = {name: self._blobs.serials.get(name, "") for name in names}
                unreferenced_blobs.demand(conn, serials)
                return None
            return self._hold(conn, [result.sha256])

        spent = await self._db.write(finish_part)
        if spent is not None:
            log.info("part taken over", merge=part.merge_id, shard=part.shard)
            await self.discard(spent)

    async def _failed(self, part: PartRow, message: str, *, content: bool) -> None:
        log.warning("part failed", merge=part.merge_id, shard=part.shard, error=message)
        await self._db.write(
            partial(merge_jobs.fail, part=part, message=message[:2000], content=content)
        )

    async def _compute(self, part: PartRow) -> MergedPart:
        """Compute one part in a thread and store its files."""
        recipe = await self._db.read(
            lambda conn: recipes.read(conn, merges.by_id(conn, part.merge_id))
        )
        path = self._blobs.scratch() / f"part-{part.id}-{part.attempt}-{self._leases.owner}"
        state = path.with_name(f"{path.name}-state")
        threads = max(1, self.threads // recipe.terms.shards)
        try:
            with ShardFiles(self._blobs, recipe, recipe.shards[part.shard], path) as files:
                order = await recipe.order(files, threads, f"{part.id}.{part.attempt}")
                return await self._run_step(part, recipe, order, (path, state))
        finally:
            delete_file(path, "scratch")
            delete_file(state, "scratch")

    async def _run_step(
        self,
        part: PartRow,
        recipe: MergeRecipe,
        order: merge_step.MergeOrder,
        to: tuple[Path, Path],
    ) -> MergedPart:
        shard, (path, state) = recipe.shards[part.shard], to
        loop = asyncio.get_running_loop()
        if part.phase == "survey":
            written = await loop.run_in_executor(
                self._pool, merge_step.survey_shard, order, shard, path
            )
            await self._blobs.put_file(written.sha256, path)
            return MergedPart(sha256=written.sha256, size=written.size)
        rows = await self._db.read(lambda conn: merge_jobs.of_merge(conn, part.merge_id))
        results = [merge_jobs.made_by(row) for row in rows if row.phase == "survey"]
        surveys = await self._blobs.local_files([result.sha256 for result in results])
        outcome = await loop.run_in_executor(
            self._pool, merge_step.merge_shard, order, shard, surveys, path, state
        )
        await self._blobs.put_file(outcome.weights.sha256, path)
        if outcome.state is not None:
            await self._blobs.put_file(outcome.state.sha256, state)
        return MergedPart(
            sha256=outcome.weights.sha256,
            size=outcome.weights.size,
            state_sha256=outcome.state.sha256 if outcome.state else "",
            state_size=outcome.state.size if outcome.state else 0,
            squares=outcome.squares,
        )

    async def _assemble(
        self, recipe: MergeRecipe, rows: list[PartRow], weights: Path
    ) -> VersionDraft:
        results = {(row.phase, row.shard): merge_jobs.made_by(row) for row in rows}
        shards = {shard: result for (phase, shard), result in results.items() if phase == "merge"}
        files = {shard: await self._blobs.local(result.sha256) for shard, result in shards.items()}
        written = await asyncio.get_running_loop().run_in_executor(
            self._pool,
            merge_step.assemble,
            recipe.about.schema,
            recipe.shards,
            files,
            weights,
            recipe.metadata(),
        )
        squares = [square for shard in shards.values() for square in shard.squares]
        return VersionDraft(
            weights=written,
            norm=merge_step.norm_of(squares),
            states=tuple(
                StateFile(shard, result.state_sha256, result.state_size)
                for shard, result in sorted(shards.items())
                if result.state_sha256
            ),
        )

    def end(self, conn: Connection, merge_id: int) -> SpentFiles:
        """Delete the parts of a merge within the transaction that ends it; return their files."""
        rows = merge_jobs.of_merge(conn, merge_id)
        merge_jobs.drop(conn, merge_id)
        return self._hold(conn, merge_jobs.files_of(rows))

    def _hold(self, conn: Connection, files: Iterable[str]) -> SpentFiles:
        """Hold files that no part refers to, so that nobody can announce them before they are
        deleted. No file is held in a store that another database may use, or after lost
        transactions.
        """
        if key_values.get(conn, key_values.STORE_TROUBLE) or key_values.get(conn, key_values.LOST):
            return NO_FILES
        names = set(files) - merge_jobs.blobs_in_use(conn)
        holder = secrets.token_hex(8)
        names_held = unreferenced_blobs.hold(conn, names, holder, self._clock.now())
        return SpentFiles(holder, tuple(names_held))

    async def discard(self, spent: SpentFiles) -> None:
        """Delete the files of an ended merge; a file that cannot be deleted now is swept later."""
        deleted = []
        for name in spent.names:
            try:
                await self._blobs.delete(name, "let go")
                deleted.append(name)
            except (OSError, VolunteerError) as error:
                log.warning("file of a part not deleted", error=str(error))
        if spent.names:
            await self._db.write(
                lambda conn: unreferenced_blobs.end_sweep(conn, spent.holder, deleted)
            )
