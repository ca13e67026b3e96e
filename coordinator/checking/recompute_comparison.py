"""Recompute of a task, compared with the submitted update."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from coordinator.checking.case import BlobSource, Case
from coordinator.compute import Stop
from coordinator.rules.draws import (
    HERE,
    ComputeDevice,
    Likeness,
    Redone,
    device_kind,
    precision_of,
)
from coordinator.rules.recompute_result import NUDGES, bound, difference, raw_difference, within
from coordinator.runs.definition import definition
from coordinator.runs.version_files import read_weights
from shared.errors import Configuration, InvalidRunFile, StorageFull, Unavailable
from shared.tensors.codec import DecodedUpdate, codec
from shared.tensors.sketch import audit_sums
from shared.tensors.slices import ArrayReader, SliceReader
from shared.tensors.spec import Role, Schema, grid
from shared.tensors.update import Delta
from shared.workloads.base import Result, Work, libraries_here
from shared.workloads.data.local_data import LocalData

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

AUTO = "auto"
ACCELERATORS = ("cuda", "xpu", "mps")
SHORT = "too little memory here for this task"

Tensors = Mapping[str, "torch.Tensor"]
Tell = Callable[[int, int], None]  # steps done, steps in all


class SubmittedUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """Update of a worker."""

    sha256: str
    codec: str
    seed: int = 0  # seed of the sums that an audit answers with; 0 = no sums


class RecomputeFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Files of a recompute."""

    weights: Path  # weights of the base version
    update: Path
    codec: str
    seed: int = 0

    @classmethod
    async def of(cls, case: Case, submitted: SubmittedUpdate, blobs: BlobSource) -> RecomputeFiles:
        """Return the files of a case. Raises the errors of `blobs`."""
        return cls(
            weights=await blobs.local(case.base_sha256),
            update=await blobs.local(submitted.sha256),
            codec=submitted.codec,
            seed=submitted.seed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Workbench:
    """Device of a recompute, and the calls between its steps."""

    stop: Stop
    device: str = HERE
    tell: Tell | None = None


def machine_of(device: str) -> tuple[str, ComputeDevice]:
    """Return name, class and model of a device; "auto" is an accelerator if the machine has one.
    Raises Configuration.
    """
    import torch

    if device == AUTO:
        device = next((one for one in ACCELERATORS if _is_here(one)), HERE)
    if device != HERE and not _is_here(device):
        accelerators = [one for one in ACCELERATORS if _is_here(one)]
        raise Configuration(
            f"this machine has no device {device} that PyTorch can use; it has "
            f"{', '.join([HERE, *accelerators])}"
        )
    kind = device_kind(device)
    model = torch.cuda.get_device_name(device) if kind == "cuda" else ""
    return device, ComputeDevice(kind=kind, model=model)


def _is_here(device: str) -> bool:
    import torch

    kind, _, number = device.partition(":")
    if kind not in ACCELERATORS or not (number.isdecimal() or not number):
        return False
    count = getattr(torch, kind).device_count() if getattr(torch, kind).is_available() else 0
    return int(number or 0) < count


def redo(
    stop: Stop,
    case: Case,
    files: RecomputeFiles,
    data: LocalData,
    device: str = HERE,
    tell: Tell | None = None,
) -> Redone:
    """Do a task again and compare the encoded updates. If they differ by more than the bound, the
    task is repeated from a slightly changed base, to measure how far its own results drift.

    Raises NotFound and InvalidRunFile for what cannot be done again, Unavailable when stopped, or
    if this machine has too little memory.
    """
    about, bench = definition(case.run), Workbench(stop=stop, device=device, tell=tell)
    report, own_update = result_of(bench, case, files.weights, data)
    try:
        base = ArrayReader(_arrays(read_weights(files.weights, about)), about.schema)
        redone = _comparison(case, files, own_update, base)
    except (OSError, StorageFull, MemoryError) as error:  # a fault of this machine
        raise Unavailable(f"it could not be compared here: {error}") from error
    loss = report.loss_last
    if loss is not None and not math.isfinite(loss):
        loss = None
    redone = msgspec.structs.replace(redone, loss=loss)
    here = machine_of(device)[1]
    precision = precision_of(case.job.train.precision, here.kind)
    is_comparable = case.comparable(here)
    if within(redone, bound(redone, precision, comparable=is_comparable)):
        return redone
    size = NUDGES[precision if is_comparable else "bfloat16"]
    twin = update_of(bench, case, files.weights, data, nudge=size)
    return msgspec.structs.replace(redone, drift=_difference(own_update, twin, about.schema))


def update_of(
    bench: Workbench, case: Case, weights: Path, data: LocalData, *, nudge: float = 0.0
) -> Delta | ArrayReader:
    """Do a task; return its update before any codec. `nudge` changes each parameter of the base
    slightly, relative to its size.
    """
    return result_of(bench, case, weights, data, nudge=nudge)[1]


def result_of(
    bench: Workbench, case: Case, weights: Path, data: LocalData, *, nudge: float = 0.0
) -> tuple[Result, Delta | ArrayReader]:
    """Do a task; return its report and its update before any codec, see `update_of`. Raises
    InvalidRunFile if the training diverges.
    """
    about = definition(case.run)

    def base() -> Tensors:  # read each time, since training writes into them
        start = read_weights(weights, about)
        return nudged(start, about.schema, nudge) if nudge else start

    work = about.workload.begin(case.job, base(), data, bench.device)
    _advance(bench, work)
    report, tensors = work.result()
    if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
        raise InvalidRunFile("the training diverges: its result holds NaN or infinity")
    end = _arrays(tensors)
    if case.job.update == "delta":
        return report, Delta(_arrays(base()), end, about.schema)
    return report, ArrayReader(end, about.schema)


def twins(
    bench: Workbench, case: Case, weights: Path, data: LocalData, size: float
) -> Iterator[tuple[int, float]]:
    """Do a task from its base and from a slightly changed one, side by side; yield the length of
    the difference of the updates, relative to the first, after 1, 2, 4, ... steps and at the end.
    """
    about = definition(case.run)
    bases = [read_weights(weights, about), nudged(read_weights(weights, about), about.schema, size)]
    starts = [{name: value.clone() for name, value in base.items()} for base in bases]
    works = [about.workload.begin(case.job, base, data, bench.device) for base in bases]
    steps = 1
    while True:
        for work in works:
            _advance(bench, work, steps)
        update, twin = (
            Delta(_arrays(start), _arrays(work.result()[1]), about.schema)
            for start, work in zip(starts, works, strict=True)
        )
        yield min(steps, case.job.steps), _difference(update, twin, about.schema)
        if works[0].done:
            return
        steps *= 2


def nudged(base: Tensors, schema: Schema, size: float) -> Tensors:
    """Return weights in which each parameter is changed slightly, relative to its size."""
    import torch

    random = torch.Generator().manual_seed(0)
    parameters = {spec.name for spec in schema if spec.role == "parameter"}
    return {
        name: value * (1.0 + size * torch.randn(value.shape, generator=random))
        if name in parameters
        else value
        for name, value in base.items()
    }


def _advance(bench: Workbench, work: Work, steps: float = math.inf) -> None:
    """Advance a task by at most `steps` steps, or to the task's end. Raises Unavailable when it is
    stopped, or memory is short.
    """
    step = 0
    while not work.done and step < steps:
        if bench.stop():
            raise Unavailable("the coordinator is stopping")
        try:
            progress = work.advance()
        except Exception as error:
            if not _out_of_memory(error):
                raise
            try:
                work.halve()  # the same samples, with less memory
            except MemoryError:
                raise Unavailable(SHORT) from error
            continue
        step = progress.step
        if bench.tell is not None:
            bench.tell(progress.step, progress.steps)


def missing_library(case: Case) -> str | None:
    """Return the name of a library that a task needs and this machine lacks; None if no library is
    missing. Raises NotFound where the workload is not installed.
    """
    workload = definition(case.run).workload
    here = libraries_here(workload)
    return next((name for name in workload.libraries(case.job.config) if name not in here), None)


def likeness(own_sums: bytes, other_sums: bytes) -> Likeness:
    """Compare the sums of an audit's answer with the server's own: the sums of parameters, or of
    momenta and buffers, whichever differ more.
    """
    import numpy as np

    pairs = (np.frombuffer(sums, np.float32).astype(np.float64) for sums in (own_sums, other_sums))
    halves = zip(*(np.split(numbers, 2) for numbers in pairs), strict=True)
    likenesses = [_likeness_of_sums(half, other) for half, other in halves]
    return max(likenesses, key=lambda one: difference(one.cosine, one.norm_ratio))


def _likeness_of_sums(half: NDArray[np.float64], other: NDArray[np.float64]) -> Likeness:
    import numpy as np

    with np.errstate(all="ignore"):
        norms = float(np.linalg.norm(half)), float(np.linalg.norm(other))
        dot = float(half @ other)
    return _likeness(dot, norms[0] ** 2, norms[1] ** 2)


def _likeness(dot: float, ours_2: float, theirs_2: float) -> Likeness:
    """Return the likeness of two vectors from their inner product and squared lengths."""
    if ours_2 == theirs_2 == 0.0:
        return Likeness(cosine=1.0, norm_ratio=1.0)  # neither moved anything
    return Likeness(
        cosine=dot / max(1e-300, (ours_2 * theirs_2) ** 0.5),
        norm_ratio=(theirs_2 / max(1e-300, ours_2)) ** 0.5,
    )


def _arrays(tensors: Tensors) -> dict[str, NDArray[Any]]:
    return {name: value.detach().numpy() for name, value in tensors.items()}


def _comparison(
    case: Case, files: RecomputeFiles, own_update: Delta | ArrayReader, base: SliceReader
) -> Redone:
    """Compare the encoded updates, by their parameters or their momenta, whichever differ more; add
    the recompute's sums for an audit.
    """
    schema = definition(case.run).schema
    with (
        _encoded(own_update, schema, files.codec, case.job.seed) as own_decoded,
        codec(files.codec).decode(files.update, schema) as submitted_decoded,
    ):
        buffers = _buffers(own_decoded, submitted_decoded, base, schema)
        sums = audit_sums(own_decoded, schema, files.seed).tobytes() if files.seed else b""
        roles = _encoded_roles(schema)
        to_submitted = [likeness_of(own_decoded, submitted_decoded, schema, role) for role in roles]
        rounded = [likeness_of(own_update, own_decoded, schema, role) for role in roles]
        compared = (
            Redone(
                cosine=to_submitted.cosine,
                norm_ratio=to_submitted.norm_ratio,
                rounding=difference(rounded.cosine, rounded.norm_ratio),
                buffers=buffers,
                sums=sums,
            )
            for to_submitted, rounded in zip(to_submitted, rounded, strict=True)
        )
        return max(compared, key=raw_difference)


@contextmanager
def _encoded(
    update: Delta | ArrayReader, schema: Schema, codec_name: str, seed: int
) -> Iterator[DecodedUpdate]:
    """Return an update as a worker would have sent it."""
    update_codec = codec(codec_name)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "update"
        update_codec.encode(update, schema, path, seed)
        with update_codec.decode(path, schema) as decoded:
            yield decoded


def _encoded_roles(schema: Schema) -> tuple[Role, ...]:
    """Return the roles of the tensors whose change an update holds."""
    has_momenta = any(spec.role == "momentum" for spec in schema)
    return ("parameter", "momentum") if has_momenta else ("parameter",)


def _difference(first: SliceReader, second: SliceReader, schema: Schema) -> float:
    """Return the relative length of the difference of two updates' parameters or of their momenta,
    whichever is longer.
    """
    likenesses = (likeness_of(first, second, schema, role) for role in _encoded_roles(schema))
    return max(difference(likeness.cosine, likeness.norm_ratio) for likeness in likenesses)


def likeness_of(first: SliceReader, second: SliceReader, schema: Schema, role: Role) -> Likeness:
    """Compare the tensors of a role of two updates."""
    dot = theirs_2 = ours_2 = 0.0
    for piece, other in _pieces(first, second, schema, role):
        dot += float(piece @ other)
        ours_2 += float(piece @ piece)
        theirs_2 += float(other @ other)
    return _likeness(dot, ours_2, theirs_2)


def _buffers(first: SliceReader, second: SliceReader, base: SliceReader, schema: Schema) -> float:
    """Return the length of the difference of two results' buffers, relative to the change of the
    first result's buffers from the base; infinite where the counters differ.
    """
    squares = sum(float(((a - b) ** 2).sum()) for a, b in _pieces(first, second, schema, "buffer"))
    moved = sum(float(((a - b) ** 2).sum()) for a, b in _pieces(first, base, schema, "buffer"))
    counted = all(bool((a == b).all()) for a, b in _pieces(first, second, schema, "counter"))
    if not counted or not math.isfinite(squares):
        return math.inf
    return (squares / moved) ** 0.5 if moved else math.inf if squares else 0.0


def _pieces(
    one: SliceReader, other: SliceReader, schema: Schema, role: Role
) -> Iterator[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Yield the tensors of a role of two sources in float64, piece by piece."""
    for spec in schema:
        if spec.role == role:
            for start, stop in grid(spec.count):
                a, b = (reader.read(spec.name, start, stop) for reader in (one, other))
                yield a.astype("f8"), b.astype("f8")


def _out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
