"""The lease message: a task together with the constant fields of its run."""

from __future__ import annotations

from collections.abc import Container, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec

from coordinator.database import datasets, runs
from coordinator.database.tasks import BESIDE, GAMES, TaskRow
from coordinator.plan.plan import plan as read_plan
from coordinator.plan.plan_tables import Plan
from coordinator.rules import run_file
from coordinator.rules.audits import AUDIT
from coordinator.rules.codec_choice import choose_codec
from coordinator.rules.run_file import RunFile
from coordinator.rules.task_size import (
    Run,
    RunPace,
    StepsAndTokens,
    episodes_bytes_max,
    home_seed,
    memory_bytes,
    parts_of,
    pass_seed,
    steps_of_task,
    task_seed,
    total_steps,
    upload_bytes_max,
)
from coordinator.runs.definition import price_of_flops
from shared.decoding import convert, decode
from shared.protocol.leases import Grant, Lease
from shared.protocol.limits import AUDIT_BYTES
from shared.workloads.base import (
    DatasetManifest,
    Job,
    TrainSettings,
    UpdateKind,
    load,
)
from shared.workloads.data.pass_order import PassOrder
from shared.workloads.training.lr_schedule import warmup

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.database.audits import AuditLease
    from coordinator.database.claim_rows import LiveRun
    from coordinator.database.members.member_rows import MemberRow
    from coordinator.database.versions import VersionRow
    from shared.workloads.experience import Pacing

UPDATES: Mapping[str, UpdateKind] = {
    "selfplay": "experience",
    "evaluate": "evaluation",
    "learn": "delta",
}  # a "train" task is not listed, since the run's plan decides the kind of its update


DATA = "data"  # option of a task outside the pass: the manifest of its data


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a run that change only if the organiser extends it."""

    id: int
    name: str
    workload: str
    workload_version: int
    seed: int
    step_flops: float
    price_micro: int
    parameters: int
    fixed_bytes: int  # memory of a task besides the model's
    streamed_bytes: int  # memory of a device while the weights stay on the host; 0 = never
    libraries: tuple[str, ...]  # libraries that training needs besides the workload's
    counts: tuple[int, ...]  # samples of each chunk
    sample_size: int
    dataset: str
    file: RunFile
    plan: Plan
    options: str  # options of the workload, as JSON
    pacing: Pacing | None = None  # pace of a run that makes its own data

    @property
    def kind(self) -> str:
        """Return the kind of the tasks of a pass."""
        return "train" if self.pacing is None else "selfplay"

    @property
    def at_members(self) -> bool:
        return self.file.data.at == "members"

    @property
    def batch_size(self) -> int:
        """Return the batch size of a pass's tasks: samples in a step, or 1 for games."""
        return self.file.task.batch_size if self.pacing is None else 1

    def total_steps(self, progress: StepsAndTokens) -> int:
        """Return the expected total of global steps, extrapolated from `progress`; 0 = unknown."""
        return total_steps(self.file, self.plan, sum(self.counts), self.sample_size, progress)


class JobBase(msgspec.Struct, frozen=True, kw_only=True):
    """Part that all jobs from one version of a run have in common."""

    spec: Spec
    plan: Plan
    train: TrainSettings
    global_step: int
    total_steps: int

    @classmethod
    def at(cls, spec: Spec, base: VersionRow) -> JobBase:
        """Return the common part of the jobs from a version."""
        progress = StepsAndTokens(base.global_step, base.tokens)
        return cls.of(spec, spec.plan, progress)

    @classmethod
    def of(cls, spec: Spec, plan: Plan, progress: StepsAndTokens) -> JobBase:
        """Return the common part of the jobs at this progress, under the plan in force."""
        whole = spec.total_steps(progress)
        train = spec.file.train
        train = msgspec.structs.replace(
            train,
            warmup_steps=warmup(train, train.decay_steps or whole),
            prox_mu=plan.prox_mu or train.prox_mu,
        )
        return cls(
            spec=spec,
            plan=plan,
            train=train,
            global_step=progress.global_step,
            total_steps=whole,
        )


