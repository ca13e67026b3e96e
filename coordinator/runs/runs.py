"""Runs: created from a run file, started, stopped and rolled back."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from coordinator.compute import Compute, Stop
from coordinator.database import (
    datasets,
    evaluations,
    key_values,
    passes,
    record,
    runs,
    tasks,
    versions,
)
from coordinator.database.ledger.record_tree import tree_head
from coordinator.database.runs import RunRow
from coordinator.plan import privacy
from coordinator.platform import Platform, PlatformService
from coordinator.rules import run_file, run_file_help
from coordinator.runs import publishing, settlement
from coordinator.runs.definition import (
    Definition,
    check_mixing,
    check_model,
    check_train,
    definition,
    of_file,
    step_price_micro,
    table_defaults,
    with_downlink,
)
from coordinator.runs.export import check_source, check_tokenizers, imported
from coordinator.runs.queries import RunQueries
from coordinator.runs.standstills import ThisServer
from coordinator.runs.version_files import Content, Surroundings, TrainingProgress, write_weights
from coordinator.runs.version_files import sign as sign_version
from coordinator.runs.wind_down import VERSION, kept_version
from shared.errors import BadRequest, Conflict, InvalidRunFile, NotFound
from shared.files.deletions import delete_file
from shared.protocol.accounts import RunInfo
from shared.protocol.base import RunState
from shared.protocol.versions import SignedManifest
from shared.tensors.spec import nbytes, parameters
from shared.workloads.base import ChunkRef, DatasetManifest, Workload, load
from shared.workloads.data.task_suite import KIND as SUITE

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.database.datasets import DatasetRow
    from coordinator.rules.run_file import RunFile


def make_initial(
    stop: Stop, run: RunRow, path: Path, source: Path | None, mirrored: bool
) -> publishing.PreparedVersion:
    """Write version 0 at `path`, published files next to it. Raises InvalidRunFile, StorageFull."""
    about = definition(run)
    if source is not None:
        weights = imported(source, about)
    else:
        weights = about.workload.init(about.file.model, run.seed)
    written = write_weights(path, about, weights, {"run": run.name, "version": "0"})
    order = publishing.Publication(
        plan=about.plan,
        schema=about.schema,
        version=0,
        master=path,
        written=written,
        base=None,
        mirrored=mirrored,
    )
    return publishing.prepare(order)


def _first_samples(about: Definition, counts: Sequence[int]) -> int:
    """Return the number of samples of the first pass. For a run that makes its own data, this is
    the number of games that may be made ahead of the learners; 0 if the run has a warm start.
    """
    pacing = about.pacing
    if pacing is None:
        return sum(counts)
    return 0 if pacing.warm_steps else pacing.replay.queue


def _check_samples(file: RunFile, samples: int) -> None:
    """Raise InvalidRunFile for a dataset that is smaller than a batch."""
    if samples < file.task.batch_size:
        raise InvalidRunFile(
            f'"{file.dataset}" gives {samples} samples under this [model], less than one '
            f"batch of {file.task.batch_size}: add more data, or lower batch_size"
        )


def _copy(source: Path, target: Path) -> str:
    """Copy a file; return the SHA-256 of the copy."""
    shutil.copyfile(source, target)
    with target.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_RESUME_ADVICE = {  # command for a run that is not paused, when somebody resumes it
    "draft": ": `coordinator run start {name}` begins it",
    "completed": ": `coordinator run extend {name} --versions N --yes` moves its end",
    "failed": ": `coordinator run fork NEW --from {name}` begins from its version",
}
_ADDED_BY = {"tokens": "--text", "chat-tokens": "--chat", "images": "--images"}
_START_ADVICE = {  # command for a run that is no draft, when somebody starts it
    "paused": "`coordinator run resume {name}`",
    "completed": "`coordinator run extend {name} --versions N --yes` moves its end",
    "failed": "`coordinator run fork NEW --from {name}` begins from its version",
}


def _unfit(file: RunFile, kinds: Sequence[str], kind: str) -> str:
    """Return a sentence: why a dataset of type `kind` does not fit the workload of a run file, and
    the command that makes a fitting dataset.
    """
    if not kinds:
        return f'{file.workload} makes its own data: leave out the line dataset = "{file.dataset}"'
    option = _ADDED_BY.get(kinds[0], f"--for {file.workload} --files")
    return (
        f'{file.workload} trains on {" or ".join(kinds)}; "{file.dataset}" holds {kind}: '
        f"`coordinator dataset add NAME {option} PATH` makes one"
    )


class DriftMeter(Protocol):
    """Measurement of the first task of a draft, which bounds the steps of its tasks."""

    async def first(self, run: RunRow, base_sha256: str) -> dict[str, object]:
        """Return the columns of the bound; {} if nothing can be measured yet."""


class Runs(PlatformService):
    """Creates, starts, stops and rolls back runs; `queries` reads them."""

    def __init__(self, on: Platform, compute: Compute, drifts: DriftMeter) -> None:
        super().__init__(on)
        self.server = ThisServer(closed=lambda: on.space.why, stalled_s=on.settings.alert_stalled_s)
        self.queries = RunQueries(on.db, on.clock, on.key, self.server)
        self._compute = compute
        self._drifts = drifts

    # --- the life of a run ---

    async def create(self, text: str) -> RunInfo:
        """Store a run file as a draft. Raises InvalidRunFile with the line, Conflict."""
        try:
            return await self._create(text)
        except (BadRequest, NotFound) as error:
            raise InvalidRunFile(run_file_help.explained(text, error.message)) from error

    async def _create(self, text: str) -> RunInfo:
        written = run_file.parse(text)  # the file without defaults of workload and preset
        run_file.check_stop(written.stop, self._clock.now())
        workload = load(written.workload)
        dataset = await self._dataset_of(written, workload)
        manifest = dataset.manifest if dataset else None
        file = await self._filled_in(text, workload, manifest)
        model = file.model
        await self._check_suites(file, dataset)
        if file.data.at == "members":
            await self._check_members(workload)
        # dataset of the passes; a workload that makes its own data has no passes
        data = manifest if workload.needs_dataset else None
        counts = list(await asyncio.to_thread(workload.samples, model, data)) if data else []
        task = msgspec.structs.replace(file.task, options=workload.options(file.task.options))
        plan = with_downlink(file.plan, nbytes(workload.schema(model)))
        private = await asyncio.to_thread(
            privacy.fill_in, file.privacy, file.stop.versions, file.plan
        )
        stored = run_file.encode(
            msgspec.structs.replace(file, task=task, plan=plan, privacy=private)
        )
        about = of_file(stored)  # `of_file` also checks the plan
        check_train(written.train, about.plan, learns=about.pacing is not None)
        check_mixing(about)
        check_model(about.parameters)
        if data and not about.at_members:
            _check_samples(file, sum(counts))
        await self._check_source(about, dataset)
        step_flops = workload.flops_per_sample(model) * file.task.batch_size
        files = tuple(workload.files(model).values())
        values: dict[str, Any] = {
            "name": file.name,
            "state": "draft",
            "file": stored,
            "workload": file.workload,
            "workload_version": workload.version,
            "dataset_id": dataset.id if dataset else None,
            "seed": file.seed,
            "parameters": about.parameters,
            "samples_total": _first_samples(about, counts),
            "samples_per_chunk": msgspec.json.encode(counts).decode(),
            "sample_size": workload.items_per_sample(model),
            "step_flops": step_flops,
            "price_micro": step_price_micro(file, step_flops),
            "weight": file.weight,
            "created_at": self._clock.now(),
            **runs.UNSTARTED,
        }
        await self._store_files(workload, model)

        def store(conn: Connection) -> RunRow:
            run_id = runs.add(conn, values)
            if dataset and files:
                datasets.serve(conn, dataset.id, files, self._clock.now(), self._blobs.serials)
            record.append(conn, "organiser", "run.create", file.name, "", self._clock.now())
            return runs.by_id(conn, run_id)

        return await self.queries.describe(await self._db.write(store))

    async def _filled_in(
        self, text: str, workload: Workload, manifest: DatasetManifest | None
    ) -> RunFile:
        """Return a run file with the defaults of workload, preset and model. Raises
        InvalidRunFile.
        """
        written = run_file.parse(text).model
        model = await asyncio.to_thread(workload.config, written, manifest)
        size = parameters(workload.schema(model))
        tables = table_defaults(
            run_file.written_tables(text), workload, size, strangers=await self._is_open()
        )
        file = run_file.parse(text, tables)
        return msgspec.structs.replace(file, model={**model, **tables.get("model", {})})

    async def _store_files(self, workload: Workload, model: Mapping[str, object]) -> None:
        """Store the files that all versions of a run need. Raises InvalidRunFile if they
        changed.
        """
        files = workload.files(model)
        for name, path in workload.sources(model).items():  # the other files belong to the dataset
            copy = self._blobs.scratch() / f"file-{secrets.token_hex(8)}"
            try:
                if await asyncio.to_thread(_copy, path, copy) != files[name].sha256:
                    raise InvalidRunFile(f"{path} changed while it was read: try again")
                await self._blobs.put_file(files[name].sha256, copy)
            finally:
                await asyncio.to_thread(delete_file, copy, "scratch")

    async def _is_open(self) -> bool:
        """Return True if the server is open, as set in this process or by the last server."""
        return (
            self._settings.open
            or await self._db.read(lambda conn: key_values.get(conn, key_values.OPEN)) == "yes"
        )

    async def _dataset_of(self, file: RunFile, workload: Workload) -> DatasetRow | None:
        """Return a run file's dataset; None if the file names no dataset and its workload needs
        none. Raises NotFound for an unknown dataset, InvalidRunFile for a dataset that is missing
        or does not fit the workload.
        """
        if not file.dataset:
            if workload.needs_dataset:
                raise InvalidRunFile(
                    f'{file.workload} needs a dataset: add a line dataset = "..." (`coordinator '
                    "dataset list`)"
                )
            return None
        dataset = await self._db.read(lambda conn: datasets.by_name(conn, file.dataset))
        if dataset.kind not in workload.dataset_kinds:
            raise InvalidRunFile(_unfit(file, workload.dataset_kinds, dataset.kind))
        return dataset

    async def _check_members(self, workload: Workload) -> None:
        """Raise InvalidRunFile where members cannot keep the data of a run."""
        if not workload.needs_dataset:
            raise InvalidRunFile(
                f'[data] at = "members": {workload.name} makes its own data, so that members have '
                "none to keep"
            )
        if await self._is_open():
            raise InvalidRunFile(
                '[data] at = "members": work over data that nobody else has cannot be done again, '
                "so that only accounts that you vouch for may do it; this server is open to "
                "strangers: serve without --open"
            )

    async def _check_suites(self, file: RunFile, dataset: DatasetRow | None) -> None:
        """Raise InvalidRunFile for a suite that cannot measure this run, NotFound for an unknown
        suite.
        """
        names = file.evaluation.suites
        if len(set(names)) < len(names):
            raise InvalidRunFile("[evaluation] suites names one of them twice")
        rows = await self._db.read(lambda conn: [datasets.by_name(conn, name) for name in names])
        for name, row in zip(names, rows, strict=True):
            if row.kind != SUITE:
                raise InvalidRunFile(
                    f'[evaluation] suites: "{name}" holds {row.kind}: a suite is added with '
                    "`coordinator dataset add NAME --suite FILE`"
                )
        if names and (dataset is None or "tokenizer" not in dataset.manifest.assets):
            raise InvalidRunFile(
                "[evaluation] suites are read by models of text, so they need a dataset with a "
                "tokenizer"
            )

    async def start(self, name: str) -> RunInfo:
        """Make version 0, bound the steps of tasks, and open the first pass. Raises NotFound,
        InvalidRunFile, Conflict.
        """
        run = await self._db.read(lambda conn: runs.by_name(conn, name))
        if run.state != "draft":
            advice = _START_ADVICE.get(run.state, "it began before").format(name=name)
            raise Conflict(f'the run "{name}" is {run.state}: {advice}')
        about = definition(run)
        run_file.check_stop(about.file.stop, self._clock.now())
        check_model(about.parameters)
        check_mixing(about)
        if about.at_members:
            await self._check_members(about.workload)
        content = await self._store_initial(run)
        bound = await self._drifts.first(run, content.published_sha256)

        def begin(conn: Connection) -> RunRow:
            now = self._clock.now()
            row = runs.by_id(conn, run.id, lock=True)
            values = {"head": 0, "started_at": now} | bound
            runs.move(conn, row, "running", runs.StateChange(at=now), **values)
            self._add_version(conn, row, content, "initial")
            passes.open_pass(conn, run.id)
            record.append(conn, "organiser", "run.start", name, "", now)
            return runs.by_id(conn, run.id)

        started = await self._db.write(begin)
        self._wake(started.id)
        return await self.queries.describe(started)

    async def _store_initial(self, run: RunRow) -> Content:
        path = self._blobs.scratch() / f"init-{secrets.token_hex(8)}"
        try:
            source = await self._source(definition(run))
            mirrored = bool(self._settings.mirrors)
            prepared = await self._compute.run(make_initial, run, path, source, mirrored)
            return await prepared.store(self._blobs)
        finally:
            publishing.discard(path)

    async def _source(self, about: Definition) -> Path | None:
        """Return the file of a run's first weights; None for random weights. Raises NotFound."""
        name = about.file.train.init_from
        match = VERSION.fullmatch(name)
        if match is None:
            return Path(name) / "model.safetensors" if name else None

        def find(conn: Connection) -> str:
            return kept_version(conn, runs.by_name(conn, match["run"]), int(match["version"]))

        return await self._blobs.local(await self._db.read(find))

    async def _check_source(self, about: Definition, dataset: DatasetRow | None) -> None:
        """Check a run's first weights, and their tokenizer. Raises InvalidRunFile, NotFound."""
        name = about.file.train.init_from
        try:
            path = await self._source(about)
        except NotFound as error:
            raise NotFound(f"[train] init_from: {error.message}") from error
        if path is None:
            return
        asset = about.tokenizer(dataset.manifest.assets if dataset else {})
        tokenizer = asset.sha256 if asset else None
        await asyncio.to_thread(check_source, path, about, tokenizer)
        if match := VERSION.fullmatch(name):

            def find(conn: Connection) -> ChunkRef | None:
                run = runs.by_name(conn, match["run"])
                return definition(run).tokenizer(datasets.assets_of(conn, run))

            first = await self._db.read(find)
            check_tokenizers(name, first.sha256 if first else None, tokenizer)

    def _add_version(self, conn: Connection, run: RunRow, content: Content, kind: str) -> None:
        """Add a version that no merge made: the initial version, or a rollback."""
        version = 0 if kind == "initial" else run.head + 1
        progress = TrainingProgress(version=version, global_step=run.global_step, tokens=run.tokens)
        values: dict[str, object] = {"kind": kind, "contributions": "[]", "update_norm": None}
        values["parent"] = None if version == 0 else run.head
        datasets.register(conn, content.blobs(), self._clock.now(), self._blobs.serials)
        self.add_version(conn, run, content, progress, values)

    def add_version(
        self,
        conn: Connection,
        run: RunRow,
        content: Content,
        progress: TrainingProgress,
        values: Mapping[str, Any],
    ) -> None:
        """Sign a version and insert its row. `values` are the columns that do not follow from its
        content or progress. Merged versions are evaluated at intervals, all others always.
        """
        now = self._clock.now()
        signed = self._signed(conn, run, content, progress, now)
        every = definition(run).file.evaluation.every
        versions.add(
            conn,
            {
                "run_id": run.id,
                "version": progress.version,
                "master_sha256": content.master_sha256,
                "published_sha256": content.published_sha256,
                "size": content.size,
                "state_sha256": content.state_sha256,
                "manifest": signed.payload,
                "signature": signed.signature,
                "global_step": progress.global_step,
                "tokens": progress.tokens,
                "created_at": now,
                **values,
            },
            evaluate=values["kind"] != "merge" or (every > 0 and progress.version % every == 0),
            ways=[way.sha256 for way in content.ways],
        )

    def _signed(
        self,
        conn: Connection,
        run: RunRow,
        content: Content,
        progress: TrainingProgress,
        now: float,
    ) -> SignedManifest:
        """Return the signed manifest of a version that is about to be committed."""
        dataset = datasets.of_run(conn, run)
        names = definition(run).file.evaluation.suites
        suites = {name: datasets.by_name(conn, name).manifest.heldout[0].sha256 for name in names}
        around = Surroundings(dataset=dataset, tree=tree_head(conn, now), suites=suites)
        return sign_version(self._key, run, around, content, progress, now)

    async def pause(self, name: str, reason: str = "") -> RunInfo:
        return await self._move(name, "paused", "run.pause", reason)

    async def resume(self, name: str, reason: str = "") -> RunInfo:
        """Hand out the tasks of a paused run again. Raises NotFound, or Conflict if it is not
        paused.
        """
        return await self._move(name, "running", "run.resume", reason)

    async def stop(self, name: str, reason: str = "stopped by the organiser") -> RunInfo:
        """End the run: cancel open tasks, pay accepted work."""
        return await self._move(name, "completed", "run.stop", reason)

    async def _move(self, name: str, state: RunState, action: str, reason: str = "") -> RunInfo:
        def move(conn: Connection) -> RunRow:
            now = self._clock.now()
            row = runs.by_name(conn, name)
            if state == "running" and row.state != "paused":
                advice = _RESUME_ADVICE.get(row.state, "").format(name=name)
                raise Conflict(f'the run "{name}" is {row.state}{advice}')
            if state == "completed" and row.state == "draft":
                raise Conflict(f'"{name}" was never started: `coordinator run delete` removes it')
            values = {"ended_at": now} if state == "completed" else {}
            runs.move(conn, row, state, runs.StateChange(at=now, reason=reason), **values)
            if state == "completed":
                settlement.close(conn, row.id, now)
            record.append(conn, "organiser", action, name, reason, now)
            return runs.by_id(conn, row.id)

        row = await self._db.write(move)
        self._wake(row.id)
        return await self.queries.describe(row)

    async def rollback(self, name: str, to: int, why: str = "") -> RunInfo:
        """Make version head + 1 with the content of version `to`; cancel leases on reverted
        versions. Raises NotFound for a version that is not earlier or was pruned, Conflict if a
        merge came between.
        """
        detail = f"to version {to}: {why}" if why else f"to version {to}"

        def revert(conn: Connection) -> RunRow:
            now = self._clock.now()
            run = runs.by_id(conn, runs.by_name(conn, name).id, lock=True)
            if not 0 <= to < run.head:
                range_text = (
                    f"it can go back to any of 0 to {run.head - 1}"
                    if run.head > 0
                    else "there is no earlier version"
                )
                raise NotFound(f'"{name}" is at version {run.head}: {range_text}')
            target = versions.get(conn, run.id, to)
            if evaluations.evaluation(conn, run.id, to).pruned:
                raise NotFound(
                    f"the files of version {to} were pruned; kept: see `coordinator run show "
                    f"{name}`"
                )
            reverted = msgspec.structs.replace(
                run, global_step=target.global_step, tokens=target.tokens
            )
            content = publishing.content_of(conn, target)
            self._add_version(conn, reverted, content, "rollback")
            moved = runs.set_head(
                conn,
                run.id,
                run.head,
                global_step=target.global_step,
                tokens=target.tokens,
            )
            if not moved:
                raise Conflict(f'"{name}" got another version meanwhile: look at it, then retry')
            owners = settlement.lock_accounts(conn, run, run.head + 1)
            tasks.recall(conn, run.id, above=to)
            cause = f"its base was reverted by a rollback to version {to}"
            settlement.leave_behind(conn, run, run.head + 1, owners, cause, now)
            record.append(conn, "organiser", "run.rollback", name, detail, now)
            return runs.by_id(conn, run.id)

        row = await self._db.write(revert)
        self._wake(row.id)
        return await self.queries.describe(row)

    def _wake(self, run_id: int) -> None:
        for topic in (f"run:{run_id}", "runs", "queue"):
            self._signals.notify(topic)
