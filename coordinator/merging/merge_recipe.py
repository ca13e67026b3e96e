"""Recipe of a merge, stored and independent of time, so that every replica computes the
same bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from coordinator.aggregation import merge_step
from coordinator.aggregation.aggregate import aggregator
from coordinator.aggregation.private_mean import NoiseTerms
from coordinator.aggregation.robust import Aggregator
from coordinator.aggregation.server_optimizer import Push
from coordinator.aggregation.shards import Shard, split
from coordinator.database import contributions, merge_jobs, runs, versions
from coordinator.database.contributions import ContributionRow
from coordinator.database.merges import MergeRow
from coordinator.database.runs import RunRow
from coordinator.database.versions import VersionRow
from coordinator.plan.merge_weights import Term, weigh
from coordinator.plan.plan_tables import Plan
from coordinator.rules.merge_shares import MIXED_MAX, MemberVoice, Voice, member_shares, shares
from coordinator.rules.task_size import steps_of_update
from coordinator.runs.definition import Definition, definition
from coordinator.runs.version_files import TrainingProgress
from shared.decoding import decode

if TYPE_CHECKING:
    from pathlib import Path

    from sqlalchemy import Connection

    from coordinator.merging.shard_files import ShardFiles
    from coordinator.storage.blobs import BlobStore


class MergeTerms(msgspec.Struct, frozen=True, kw_only=True):
    """Terms fixed when a merge begins, besides its base and contributions."""

    workers: int = 1  # live workers
    shards: int = 1
    shard_by: Literal["size", "name"] = "size"
    cooling: float = 1.0  # factor on the outer rate, lower towards the end of the run
    rate: float = 0.0  # learning rate by the schedule of `[train]`
    noise_key: str = ""  # secret seed of the noise, erased when the version is published
    # samples of the data that each worker keeps, in a run whose members keep the data
    samples: dict[str, int] = {}


class MergeRecipe(msgspec.Struct, frozen=True, kw_only=True):
    """Base version, contributions in the order of the merge, and terms."""

    run: RunRow
    base: VersionRow
    rows: tuple[ContributionRow, ...]
    terms: MergeTerms
    state: tuple[str, ...]  # blobs of the base's server-optimiser state

    @property
    def about(self) -> Definition:
        return definition(self.run)

    @property
    def version(self) -> int:
        """Return the number of the version that the merge makes."""
        return self.base.version + 1

    @property
    def plan(self) -> Plan:
        """Return the plan of the run."""
        return self.about.plan

    @property
    def plan_of_step(self) -> Plan:
        """Return the plan with the rate of this step: the outer rate, reduced near the end of the
        run, or with "adamw" the rate and betas of `[train]`.
        """
        plan, train = self.plan, self.about.file.train
        if plan.optimizer == "adamw":
            more = {"beta1": train.beta1, "beta2": train.beta2, "bias_correction": True}
            return msgspec.structs.replace(plan, lr=self.terms.rate, **more)
        lr = plan.lr * (self.terms.cooling if plan.momentum else 1.0)
        return msgspec.structs.replace(plan, lr=lr)

    @property
    def clip_norm(self) -> float:
        """Return the largest norm of the merged gradient; 0 = no limit, as for deltas."""
        return self.about.file.train.clip_norm if self.plan.optimizer == "adamw" else 0.0

    @property
    def mixes_enough(self) -> bool:
        """Return True if these contributions are of as many accounts as a version must mix."""
        return len({row.volunteer_id for row in self.rows}) >= self.about.members_min

    @property
    def progress(self) -> TrainingProgress:
        """Return the progress after the merge; global steps grow by the mean of the local steps."""
        steps = max(1, round(sum(row.steps for row in self.rows) / len(self.rows)))
        samples = sum(row.samples for row in self.rows)
        return TrainingProgress(
            version=self.version,
            global_step=self.base.global_step + steps,
            tokens=self.base.tokens + samples * self.run.sample_size,
        )

    @property
    def shards(self) -> tuple[Shard, ...]:
        """Return the model in shards; some may be empty. Raises InvalidPlan for too many shards."""
        return split(self.about.schema, self.terms.shards, self.terms.shard_by)

    def alone(self, row: ContributionRow) -> MergeRecipe:
        """Return the recipe with one contribution only."""
        return msgspec.structs.replace(self, rows=(row,))

    def metadata(self, **more: str) -> dict[str, str]:
        """Return the metadata written into the version's files."""
        return {"run": self.run.name, "version": str(self.version)} | more

    @property
    def weights(self) -> list[float]:
        """Return the weights of the contributions, within the limits of `rules/merge_shares`:
        their work times their weight by staleness, or by the samples of members.
        """
        update = self.plan.update
        if self.about.at_members:
            share_max = MIXED_MAX if self.about.members_min > 1 else 1.0
            voices = self._member_voices(update)
            return member_shares(voices, self.about.file.data.cap, share_max)
        return shares(
            [
                Voice(
                    weight=(row.weight or 0.0) * _work(row, update),
                    volunteer=row.volunteer_id,
                    network=row.network,
                    vetted=row.vetted,
                )
                for row in self.rows
            ]
        )

    @property
    def noise(self) -> NoiseTerms | None:
        """Return the terms of the noise in a run with `[privacy]`: each member counts as one of
        `quorum` members, however many take part.
        """
        privacy = self.about.file.privacy
        if not privacy.on:
            return None
        updates = Counter(row.volunteer_id for row in self.rows)
        divisor = self.plan.quorum
        return NoiseTerms(
            clip=privacy.clip,
            sigma=privacy.noise * privacy.clip / divisor,
            portions=tuple(
                min(1.0, row.weight or 0.0) / (divisor * updates[row.volunteer_id])
                for row in self.rows
            ),
            key=bytes.fromhex(self.terms.noise_key),
        )

    @property
    def rule(self) -> Aggregator:
        """Return the aggregation rule of the merge."""
        return aggregator(self.plan, len(self.rows), self.clip_norm, self.noise)

    def _member_voices(self, update: str) -> list[MemberVoice]:
        return [
            MemberVoice(
                member=row.volunteer_id,
                machine=row.worker_id,
                samples=self.terms.samples.get(row.worker_id, row.samples),
                work=_work(row, update),
                staleness=row.weight or 0.0,
            )
            for row in self.rows
        ]

    async def order(
        self, blobs: BlobStore | ShardFiles, threads: int, part: str = ""
    ) -> merge_step.MergeOrder:
        """Return the merge order with its files; `part` goes into the metadata of a shard's files.
        Raises MissingBlob.
        """
        return await self.order_on(
            blobs,
            base=await blobs.local(self.base.master_sha256),
            state=await blobs.local_files(self.state),
            threads=threads,
            part=part,
        )

    async def order_on(
        self,
        blobs: BlobStore | ShardFiles,
        *,
        base: Path,
        state: Sequence[Path],
        threads: int,
        part: str = "",
    ) -> merge_step.MergeOrder:
        """Return the merge order with these files as base and state. Raises MissingBlob."""
        plan, train = self.plan, self.about.file.train
        paths = await blobs.local_files([row.sha256 for row in self.rows])
        inputs = [
            merge_step.Input(
                path=path,
                codec=row.codec,
                weight=weight,
                clip=row.clip,
                steps=row.steps,
            )
            for row, weight, path in zip(self.rows, self.weights, paths, strict=True)
        ]
        return merge_step.MergeOrder(
            plan=self.plan_of_step,
            schema=self.about.schema,
            base=base,
            state=tuple(state),
            inputs=tuple(inputs),
            push=self._push(plan),
            decay=train.weight_decay if plan.optimizer == "adamw" else 0.0,
            clip_norm=self.clip_norm,
            noise=self.noise,
            threads=threads,
            metadata=self.metadata(part=part) if part else self.metadata(),
        )

    def _push(self, plan: Plan) -> Push:
        """Return the scalars of this merge's step, which is shorter for stale updates and if few
        workers contributed. A step with `[privacy]` is never shortened, since the size of its noise
        would then show who took part.
        """
        if self.about.file.privacy.on:
            return Push()
        terms = [
            Term(
                work=_work(row, plan.update),
                gap=min(self.base.version - row.base_version, plan.max_staleness),
            )
            for row in self.rows
        ]
        weighing = weigh(plan, terms, self.terms.workers)
        file = self.about.file
        whole = steps_of_update(plan, file.steps)
        whole *= file.task.batch_size if plan.update == "gradient" else 1
        return Push(
            scale=weighing.scale,
            work=weighing.work / whole,
            workers=self.terms.workers,
        )


def read(conn: Connection, merge: MergeRow) -> MergeRecipe:
    """Return the recipe of a running merge."""
    return of_contributions(
        conn,
        run=runs.by_id(conn, merge.run_id),
        base=versions.get(conn, merge.run_id, merge.base),
        rows=contributions.by_ids(conn, decode(merge.contributions, list[int])),
        terms=decode(merge.terms, MergeTerms),
    )


def of_contributions(
    conn: Connection,
    *,
    run: RunRow,
    base: VersionRow,
    rows: Sequence[ContributionRow],
    terms: MergeTerms,
) -> MergeRecipe:
    """Return the recipe that merges these contributions into a version."""
    return MergeRecipe(
        run=run,
        base=base,
        rows=tuple(rows),
        terms=terms,
        state=merge_jobs.state_files(conn, base.state_sha256),
    )


def _work(row: ContributionRow, update: str) -> float:
    """Return a contribution's work: the samples of a gradient, or the steps of a delta."""
    return float(row.samples if update == "gradient" else row.steps)