def read_spec(conn: Connection, run_id: int) -> Spec:
    """Return the part of a run that changes only if it is extended. Raises InvalidRunFile
    for a file that cannot be read, NotFound for a workload that is not installed here.
    """
    row = runs.by_id(conn, run_id)
    file = run_file.decode(row.file)
    dataset = datasets.by_id(conn, row.dataset_id).name if row.dataset_id is not None else ""
    workload = load(file.workload)
    return Spec(
        id=row.id,
        name=row.name,
        workload=row.workload,
        workload_version=row.workload_version,
        seed=row.seed,
        step_flops=row.step_flops,
        price_micro=row.price_micro,
        parameters=row.parameters,
        sample_size=row.sample_size,
        fixed_bytes=workload.fixed_bytes(file.model),
        streamed_bytes=workload.streamed_bytes(file.model),
        libraries=tuple(workload.libraries(file.model)),
        counts=decode(row.samples_per_chunk, tuple[int, ...]),
        dataset=dataset,
        file=file,
        plan=read_plan(file.plan),
        options=msgspec.json.encode(file.task.options).decode(),
        pacing=workload.experience.plan(file.model, file.task.options)
        if workload.experience
        else None,
    )


def offer(spec: Spec, line: LiveRun, pace: RunPace | None, now: float, lately: float = 0.0) -> Run:
    """Return a run in the form that dispatching reads."""
    plan, pacing = spec.plan, spec.pacing
    run = Run(
        id=spec.id,
        name=spec.name,
        workload=spec.workload,
        kind=spec.kind,
        weight=line.weight,
        step_flops=spec.step_flops,
        price_micro=spec.price_micro,
        seed=spec.seed,
        pass_no=line.pass_no,
        cursor=line.cursor,
        samples_total=line.samples_total,
        workload_version=spec.workload_version,
        libraries=spec.libraries,
        codec=plan.codec,
        memory_bytes=memory_bytes(spec.parameters, spec.fixed_bytes),
        streamed_bytes=spec.streamed_bytes,
        settings=spec.file.task,
        local_steps=steps_of_task(spec.file, plan, spec.parameters, pace),
        steps_provable=line.steps_provable,
        passes=spec.file.stop.passes,
        pace=pace,
        lately=lately,
        left_s=pace.round.merge_at - now if pace and pace.round else None,
    )
    if pacing is None:
        return run
    # The pass of such a run is an endless sequence of episodes, paced by the learners; each episode
    # is a step.
    settings = msgspec.structs.replace(spec.file.task, batch_size=1, min_steps=1)
    return msgspec.structs.replace(
        run,
        settings=settings,
        local_steps=pacing.episodes,
        passes=0,
        step_flops=pacing.episode_flops,
        price_micro=price_of_flops(spec.price_micro, spec.step_flops, pacing.episode_flops),
        beside=BESIDE,
        endless=True,
        short_of=f'"{spec.name}" has {pacing.unit}s enough: a learner has to use them first',
    )


def at_homes(
    run: Run,
    accounts: Mapping[str, str],
    rows: Mapping[tuple[int, str], MemberRow],
    waiting: Container[str],
) -> list[Run]:
    """Return a run on members' data once for each worker in `accounts`, which names its account,
    with the pass of the worker's own data. The run has no samples for a worker that keeps no data.
    `waiting` are the accounts with an update that waits for the next merge.
    """
    offers = []
    for worker, account in sorted(accounts.items()):
        row = rows.get((run.id, worker))
        pass_no, cursor, samples = (
            (0, 0, 0) if row is None else (row.pass_no, row.cursor, row.samples)
        )
        offers.append(
            msgspec.structs.replace(
                run,
                home=worker,
                seed=home_seed(run.seed, worker),
                pass_no=pass_no,
                cursor=cursor,
                samples_total=samples,
                waits=run.lacks > 0 and account in waiting,
            )
        )
    return offers


@lru_cache(maxsize=64)
def order_of(counts: tuple[int, ...], seed: int) -> PassOrder:
    """Return the order of a pass, cached because building it walks over every chunk."""
    return PassOrder(counts, seed)


