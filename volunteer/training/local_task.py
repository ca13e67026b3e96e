"""Part of a task on its training thread: opened from files, saved, put into the outbox at its
end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from shared.errors import InvalidFrame, NotFound, StorageFull, TooLarge, VolunteerError
from shared.files.deletions import delete_file
from shared.programs.machine_limits import free_memory_bytes
from shared.proofs.signing import canonical, digest
from shared.protocol.contributions import SubmitRequest
from shared.protocol.leases import AuditWork
from shared.protocol.members import HeldoutSums
from shared.protocol.versions import VersionManifest
from shared.sentences import Sentence, figure
from shared.tensors.codec import Codec, EncodedUpdate, codec
from shared.tensors.frame import open_frame, torch_tensors
from shared.tensors.sketch import audit_sums
from shared.tensors.slices import ArrayReader, SliceReader
from shared.tensors.spec import Schema, nbytes
from shared.tensors.update import Delta
from shared.text import size as bytes_in_words
from shared.workloads.base import Config, Job, Result, Weights, Work, Workload
from shared.workloads.base import load as load_workload
from shared.workloads.data.local_data import LocalData
from shared.workloads.experience import Actor
from shared.workloads.training.memory_release import release_memory
from shared.workloads.training.micro_batch import Paced, Rankable, Streamable
from volunteer.control.model_step import ModelStep
from volunteer.files import write_whole
from volunteer.machine.device_memory import OutOfMemory, out_of_memory
from volunteer.storage.leases import AUDIT_SUFFIX, HeldLease
from volunteer.storage.outbox import Outbox, QueuedResult
from volunteer.storage.own_data import OwnData
from volunteer.storage.tensor_files import load, store
from volunteer.training.job import TaskSeconds

if TYPE_CHECKING:
    import torch

    from shared.workloads.training.ranks import Ranks

BASE = "base_version"  # name of the base version's number in a snapshot
EXACT = "float32"  # codec named for a result that is not an update
PLAYED = ("experience", "evaluation")  # kinds of results that are files of episodes
# Measured on a CPU with GPTs of 10.8 M parameters: at the end of a task the process holds 7.1
# models of anonymous memory, 7.6 if the next task is loaded.
CPU_COPIES = 7
DEVICE_COPIES = 4  # on the device: weights, gradient, two moments; other copies are on the host
LEFT_COPIES = 1  # models held by a task that is encoded while the next one trains
HELDOUT_S = 5.0  # longest measurement of a version on the held-out part of own data


class PartPosition(msgspec.Struct, frozen=True, kw_only=True):
    """Position of a result in its lease."""

    part: int = 0
    tries: int = 0
    last: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PartResult:
    """Result of a part in CPU memory; encoded and sent while the device trains the next part."""

    result: Result
    tensors: Weights
    spent: TaskSeconds


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFiles:
    """Files and settings of a task on this machine."""

    held: HeldLease
    manifest: VersionManifest  # of the base version
    workload: Callable[[], Workload]
    weights: Path
    data: LocalData
    snapshot: Path
    outbox: Outbox
    memory_bytes: int  # memory that the device may use; 0 = unknown
    host_bytes: int  # memory of the host that the task may use beside the device's own
    ranks: Callable[[], Ranks | None]  # further devices that compute the same task
    now: Callable[[], float]
    own_data: OwnData
    away: Callable[[], bool]  # True ends a measurement early
    step: ModelStep | None = None  # earlier measurement of this model on this device


class LocalTask:
    """One part of a task. `begin`, `save` and `finish` run on the training thread, `submit` on a
    thread that never runs torch.
    """

    def __init__(self, files: TaskFiles, place: PartPosition) -> None:
        self.files = self._files = files
        self._place = place
        self._schema: Schema = ()
        self._heldout: HeldoutSums | None = None  # of the base version, on own data
        self.items = "samples"
        self.items_per_sample = 1.0  # for a rate in tokens or images
        self._streams = False  # the state of the work stays in the memory of the host

    def begin(self) -> Work:
        """Return the work, resumed from its snapshot if there is one.

        Raises InvalidFrame, NotFound, TooLarge and the errors of the workload.
        """
        files, job = self._files, self._files.held.lease.job
        workload = files.workload()
        self._schema = checked_schema(files.manifest, workload, job.config)
        self.items = workload.declaration.items
        self.items_per_sample = float(workload.items_per_sample(job.config))
        need = self._need(workload)
        self._heldout = self._measure_heldout(workload)
        snapshot = load(files.snapshot)
        work = self._begin_work(workload)
        if isinstance(work, Paced):
            self._pace(work, max(0, files.memory_bytes - need))
        ranks = files.ranks()
        if ranks is not None and isinstance(work, Rankable):
            name = workload.name
            begin = partial(_begin_on_rank, name, job, files.weights, files.data, self._streams)
            work.spread(ranks, begin)
        if snapshot is not None and int(snapshot.get(BASE, -1)) == files.manifest.version:
            try:
                work.restore(snapshot)
            except (VolunteerError, KeyError, ValueError, RuntimeError):
                # A snapshot of another software version, or a damaged snapshot: the task starts
                # over.
                delete_file(files.snapshot, "copy")
                work = self._begin_work(workload)
        return work

    def _need(self, workload: Workload) -> int:
        """Return the memory that the task needs on its device, and decide where its state is.
        Raises OutOfMemory.
        """
        files, job = self._files, self._files.held.lease.job
        fixed_bytes = workload.fixed_bytes(job.config)
        copies = CPU_COPIES if files.held.device == "cpu" else DEVICE_COPIES
        need = nbytes(self._schema) * copies + fixed_bytes
        if not 0 < files.memory_bytes < need:
            return need
        streamed_bytes = workload.streamed_bytes(job.config)
        self._streams = 0 < streamed_bytes <= files.memory_bytes and self._host_holds(workload)
        if self._streams:
            return streamed_bytes
        message = Sentence(
            "the model of {run} needs {size} of memory, more than the "
            "{allowed} this device may use",
            run=job.run,
            size=figure(bytes_in_words(need)),
            allowed=figure(bytes_in_words(files.memory_bytes)),
        )
        raise OutOfMemory(message, need)

    def _host_holds(self, workload: Workload) -> bool:
        """Return True if the host has room for the state of the task beside a device."""
        fixed_bytes = workload.fixed_bytes(self._files.held.lease.job.config)
        return nbytes(self._schema) * CPU_COPIES + fixed_bytes <= self._files.host_bytes

    def _begin_work(self, workload: Workload) -> Work:
        """Begin the work with its state on the device, or on the host if the device is short."""
        files, job = self._files, self._files.held.lease.job
        place = (files.data, files.held.device)
        if self._streams or not self._host_holds(workload):
            return _begin(workload, job, self._weights(), *place, streams=self._streams)
        try:
            return _begin(workload, job, self._weights(), *place, streams=False)
        except Exception as error:
            if not out_of_memory(error) or not workload.streamed_bytes(job.config):
                raise
        # Release memory outside of the except block: its traceback keeps failed tensors.
        release_memory(files.held.device)
        self._streams = True
        return _begin(workload, job, self._weights(), *place, streams=True)

    def _measure_heldout(self, workload: Workload) -> HeldoutSums | None:
        """Measure the base version on the held-out part of own data, once a version. Return None
        for other data, or a part that is too small.
        """
        files, lease = self._files, self._files.held.lease
        version = files.manifest.version
        if not lease.member or files.own_data.measured.get(lease.run) == version:
            return None
        try:
            metrics = workload.evaluate(
                lease.job.config, self._weights(), files.data.heldout(), HELDOUT_S, files.away
            )
        except VolunteerError:
            return None
        loss, items = metrics["loss"], int(metrics.get(workload.declaration.items, 1.0))
        if not math.isfinite(loss) or items < 1:
            return None
        return HeldoutSums(version=version, loss_sum=loss * items, items=items)

    def _pace(self, work: Paced, room: int) -> None:
        """Tell the work the micro-batch of earlier tasks, and the bytes that are left for it."""
        step = self._files.step
        micro = step.micro_batch if step is not None else 0
        if self._files.held.device == "cpu":  # half of the free memory is left to other programs
            room = min(room, free_memory_bytes() // 2)
        work.begin_with(micro, most=step is not None and step.halved, room=room)

    def swap(self, work: Work, manifest: VersionManifest, path: Path) -> None:
        """Continue on a newer version, if the work supports that."""
        if isinstance(work, Actor) and manifest.schema_sha256 == self._files.manifest.schema_sha256:
            work.swap(self._weights(path), manifest.version, manifest.weights.sha256)

    def save(self, work: Work) -> None:
        """Write a snapshot; skip it if the disk is full."""
        import torch

        try:
            base = {BASE: torch.tensor(self._files.manifest.version)}
            store(self._files.snapshot, work.snapshot() | base)
        except StorageFull:
            delete_file(self._files.snapshot, "copy")  # a full disk must not stop training

    @property
    def leaves_room(self) -> bool:
        """Return True if the next task fits this device while this task is still encoded."""
        files = self._files
        need = nbytes(self._schema) * (CPU_COPIES + LEFT_COPIES)
        return files.held.device != "cpu" or not files.memory_bytes or need <= files.memory_bytes

    def finish(self, work: Work, spent: TaskSeconds) -> PartResult:
        """Return the result of the part. Raises InvalidFrame when the training diverged."""
        result, tensors = work.result()
        refuse_diverged(tensors)
        return PartResult(result=result, tensors=tensors, spent=spent)

    def submit(self, part: PartResult) -> QueuedResult:
        """Encode a part and put it into the outbox. Raises InvalidFrame, TooLarge, StorageFull,
        OSError.
        """
        entry = self._entry(part)
        self._files.outbox.put(entry)
        if self._heldout is not None:
            self._files.own_data.measured[entry.run] = self._heldout.version
        delete_file(self._files.snapshot, "moved")
        return entry

    def _weights(self, path: Path | None = None) -> dict[str, torch.Tensor]:
        return torch_tensors(path or self._files.weights, self._schema)

    def _entry(self, part: PartResult) -> QueuedResult:
        files, lease = self._files, self._files.held.lease
        result, spent, place = part.result, part.spent, self._place
        name = f"{lease.task}-{lease.attempt}-{place.part}-{place.tries}"
        payload = files.outbox.payload(name)
        played = lease.job.update in PLAYED
        if played:
            write_whole(payload, result.experience, durable=True)
            sha256, size = digest(result.experience), len(result.experience)
        elif lease.audit is not None:
            answer = self._answer(part, lease.audit)
            write_whole(payload, answer, durable=True)
            sha256, size = digest(answer), len(answer)
        else:
            encoded = self._encode(part.tensors, payload, codec(lease.grant.codec))
            sha256, size = encoded.sha256, encoded.size
        if size > lease.grant.bytes_max:
            delete_file(payload, "scratch")
            raise TooLarge(
                Sentence(
                    "the result has {size} bytes, the coordinator takes {most}",
                    size=figure(f"{size:,}"),
                    most=figure(f"{lease.grant.bytes_max:,}"),
                )
            )
        submit = SubmitRequest(
            attempt=lease.attempt,
            part=place.part,
            tries=place.tries,
            base_version=files.manifest.version,
            codec=EXACT if played else lease.grant.codec,
            sha256=sha256,
            size=size,
            steps=result.steps,
            samples=result.samples,
            loss_first=result.loss_first,
            loss_last=result.loss_last,
            device=files.held.device,
            train_s=spent.train_s,
            paused_s=spent.paused_s,
            metrics=result.metrics,
            heldout=self._heldout,
        )
        return QueuedResult(
            task=lease.task,
            run=lease.run,
            device=files.held.device,
            submit=submit,
            price_micro=lease.price_micro,
            at=files.now(),
            last=place.last,
        )

    def _answer(self, part: PartResult, audit: AuditWork) -> bytes:
        """Return the sums of an audit's encoded update, which are submitted instead of the
        update.
        """
        path = self._files.snapshot.with_suffix(AUDIT_SUFFIX)
        audit_codec = codec(audit.codec)
        try:
            self._encode(part.tensors, path, audit_codec)
            with audit_codec.decode(path, self._schema) as update:
                return audit_sums(update, self._schema, audit.seed).astype("<f4").tobytes()
        finally:
            delete_file(path, "scratch")

    def _update(self, tensors: Weights, base: Mapping[str, object]) -> SliceReader:
        kind, schema = self._files.held.lease.job.update, self._schema
        arrays = {key: tensor.detach().cpu().numpy() for key, tensor in tensors.items()}
        if kind == "delta":
            return Delta(base, arrays, schema)
        if kind == "gradient":
            return ArrayReader(arrays, schema)
        raise InvalidFrame(Sentence("this version cannot submit {update}", update=kind))

    def _encode(self, tensors: Weights, path: Path, update_codec: Codec) -> EncodedUpdate:
        files, schema = self._files, self._schema
        with open_frame(files.weights, schema) as base:
            update = self._update(tensors, base)
            return update_codec.encode(update, schema, path, files.held.lease.job.seed)


def checked_schema(manifest: VersionManifest, workload: Workload, config: Config) -> Schema:
    """Return the schema of a version, checked against the manifest. Raises NotFound for a workload
    of another release, InvalidFrame for another schema.
    """
    if workload.version != manifest.workload_version:
        raise NotFound(
            Sentence(
                'the run {run} needs version {workload_version} of the workload "{name}", this '
                "machine has {version}: both sides must have the same release",
                run=manifest.run,
                workload_version=manifest.workload_version,
                name=workload.name,
                version=workload.version,
            )
        )
    schema = workload.schema(config)
    if digest(canonical(schema)) != manifest.schema_sha256:
        raise InvalidFrame(
            Sentence(
                "the model of {run} is not laid out here as on the coordinator", run=manifest.run
            )
        )
    return schema


def _begin(
    workload: Workload, job: Job, weights: Weights, data: LocalData, device: str, *, streams: bool
) -> Work:
    """Begin a task on a device; with `streams` its state stays in the memory of the host. Raises
    MemoryError if the work cannot keep it there.
    """
    work = workload.begin(job, weights, data, "cpu" if streams else device)
    if streams and not (isinstance(work, Streamable) and work.stream(device)):
        raise MemoryError("the weights do not fit into the memory of this device")
    return work


def _begin_on_rank(
    name: str, job: Job, weights: Path, data: LocalData, streams: bool, device: str
) -> Any:
    """Begin a task on another device that shares it; runs in the process of that device."""
    workload = load_workload(name)
    tensors = torch_tensors(weights, workload.schema(job.config))
    return _begin(workload, job, tensors, data, device, streams=streams)


def refuse_diverged(tensors: Weights) -> None:
    """Raise InvalidFrame for NaN or infinite values, from which training cannot continue."""
    for name, value in tensors.items():
        if value.is_floating_point() and not value.isfinite().all():
            raise InvalidFrame(
                Sentence(
                    "{name} holds NaN or infinite values: the training diverged, so nothing is "
                    "sent",
                    name=repr(name),
                )
            )
