"""Merger: turns accepted contributions into the next version; each merge is a leased job.

    due? ── lease: base head, contributions ──> files, in a thread ──> one transaction: version + head + merged + credits
                                           │    or in shards, each a job of its own (shard_jobs.py)
                                           └──> failed twice: each tried alone, culprits set aside

Whatever fails before the transaction leaves only files to which nothing refers.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import structlog

from coordinator.aggregation import merge_step
from coordinator.compute import half_the_cores
from coordinator.database import (
    contributions,
    datasets,
    evaluations,
    merges,
    runs,
    verdicts,
    versions,
)
from coordinator.database import merge_jobs as part_rows
from coordinator.database import volunteers as accounts
from coordinator.database.contributions import ContributionRow
from coordinator.database.members import member_rows
from coordinator.database.merges import MergeRow
from coordinator.database.runs import RunRow
from coordinator.merging import merge_recipe as recipes
from coordinator.merging.lease_keeper import LeaseKeeper
from coordinator.merging.merge_recipe import MergeRecipe, MergeTerms
from coordinator.merging.shard_jobs import NO_FILES, TOPIC, Parts, SpentFiles, VersionDraft
from coordinator.plan.plan_checks import BATCH_MAX
from coordinator.platform import Platform, PlatformService
from coordinator.rules.task_size import cooling
from coordinator.runs import publishing, settlement
from coordinator.runs.definition import definition
from coordinator.runs.run_ends import budget_spent
from coordinator.runs.version_files import Content
from coordinator.storage.blobs import DamagedBlob
from coordinator.traffic import SLOW_S, Durations
from shared.errors import (
    Conflict,
    InvalidFrame,
    StorageFull,
    Unavailable,
    VolunteerError,
)
from shared.files.deletions import delete_file
from shared.workloads.training.lr_schedule import learning_rate

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.database.tasks import FailureKind
    from coordinator.merging.evaluation import Evaluation
    from coordinator.runs.runs import Runs

POLL_S = 1.0  # interval of checking deadlines when nothing else wakes the merger
IDLE_S = 5.0  # the same interval while no run is running
FAILURES_MAX = 2  # number of failures after which each contribution is tried alone
# most that the loss of a gated merge may be, as a multiple of the last measured loss
GATE_RATIO = 1.5
# standard errors of a share of problems that the loss may be above that: a model that solves all
# problems has the loss 0
GATE_ERRORS = 4.0
NOISE_KEY_BYTES = 32

log = structlog.get_logger("merger")


class Culprit(NamedTuple):
    """Contribution that fails a merge, and the failure."""

    row: ContributionRow
    cause: Exception


class MergeJob(msgspec.Struct, frozen=True, kw_only=True):
    """Leased merge and its recipe."""

    merge: MergeRow
    recipe: MergeRecipe

    @property
    def run(self) -> RunRow:
        return self.recipe.run

    @property
    def rows(self) -> tuple[ContributionRow, ...]:
        return self.recipe.rows


class Merger(PlatformService):
    """Watches the runs and makes due merges."""

    def __init__(self, on: Platform, runs_service: Runs, evaluation: Evaluation) -> None:
        super().__init__(on)
        self._attendance = on.attendance
        self._runs = runs_service
        self._evaluation = evaluation
        # One merge at a time in this process; `merge_threads` work within it.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="merge")
        self._leases = LeaseKeeper(on)
        self._parts = Parts(on, self._leases)
        self.durations = Durations(SLOW_S)  # duration of committed merges
        self.outcomes: Counter[tuple[str, str]] = Counter()  # run, merged or failed or overtaken
        constants = on.settings.constants
        self._merge_threads = self._parts.threads = constants.merge_threads or half_the_cores()

    async def run(self, stop: asyncio.Event) -> None:
        """Make due merges until `stop` is set."""
        # SQLite has one server, so any lease is left from a dead process
        if self._db.dialect == "sqlite":
            now = self._clock.now()
            await self._db.write(partial(merges.JOBS.release_all, now=now, ended_at=now))
        watch = self._signals.watch("contributions", "queue", TOPIC)
        while not stop.is_set():
            running, due_runs = await self._db.read(self._look)
            busy = await self._merge_each(due_runs, stop)
            if stop.is_set():
                return
            if any(definition(run).plan.shards > 1 for run in running):
                busy |= await self.help()
            # A merge of this process notifies this watch too. Do not wait if another merge may be
            # due.
            await watch.wait(0 if busy else POLL_S if running else IDLE_S)

    async def _merge_each(self, due_runs: Sequence[RunRow], stop: asyncio.Event) -> bool:
        """Merge each run once, until `stop` is set; return True if a version was made. The first
        error is raised after every run has had its turn: a lost file of one stops no other.
        """
        busy, errors = False, list[Exception]()
        for run in due_runs:
            if stop.is_set():
                break
            try:
                busy |= await self.merge_if_due(run.id)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return busy

    async def help(self) -> bool:
        """Make parts of merges that other replicas lead. Return True when there were any."""
        return await self._parts.help()

    async def merge_if_due(self, run_id: int) -> bool:
        """Merge once if the plan calls for it. Return True when a version was made."""
        job = await self._db.write(lambda conn: self._lease(conn, run_id))
        if job is None:
            return False
        async with self._leases.renewing(merges.JOBS, job.merge):
            return await self._merge(job)

    async def _merge(self, job: MergeJob) -> bool:
        started = self._clock.monotonic()
        try:
            content, draft = await self._build(job)
        except DamagedBlob as error:
            return await self._damaged(job, error)
        except (StorageFull, Unavailable) as error:  # not the fault of a contribution
            await self._abandon(job, error.message)
            raise
        except Conflict as error:
            return await self._overtaken(job, error)
        except (VolunteerError, ValueError, OSError) as error:
            await self._failed(job, error)
            return False
        seconds = self._clock.monotonic() - started
        try:
            spent = await self._db.write(lambda conn: self._commit(conn, job, content, draft))
        except Conflict as error:
            return await self._overtaken(job, error)
        self.durations.add(seconds)
        self.outcomes[job.run.name, "merged"] += 1
        self._attendance.count_merged(job.run.id, sum(row.train_s for row in job.rows))
        await self._parts.discard(spent)
        log.info(
            "merged",
            run=job.run.name,
            version=job.recipe.version,
            contributions=len(job.rows),
            seconds=round(seconds, 3),
        )
        for topic in (f"run:{job.run.id}", "versions", "queue"):
            self._signals.notify(topic)
        return True

    async def _overtaken(self, job: MergeJob, error: Conflict) -> bool:
        self.outcomes[job.run.name, "overtaken"] += 1
        log.info("merge overtaken", run=job.run.name, error=error.message)
        await self._abandon(job)
        return False

    async def _damaged(self, job: MergeJob, error: DamagedBlob) -> bool:
        """Set aside the contributions whose bytes the store does not give back; raise the error
        where the bytes are those of the base version.
        """
        culprits = [Culprit(row, error) for row in job.rows if row.sha256 == error.sha256]
        if not culprits:
            await self._abandon(job, error.message)
            raise error
        log.warning("bytes in the store changed", run=job.run.name, error=error.message)
        await self._set_aside(job, culprits, error.message, job.merge.failures)
        return False

    async def _abandon(self, job: MergeJob, message: str = "") -> None:
        """End a merge that will be tried again; a message is shown until it succeeds."""
        now, state = self._clock.now(), "abandoned"
        await self._db.write(
            partial(merges.end, merge=job.merge, state=state, now=now, message=message[:2000])
        )

    def _look(self, conn: Connection) -> tuple[list[RunRow], list[RunRow]]:
        """Return the running runs, and the runs with a due merge that no other process makes. Reads
        without locks.
        """
        running, ready, now = runs.running(conn), self._runs.queries.readiness, self._clock.now()
        due = [run for run, waits in running if waits and ready(conn, run)[0].now]
        begun = [(run, merges.of_base(conn, run.id, run.head)) for run in due]
        free = [
            run
            for run, merge in begun
            if not (merge and merge.is_leased_to_other(self._leases.owner, now))
        ]
        return [run for run, _ in running], free

    def _lease(self, conn: Connection, run_id: int) -> MergeJob | None:
        """Check the trigger again under the lock of the run, and take the lease."""
        run = runs.by_id(conn, run_id, lock=True)
        state, live = self._runs.queries.readiness(conn, run)
        if run.state != "running" or not state.now or budget_spent(conn, run):
            return None
        before = merges.of_base(conn, run.id, run.head)
        recipe = self._unfinished(conn, run, before)
        is_resumed = recipe is not None
        recipe = recipe or self._fresh(conn, run, live)
        if not recipe.mixes_enough:  # waiting updates began at a version that a rollback reverted
            cause = "its base was reverted by a rollback"
            owners = settlement.lock_accounts(conn, run, run.head)
            settlement.leave_behind(conn, run, run.head, owners, cause, self._clock.now())
            return None
        bid = merges.Bid(
            run_id=run_id,
            base=run.head,
            contributions=_json([row.id for row in recipe.rows]),
            terms=_json(recipe.terms),
            owner=self._leases.owner,
            lease_until=self._clock.now() + self._leases.lease_s,
        )
        now = self._clock.now()
        if before is None:
            merge: MergeRow | None = merges.begin(conn, bid, now)
        else:
            merge = merges.take_over(conn, before, bid, now)
        if merge is None:
            return None
        if recipe.terms.shards > 1 and not is_resumed:
            self._parts.begin(conn, merge, recipe)
        return MergeJob(merge=merge, recipe=recipe)

    def _fresh(self, conn: Connection, run: RunRow, live: int) -> MergeRecipe:
        """Return the recipe for merging all waiting contributions into the head."""
        rows = contributions.mergeable(conn, run.id, BATCH_MAX)
        about = definition(run)
        plan, train = about.plan, about.file.train
        base = versions.get(conn, run.id, run.head)
        workers = [row.worker_id for row in rows]
        terms = MergeTerms(
            workers=max(1, live),
            shards=plan.shards,
            shard_by=plan.shard_by,
            cooling=cooling(about.share_done(run, base.version, base.tokens), base.version),
            rate=learning_rate(train, base.global_step, about.total_steps(run)),
            noise_key=secrets.token_hex(NOISE_KEY_BYTES) if about.file.privacy.on else "",
            samples=member_rows.sizes(conn, run.id, workers) if about.at_members else {},
        )
        return recipes.of_contributions(conn, run=run, base=base, rows=rows, terms=terms)

    def _unfinished(
        self, conn: Connection, run: RunRow, merge: MergeRow | None
    ) -> MergeRecipe | None:
        """Return the recipe of a merge in shards that another process left unfinished, to resume
        it; None if there is no such merge.
        """
        if merge is None or merge.state not in ("leased", "abandoned"):
            return None
        if not part_rows.of_merge(conn, merge.id):
            return None
        recipe, plan = recipes.read(conn, merge), definition(run).plan
        same = (recipe.terms.shards, recipe.terms.shard_by) == (plan.shards, plan.shard_by)
        usable = same and all(row.state == "accepted" for row in recipe.rows)
        return recipe if usable and recipe.mixes_enough else None

    async def _build(self, job: MergeJob) -> tuple[Content, VersionDraft]:
        """Aggregate the contributions, step, and write the files to the blob store, where nothing
        refers to them yet.
        """
        recipe, about = job.recipe, job.recipe.about
        path = self._blobs.scratch() / f"merge-{secrets.token_hex(8)}"
        try:
            if recipe.terms.shards > 1:
                draft = await self._parts.build(job.merge, recipe, path)
            else:
                draft = await self._at_once(recipe, path)
            publication = publishing.Publication(
                plan=about.plan,
                schema=about.schema,
                version=recipe.version,
                master=path,
                written=draft.weights,
                base=await publishing.base_of(self._blobs, recipe.base),
                mirrored=bool(self._settings.mirrors),
            )
            loop = asyncio.get_running_loop()
            prepared = await loop.run_in_executor(self._thread, publishing.prepare, publication)
            if about.file.evaluation.gate:
                await self._gate(job.run, prepared.published)
            content = await prepared.store(self._blobs)
            state = await draft.store_state(self._blobs, _state_of(path))
        finally:
            publishing.discard(path)
            delete_file(_state_of(path), "scratch")
        return publishing.with_state(content, state), draft

    async def _at_once(self, recipe: MergeRecipe, path: Path) -> VersionDraft:
        """Merge the whole model in one job; the optimiser's state is written next to `path`."""
        order = await recipe.order(self._blobs, self._merge_threads)
        outcome = await asyncio.get_running_loop().run_in_executor(
            self._thread, merge_step.merge_model, order, path, _state_of(path)
        )
        return VersionDraft(
            weights=outcome.weights,
            norm=outcome.update_norm,
            state=outcome.state,
        )

    async def _gate(self, run: RunRow, weights: Path) -> None:
        """Measure the merged model before it is published, where `gate = true`. Raises InvalidFrame
        if it is much worse, Unavailable if the server stops.
        """
        before = await self._db.read(lambda conn: evaluations.newest_loss(conn, run.id))
        measured = await self._evaluation.measure(run, weights, sample=False)
        if measured is None:
            raise Unavailable("the server is stopping")
        loss = measured.metrics.get("loss", math.nan)
        chance = GATE_ERRORS * measured.metrics.get("solved_error", 0.0)
        if not math.isfinite(loss) or (before is not None and loss > GATE_RATIO * before + chance):
            raise InvalidFrame(
                f"the merged model has loss {loss:.3f} where {before or 0:.3f} was measured before"
            )

    def _commit(
        self, conn: Connection, job: MergeJob, content: Content, draft: VersionDraft
    ) -> SpentFiles:
        """Commit version, head, contributions and credits in one transaction; return the files of
        the parts. Raises Conflict if another process was faster.
        """
        now, progress = self._clock.now(), job.recipe.progress
        run = runs.by_id(conn, job.run.id, lock=True)
        owners = settlement.lock_accounts(conn, run, progress.version, job.rows)
        terms = _json(msgspec.structs.replace(job.recipe.terms, noise_key=""))
        if not merges.end(conn, job.merge, "committed", now, terms=terms):
            raise Conflict("the merge was taken over")
        moved = run.state == "running" and runs.set_head(
            conn,
            run.id,
            job.recipe.base.version,
            global_step=progress.global_step,
            tokens=progress.tokens,
        )
        if not moved or not verdicts.merge_all(conn, job.rows, progress.version, now):
            raise Conflict("the head has moved, or a contribution was decided elsewhere")
        datasets.register(conn, content.blobs(), now, self._blobs.serials)
        datasets.register_referenced(conn, draft.blobs(), now)
        if content.state_sha256:
            part_rows.add_state(conn, content.state_sha256, draft.states)
        in_parts = job.merge.attempt > 1 or job.recipe.terms.shards > 1
        spent = self._parts.end(conn, job.merge.id) if in_parts else NO_FILES
        values = {
            "kind": "merge",
            "parent": job.recipe.base.version,
            "contributions": job.merge.contributions,
            "update_norm": draft.norm,
        }
        self._runs.add_version(conn, run, content, progress, values)
        settlement.overtake(conn, run, progress.version, job.rows, owners, now)
        return spent

    async def _failed(self, job: MergeJob, error: Exception) -> None:
        """Count a failure; after the second, set aside the contributions that cause it and merge
        the others.
        """
        failures = job.merge.failures + 1
        self.outcomes[job.run.name, "failed"] += 1
        log.warning(
            "merge failed",
            run=job.run.name,
            version=job.recipe.version,
            failures=failures,
            error=str(error),
        )
        culprits = await self._culprits(job) if failures >= FAILURES_MAX else []
        await self._set_aside(job, culprits, str(error), failures)

    async def _set_aside(
        self,
        job: MergeJob,
        culprits: list[Culprit],
        message: str,
        failures: int,
    ) -> None:
        """End a merge without a version; its next try leaves out the culprits."""

        def note(conn: Connection) -> SpentFiles:
            now = self._clock.now()
            accounts.lock(conn, {row.volunteer_id for row, _ in culprits})
            ours = merges.end(
                conn, job.merge, "failed", now, failures=failures, message=message[:2000]
            )
            if not ours:  # the process that took the merge over finds the culprits
                return NO_FILES
            for row, cause in culprits:
                kind: FailureKind | None = "failure"
                if isinstance(cause, DamagedBlob):  # the store is at fault
                    kind = None
                settlement.set_aside(conn, job.run, row, str(cause), now, kind)
            return self._parts.end(conn, job.merge.id)

        await self._parts.discard(await self._db.write(note))
        for topic in ("queue", f"run:{job.run.id}"):
            self._signals.notify(topic)

    async def _culprits(self, job: MergeJob) -> list[Culprit]:
        """Return the contributions that fail a merge when tried alone.

        A failure of disk or network, or a stop, is no contribution's fault.
        """
        culprits = []
        for row in job.rows:
            try:
                await self._try_alone(job.recipe.alone(row))
            except StorageFull:
                raise
            except DamagedBlob as error:
                if error.sha256 == row.sha256:
                    culprits.append(Culprit(row, error))
            except (OSError, Unavailable) as error:
                log.warning("merge not blamed on anybody", run=job.run.name, error=str(error))
            except (VolunteerError, ValueError) as error:
                culprits.append(Culprit(row, error))
        return culprits

    async def _try_alone(self, recipe: MergeRecipe) -> None:
        """Merge one contribution into temporary files. Raises the errors of a merge."""
        path = self._blobs.scratch() / f"merge-{secrets.token_hex(8)}"
        try:
            await self._at_once(recipe, path)
            if recipe.about.file.evaluation.gate:
                await self._gate(recipe.run, path)
        finally:
            delete_file(path, "scratch")
            delete_file(_state_of(path), "scratch")


def _state_of(weights: Path) -> Path:
    """Return the path at which the server-optimiser state is made."""
    return weights.with_name(f"{weights.name}-state")


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