def lease(
    base: JobBase,
    task: TaskRow,
    now: float,
    codecs: frozenset[str] = frozenset(),
) -> Lease:
    """Return the message for a leased task. `codecs` are the worker's (empty = all)."""
    spec, plan = base.spec, base.plan
    granted = upload_bytes_max(spec.parameters)
    if task.kind in GAMES:
        granted = episodes_bytes_max(task.stop - task.start)
    data, work = own_data(task), job(base, task)
    return Lease(
        task=task.id,
        attempt=task.attempt,
        run=spec.name,
        job=work,
        dataset=spec.dataset,
        chunks=_chunks(spec, task, work.order_seed, data),
        renew_by=task.renew_by or now,
        finish_by=task.finish_by or now,
        in_step=not plan.overlap,
        grant=Grant(
            codec=choose_codec(plan.codec, codecs) or plan.codec,
            bytes_max=granted,
            parts=parts_of(task.steps, task.part_steps),
        ),
        part_steps=task.part_steps,
        pull_every=plan.pull_every if task.part_steps or plan.update == "gradient" else 0,
        redo=plan.in_flight == "redo",
        price_micro=task.price_micro,
        now=now,
        data=data,
        member=bool(task.home),
        counted=f"{spec.pacing.unit}s" if spec.pacing and task.kind in GAMES else "",
    )


def audit(lease: Lease, work: AuditLease) -> Lease:
    """Return the lease of an audit with the job to audit; the answer is sums of its result."""
    grant = msgspec.structs.replace(lease.grant, codec="float32", bytes_max=AUDIT_BYTES, parts=1)
    return msgspec.structs.replace(
        lease,
        job=work.job,
        chunks=work.chunks,
        data=work.data,
        audit=work.audit,
        grant=grant,
        in_step=False,
        redo=False,
        part_steps=0,
        pull_every=0,
    )


def job(base: JobBase, task: TaskRow) -> Job:
    """Return the job of a task: the complete input of its worker."""
    spec = base.spec
    options: dict[str, object] = decode(task.options)
    options.pop(DATA, None)
    update = UPDATES.get(task.kind) or task.update_kind or base.plan.update
    return Job(
        workload=spec.workload,
        train=base.train,
        start=task.start,
        stop=task.stop,
        seed=task.seed,
        steps=task.steps,
        batch_size=task.batch_size,
        global_step=base.global_step,
        total_steps=base.total_steps,
        run=spec.name,
        kind="train" if task.kind == AUDIT else task.kind,  # an audit gets the audited job
        update=update,
        config=spec.file.model,
        order_seed=pass_seed(home_seed(spec.seed, task.home), task.pass_no),
        base_version=0,  # set when work begins
        prompt=spec.file.evaluation.prompt,
        options=options or spec.file.task.options,
    )


def first_job(base: JobBase, steps: int) -> Job:
    """Return the job of the first task of a pass, of so many steps, as far as its samples reach."""
    spec = base.spec
    samples = min(sum(spec.counts), steps * spec.batch_size)
    return Job(
        workload=spec.workload,
        train=base.train,
        start=0,
        stop=samples,
        seed=task_seed(spec.seed, 0, 0),
        steps=max(1, -(-samples // spec.batch_size)),
        batch_size=spec.batch_size,
        global_step=base.global_step,
        total_steps=base.total_steps,
        run=spec.name,
        kind="train",
        update=base.plan.update,
        config=spec.file.model,
        order_seed=pass_seed(spec.seed, 0),
        options=spec.file.task.options,
    )


def own_data(task: TaskRow) -> DatasetManifest | None:
    """Return the data of a task outside the pass (games, an opponent); None for other tasks."""
    data = decode(task.options).get(DATA)
    return None if data is None else convert(data, DatasetManifest)


def _chunks(
    spec: Spec, task: TaskRow, seed: int, own_manifest: DatasetManifest | None
) -> tuple[int, ...]:
    """Return the chunks of the data that a task reads; () if its machine keeps the data."""
    if task.home:
        return ()
    if own_manifest is not None:
        return tuple(range(len(own_manifest.chunks)))
    return order_of(spec.counts, seed).reach(task.start, task.stop) if spec.counts else ()
