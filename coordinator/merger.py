"""Merging: turning accepted contributions into the next version, each merge a leased and fenced job.

    due? ── lease: base head, contributions ──> files, in a thread ──> one transaction: version + head + merged + credits
                                           └──> failed twice: tried singly, the culprit is set aside

Whatever fails before the transaction leaves no trace but two scratch files.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import structlog

from coordinator import publishing
from coordinator.definition import definition
from coordinator.merge import step
from coordinator.merge.optimizer import Push
from coordinator.merge.plan import Plan, Term, phase_of, weigh
from coordinator.signals import Signals
from coordinator.store import contributions, datasets, ledger, runs, tasks, versions
from coordinator.store.contributions import ContributionRow
from coordinator.store.runs import RunRow
from coordinator.store.versions import MergeRow, VersionRow
from coordinator.versions import Content, Progress
from shared.clock import Clock
from shared.errors import Conflict, InvalidFrame, StorageFull, Unavailable, VolunteerError
from shared.protocol import Reason

if TYPE_CHECKING:
    from pathlib import Path

    from sqlalchemy import Connection

    from coordinator.blobs import BlobStore
    from coordinator.evaluation import Evaluation
    from coordinator.runs import Runs
    from coordinator.store.database import Database

LEASE_S = 15.0  # default; a merge whose owner is silent for longer may be taken over
POLL_S = 1.0  # deadlines are looked at this often when nothing else wakes the merger
FAILURES_MAX = 2  # then contributions are tried singly
GATE_RATIO = 1.5  # a gated merge may not be worse than this many times the last measured loss
BATCH_MAX = 1024  # contributions of one merge

log = structlog.get_logger("merger")


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A leased merge and what it needs."""

    merge: MergeRow
    run: RunRow
    base: VersionRow
    rows: tuple[ContributionRow, ...]
    workers: int


