"""The job, base and data of a contribution to recompute, as its worker had them; draws."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from coordinator.database import datasets, recomputes, tasks, versions
from coordinator.database import volunteers as accounts
from coordinator.database.contributions import ContributionRow
from coordinator.database.recomputes import StoredCase
from coordinator.database.runs import RunRow
from coordinator.database.versions import VersionRow
from coordinator.rules import draws as rules
from coordinator.rules.task_size import StepsAndTokens
from coordinator.runs.definition import definition
from coordinator.scheduling import lease_message
from coordinator.scheduling.lease_message import own_data
from shared.decoding import decode
from shared.errors import NotFound
from shared.workloads.base import ChunkRef, DatasetManifest, seed_from
from shared.workloads.data.local_data import LocalData

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from shared.proofs.signing import SigningKey


BEGINNING = StepsAndTokens(0, 0)


class BlobSource(Protocol):
    """Source of blobs as files: a blob store, or the downloads of a checker."""

    async def local(self, sha256: str) -> Path:
        """Return the file of a blob. Raises Unavailable if a store does not have it."""


class Case(StoredCase, frozen=True, kw_only=True):
    """Update to check, and the inputs of its recompute."""

    run: RunRow
    manifest: DatasetManifest  # the run's data, or the task's `window`

    @classmethod
    def of(cls, conn: Connection, row: ContributionRow, run: RunRow) -> Case | None:
        """Return the case of a contribution without a verdict; None if it cannot be redone."""
        if row.kind not in ("delta", "gradient") or definition(run).at_members:
            return None
        task = tasks.holder(conn, row.task_id, for_update=False)
        window = own_data(task) if task.kind == "learn" else None
        manifest = window or _dataset(conn, run)
        if manifest is None:
            return None
        spec = lease_message.read_spec(conn, run.id)
        base = versions.get(conn, run.id, row.base_version)
        if task.kind not in ("train", "learn"):
            return None
        # earlier parts have tasks of their own by now, so `task.start` is the start of this part
        part = msgspec.structs.replace(
            task,
            stop=task.start + row.samples,
            steps=row.steps,
            seed=seed_from(task.seed, row.part * task.part_steps),
        )
        job = lease_message.job(lease_message.JobBase.at(spec, base), part)
        chunks = tuple(range(len(manifest.chunks)))
        if window is None:
            order = lease_message.order_of(spec.counts, job.order_seed)
            chunks = order.reach(part.start, part.stop)
        return cls(
            run=run,
            job=job,
            base_sha256=base.published_sha256,
            chunks=chunks,
            device=task.device,
            model=accounts.model_of(conn, row.worker_id, task.device),
            window=window,
            manifest=manifest,
        )

    @classmethod
    def typical(cls, conn: Connection, run: RunRow, steps: int) -> Case | None:
        """Return a task of so many steps of a run's newest version: over the first samples of a
        pass, or over the games of the newest drawn task; None if there is no such task yet.
        """
        base = versions.get(conn, run.id, run.head)
        if lease_message.read_spec(conn, run.id).pacing is not None:
            return cls._learner(conn, run, base, steps)
        progress = StepsAndTokens(base.global_step, base.tokens)
        return cls.first(conn, run, base.published_sha256, steps, progress)

    @classmethod
    def first(
        cls,
        conn: Connection,
        run: RunRow,
        base_sha256: str,
        steps: int,
        progress: StepsAndTokens = BEGINNING,
    ) -> Case | None:
        """Return a task of so many steps over the first samples of a pass; None for a run that
        makes its own data, or whose members keep it.
        """
        spec, manifest = lease_message.read_spec(conn, run.id), _dataset(conn, run)
        if spec.pacing is not None or manifest is None or not spec.counts or spec.at_members:
            return None
        base = lease_message.JobBase.of(spec, spec.plan, progress)
        job = lease_message.first_job(base, steps)
        return cls(
            run=run,
            job=job,
            base_sha256=base_sha256,
            chunks=lease_message.order_of(spec.counts, job.order_seed).reach(job.start, job.stop),
            manifest=manifest,
        )

    @classmethod
    def _learner(cls, conn: Connection, run: RunRow, base: VersionRow, steps: int) -> Case | None:
        text = recomputes.newest_work(conn, run.id)
        if text is None:
            return None
        case = cls.from_stored(conn, text, run)
        stop = case.job.start + steps * case.job.batch_size
        job = msgspec.structs.replace(case.job, steps=steps, stop=stop)
        return msgspec.structs.replace(case, job=job, base_sha256=base.published_sha256)

    @classmethod
    def from_stored(cls, conn: Connection, text: str, run: RunRow) -> Case:
        """Return the case from its stored form. Raises NotFound for a run without a dataset."""
        work = decode(text, StoredCase)
        manifest = work.window or _dataset(conn, run)
        if manifest is None:
            raise NotFound("the run has no dataset (any more)")
        return cls(run=run, manifest=manifest, **msgspec.structs.asdict(work))

    def stored(self) -> str:
        """Return the stored form that `from_stored` reads."""
        work = {name: getattr(self, name) for name in StoredCase.__struct_fields__}
        return msgspec.json.encode(work).decode()

    @property
    def flops(self) -> float:
        """Return the operations of the whole task, forward and backward."""
        about = definition(self.run)
        return about.workload.flops_per_sample(about.file.model) * (self.job.stop - self.job.start)

    @property
    def files(self) -> Mapping[str, ChunkRef]:
        """Return the files that every version of the run needs besides its tensors."""
        about = definition(self.run)
        return about.workload.files(about.file.model)

    def comparable(self, on: rules.ComputeDevice) -> bool:
        """Return True if a different result of a recompute on this device proves anything. The
        worker's device is taken from its registration, not from its report.
        """
        worker = rules.ComputeDevice(kind=rules.device_kind(self.device), model=self.model)
        return rules.comparable(worker, on)

    async def data(self, blobs: BlobSource) -> LocalData:
        """Return the chunks and other files of the task. Raises the errors of `blobs`."""
        manifest, more = self.manifest, self.files
        names = [manifest.chunks[index].sha256 for index in self.chunks]
        names += [asset.sha256 for asset in (*manifest.assets.values(), *more.values())]
        return LocalData(manifest, {name: await blobs.local(name) for name in names}, more)


def _dataset(conn: Connection, run: RunRow) -> DatasetManifest | None:
    """Return the dataset of the run; None without one."""
    return None if run.dataset_id is None else datasets.by_id(conn, run.dataset_id).manifest


class Draws:
    """Random draws of contributions to recompute, made with the server's secret. `usual` is the
    least probability of a draw in any run.
    """

    def __init__(self, key: SigningKey, usual: float) -> None:
        self._secret = key.secret("secret of checks")
        self._usual = usual

    def possible(self, run: RunRow) -> bool:
        """Return True if contributions of a run can be drawn; with members' data they cannot."""
        about = definition(run)
        return not about.at_members and rules.floor_of(about.file.trust, self._usual) > 0

    def drawn(self, conn: Connection, row: ContributionRow, run: RunRow) -> bool:
        """Return True if a contribution is drawn."""
        if not self.possible(run):
            return False
        account = accounts.existing(conn, row.volunteer_id)
        count = account.accepted
        mean = account.accepted_micro / count if count else float(row.price_micro)
        floor = rules.floor_of(definition(run).file.trust, self._usual)
        chance = rules.chance(account.draws, row.price_micro, mean, floor)
        return rules.drawn(self._secret, "recompute", row.id, row.digest, chance)

    def confirmed(self, row: ContributionRow, chance: float) -> bool:
        """Return True if an answer to an audit is recomputed although it agrees."""
        return rules.drawn(self._secret, "audit", row.id, row.digest, chance)