class Merger:
    """Watches the runs and merges what is due."""

    def __init__(
        self,
        db: Database,
        clock: Clock,
        signals: Signals,
        blobs: BlobStore,
        runs_service: Runs,
        evaluation: Evaluation,
    ) -> None:
        self._db = db
        self._clock = clock
        self._signals = signals
        self._blobs = blobs
        self._runs = runs_service
        self._evaluation = evaluation
        # One merge at a time in this process; `merge_threads` work within it.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="merge")
        self._owner = secrets.token_hex(8)
        self.merge_threads = 1
        self.lease_s = LEASE_S

    async def run(self, stop: asyncio.Event) -> None:
        """Merge whatever is due until `stop` is set."""
        if self._db.dialect == "sqlite":  # there is one server: a lease is of a dead one
            await self._db.write(lambda conn: versions.abandon_merges(conn, self._clock.now()))
        watch = self._signals.watch("contributions", "queue")
        while not stop.is_set():
            merged = False
            for run in await self._db.read(lambda conn: runs.every(conn, ("running",))):
                if stop.is_set():
                    return
                merged |= await self.merge_if_due(run.id)
            if not merged:
                await watch.wait(POLL_S)

    async def merge_if_due(self, run_id: int) -> bool:
        """Merge once if the plan says so. True when a version was made."""
        if not await self._db.read(lambda conn: self._is_due(conn, run_id)):
            return False
        job = await self._db.write(lambda conn: self._lease(conn, run_id))
        if job is None:
            return False
        renewing = asyncio.ensure_future(self._renew(job))
        try:
            return await self._merge(job)
        finally:
            renewing.cancel()

    async def _renew(self, job: Job) -> None:
        """Keep the lease while the merge is under way; a lost one shows at the commit."""
        while True:
            await self._clock.sleep(self.lease_s / 3)
            until = self._clock.now() + self.lease_s
            try:
                await self._db.write(partial(versions.renew_merge, merge=job.merge, until=until))
            except VolunteerError as error:
                log.warning("merge lease not renewed", run=job.run.name, error=error.message)

    async def _merge(self, job: Job) -> bool:
        started = self._clock.monotonic()
        try:
            content, norm = await self._build(job, job.rows)
        except StorageFull:
            await self._abandon(job)
            raise
        except (VolunteerError, ValueError, OSError) as error:
            await self._failed(job, error)
            return False
        took = self._clock.monotonic() - started
        try:
            await self._db.write(lambda conn: self._commit(conn, job, content, norm, took))
        except Conflict as error:
            log.info("merge overtaken", run=job.run.name, error=error.message)
            await self._abandon(job)
            return False
        log.info(
            "merged",
            run=job.run.name,
            version=job.run.head + 1,
            contributions=len(job.rows),
            seconds=round(took, 3),
        )
        for topic in (f"run:{job.run.id}", "versions", "queue"):
            self._signals.notify(topic)
        return True

    async def _abandon(self, job: Job) -> None:
        now = self._clock.now()
        await self._db.write(
            partial(versions.end_merge, merge=job.merge, state="abandoned", now=now)
        )

    def _is_due(self, conn: Connection, run_id: int) -> bool:
        run = runs.by_id(conn, run_id)
        return run.state == "running" and self._runs.readiness(conn, run)[0].now

    def _lease(self, conn: Connection, run_id: int) -> Job | None:
        """The trigger again, now under the lock of the run, and the lease."""
        run = runs.by_id(conn, run_id, lock=True)
        state, live = self._runs.readiness(conn, run)
        if run.state != "running" or not state.now:
            return None
        rows = contributions.mergeable(conn, run_id, BATCH_MAX)
        rows = [row for row in rows if row.weight]
        if not rows:
            return None
        ids = msgspec.json.encode([row.id for row in rows]).decode()
        bid = versions.Bid(
            run_id=run_id,
            base=run.head,
            contributions=ids,
            owner=self._owner,
            lease_until=self._clock.now() + self.lease_s,
        )
        merge = versions.take_merge(conn, bid, self._clock.now())
        if merge is None:
            return None
        base = versions.get(conn, run_id, run.head)
        return Job(merge=merge, run=run, base=base, rows=tuple(rows), workers=max(1, live))

    async def _build(self, job: Job, rows: Sequence[ContributionRow]) -> tuple[Content, float]:
        """Aggregate, step and write; the files end up in the blob store, where nothing refers to them yet."""
        about = definition(job.run)
        plan = phase_of(about.plan, version=job.run.head, tokens=job.run.tokens, slope=None)
        inputs = [
            step.Input(
                path=await self._blobs.local(row.sha256),
                codec=row.codec,
                weight=(row.weight or 0.0) * _work(row, plan.update),
                clip=row.clip,
            )
            for row in rows
        ]
        state = [await self._blobs.local(sha) for sha in (job.base.state_sha256,) if sha]
        order = step.Order(
            plan=plan,
            schema=about.schema,
            base=await self._blobs.local(job.base.master_sha256),
            state=tuple(state),
            inputs=tuple(inputs),
            push=_push(plan, job, rows, about.file.task.local_steps),
            threads=self.merge_threads,
            metadata={"run": job.run.name, "version": str(job.run.head + 1)},
        )
        weights_path = self._blobs.scratch() / f"merge-{secrets.token_hex(8)}"
        state_path = weights_path.with_name(f"{weights_path.name}-state")
        try:
            run = partial(asyncio.get_running_loop().run_in_executor, self._thread)
            outcome = await run(step.run, order, weights_path, state_path)
            publication = publishing.Publication(
                plan=about.plan,
                schema=about.schema,
                version=job.run.head + 1,
                master=weights_path,
                written=outcome.weights,
                base=await publishing.base_of(self._blobs, job.base),
            )
            prepared = await run(publishing.prepare, publication)
            if about.file.evaluation.gate:
                await self._gate(job.run, prepared.published)
            content = await prepared.store(self._blobs)
            if outcome.state is not None:
                await self._blobs.put_file(outcome.state.sha256, state_path)
        finally:
            publishing.discard(weights_path)
            state_path.unlink(missing_ok=True)
        return publishing.with_state(content, outcome.state), outcome.update_norm

    async def _gate(self, run: RunRow, weights: Path) -> None:
        """`gate = true`: measure before anything is published. Raises InvalidFrame when the model got much worse."""
        before = await self._db.read(lambda conn: versions.newest_loss(conn, run.id))
        measured = await self._evaluation.measure(run, weights, sample=False)
        if measured is None:
            raise Unavailable("the server is stopping")
        loss = measured.metrics.get("loss", math.nan)
        if not math.isfinite(loss) or (before is not None and loss > GATE_RATIO * before):
            raise InvalidFrame(
                f"the merged model has loss {loss:.3f} where {before or 0:.3f} was measured before"
            )

    def _commit(
        self, conn: Connection, job: Job, content: Content, norm: float, took: float
    ) -> None:
        """Version, head, contributions, credits: all of it or nothing. Raises Conflict when somebody else was faster."""
        now = self._clock.now()
        if not versions.end_merge(conn, job.merge, "committed", now):
            raise Conflict("the merge was taken over")
        run = runs.by_id(conn, job.run.id, lock=True)
        progress = _progress(run, job.rows)
        moved = run.state == "running" and runs.set_head(
            conn,
            run.id,
            job.run.head,
            global_step=progress.global_step,
            tokens=progress.tokens,
            last_merge_at=now,
        )
        if not moved or not contributions.merge_all(conn, job.rows, progress.version, now):
            raise Conflict("the head has moved, or a contribution was decided elsewhere")
        signed = self._runs.sign(conn, run, content, progress, now)
        datasets.register(conn, content.blobs(), now)
        every = definition(run).file.evaluation.every
        versions.add(
            conn,
            {
                "run_id": run.id,
                "version": progress.version,
                "kind": "merge",
                "parent": job.run.head,
                "master_sha256": content.master_sha256,
                "published_sha256": content.published_sha256,
                "size": content.size,
                "state_sha256": content.state_sha256,
                "manifest": signed.payload,
                "signature": signed.signature,
                "contributions": job.merge.contributions,
                "global_step": progress.global_step,
                "tokens": progress.tokens,
                "update_norm": norm,
                "merge_s": took,
                "created_at": now,
            },
            evaluate=every > 0 and progress.version % every == 0,
            ways=[way.sha256 for way in content.ways],
        )
        ledger.post_earned_many(conn, [ledger.Payment.of(row) for row in job.rows], now)
        _overtake(conn, run, progress, now)

    async def _failed(self, job: Job, error: Exception) -> None:
        """Count the failure; after the second, find out who is to blame and go on without them."""
        failures = job.merge.failures + 1
        log.warning(
            "merge failed",
            run=job.run.name,
            version=job.run.head + 1,
            failures=failures,
            error=str(error),
        )
        culprits = await self._culprits(job) if failures >= FAILURES_MAX else []

        def note(conn: Connection) -> None:
            now = self._clock.now()
            versions.end_merge(
                conn, job.merge, "failed", now, failures=failures, message=str(error)[:2000]
            )
            for row, why in culprits:
                self._set_aside(conn, job.run, row, why, now)

        await self._db.write(note)
        self._signals.notify("queue")

    async def _culprits(self, job: Job) -> list[tuple[ContributionRow, str]]:
        """Whose content it is. What disk, network or a stop did is no contribution's fault."""
        found = []
        for row in job.rows:
            try:
                await self._build(job, [row])
            except StorageFull:
                raise
            except (OSError, Unavailable) as error:
                log.warning("merge not blamed on anybody", run=job.run.name, error=str(error))
            except (VolunteerError, ValueError) as error:
                found.append((row, str(error)))
        return found

    def _set_aside(
        self, conn: Connection, run: RunRow, row: ContributionRow, why: str, now: float
    ) -> None:
        """The work goes to somebody else; the pending credit goes back."""
        message = f"set aside: the merge failed with it ({why})"[:500]
        contributions.decide(
            conn, row, "rejected", now=now, reason=Reason.MERGE_FAILED.value, message=message
        )
        ledger.post_void(
            conn,
            volunteer_id=row.volunteer_id,
            contribution_id=row.id,
            run_id=row.run_id,
            amount_micro=row.price_micro,
            now=now,
        )
        tasks.put_back(
            conn,
            row.task_id,
            worker_id=row.worker_id,
            kind="failure",
            message=message,
            now=now,
            settings=definition(run).file.task,
        )


def _overtake(conn: Connection, run: RunRow, progress: Progress, now: float) -> None:
    """What the new version leaves behind: updates that no later merge can use are paid all the same.

    Where the plan cancels, whoever still works on an older version is told to stop.
    """
    head, whole = progress.version, definition(run).plan
    plan = phase_of(whole, version=head, tokens=progress.tokens, slope=None)
    if plan.in_flight == "cancel":
        tasks.overtake(conn, run.id, head=head)
    late = contributions.left_behind(conn, run.id, head - plan.max_staleness, plan.update)
    message = f"version {head} was merged without it; the work is paid"
    for row in late:
        contributions.decide(conn, row, "superseded", now=now, message=message)
    ledger.post_earned_many(conn, [ledger.Payment.of(row) for row in late], now)


def _work(row: ContributionRow, update: str) -> float:
    """What a contribution weighs before staleness and trust: its samples or its steps, both fixed by the task."""
    return float(row.samples if update == "gradient" else row.steps)


def _push(plan: Plan, job: Job, rows: Sequence[ContributionRow], local_steps: int) -> Push:
    """How far this merge may step: staleness and few arrivals shorten it where the plan says so."""
    gaps = [min(job.run.head - row.base_version, plan.max_staleness) for row in rows]
    terms = [
        Term(work=_work(row, plan.update), gap=gap) for row, gap in zip(rows, gaps, strict=True)
    ]
    weighing = weigh(plan, terms, job.workers)
    whole = 1 if plan.update == "gradient" else local_steps
    return Push(scale=weighing.scale, work=weighing.work / whole, workers=job.workers)


def _progress(run: RunRow, rows: Sequence[ContributionRow]) -> Progress:
    """Global steps go on by the mean of the local ones: they ran side by side."""
    steps = max(1, round(sum(row.steps for row in rows) / len(rows)))
    tokens = sum(row.samples for row in rows) * run.sample_size
    return Progress(
        version=run.head + 1, global_step=run.global_step + steps, tokens=run.tokens + tokens
    )
