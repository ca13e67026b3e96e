"""Recompute of a task from its worker's committed state, compared with the submitted update."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from coordinator.checking.case import Case, Local
from coordinator.compute import Stop
from coordinator.rules.checks import (
    HERE,
    ComputeDevice,
    Drift,
    Likeness,
    Redone,
    device_kind,
    precision_of,
)
from coordinator.rules.likeness import NUDGES, bound, difference, within
from coordinator.runs.definition import definition
from coordinator.runs.version_files import read_weights
from shared.errors import Configuration, NotFound, StorageFull, Unavailable
from shared.protocol.contributions import Commitment
from shared.tensors.quantize import Codec, codec
from shared.tensors.sketch import sums
from shared.tensors.slices import ArrayReader, SliceReader
from shared.tensors.spec import Schema, grid
from shared.tensors.update import Delta, opened
from shared.workloads.base import Weights, Work, libraries_here
from shared.workloads.data.local_data import LocalData

if TYPE_CHECKING:
    import torch

AUTO = "auto"
ACCELERATORS = ("cuda", "xpu", "mps")
SHORT = "too little memory here to split the batches as the volunteer did"

Tensors = Mapping[str, "torch.Tensor"]
Tell = Callable[[int, int], None]  # steps done, steps in all


class SubmittedUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """Update of a worker, and the states that it committed to."""

    sha256: str
    codec: str
    commitment: Commitment
    seed: int = 0  # seed of the sums that an audit answers with; 0 = no sums


class RecomputeFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Files of a recompute; None for an absent one."""

    weights: Path  # weights of the base version
    update: Path
    codec: str
    inner: Path | None
    left: Path | None
    residual: Path | None
    kept: Path | None = None
    seed: int = 0

    @classmethod
    async def of(cls, case: Case, given: SubmittedUpdate, blobs: Local) -> RecomputeFiles:
        """Return the files of a case. Raises NotFound for a deleted file."""
        said = given.commitment
        inner, left, residual, kept = [
            await blobs.local(name) if name else None
            for name in (said.inner, said.left, said.residual, said.kept)
        ]
        return cls(
            weights=await blobs.local(case.base_sha256),
            update=await blobs.local(given.sha256),
            codec=given.codec,
            inner=inner,
            left=left,
            residual=residual,
            kept=kept,
            seed=given.seed,
        )


def machine_of(device: str) -> tuple[str, ComputeDevice]:
    """Return name, class and model of a device; "auto": an accelerator. Raises Configuration."""
    import torch

    if device == AUTO:
        device = next((one for one in ACCELERATORS if _is_here(one)), HERE)
    if device != HERE and not _is_here(device):
        found = [one for one in ACCELERATORS if _is_here(one)]
        raise Configuration(
            f"this machine has no device {device} that PyTorch can use; it has "
            f"{', '.join([HERE, *found])}"
        )
    kind = device_kind(device)
    model = torch.cuda.get_device_name(device) if kind == "cuda" else ""
    return device, ComputeDevice(kind=kind, model=model)


def _is_here(device: str) -> bool:
    import torch

    kind, _, number = device.partition(":")
    if kind not in ACCELERATORS or not (number.isdecimal() or not number):
        return False
    there = getattr(torch, kind).device_count() if getattr(torch, kind).is_available() else 0
    return int(number or 0) < there


def redo(
    stop: Stop,
    case: Case,
    files: RecomputeFiles,
    data: LocalData,
    device: str = HERE,
    tell: Tell | None = None,
) -> Redone:
    """Do a task again and compare the update before its codec, the encoded update, and the state
    left behind. If they differ by more than the bound, the task is repeated from a slightly changed
    base, to measure how far its own results drift.

    Raises NotFound and InvalidFrame for what cannot be done again, Unavailable when stopped, or if
    this machine has too little memory for batches as large as the worker's.
    """
    about = definition(case.run)

    def base() -> Tensors:
        return read_weights(files.weights, about)  # read each time, since training writes into them

    def learn(start: Tensors) -> tuple[Tensors, Tensors]:
        inner = None if files.inner is None else _tensors(files.inner)
        work = about.workload.begin(case.job, start, data, device, inner)
        _finish(stop, case, work, tell)
        return work.result()[1], work.state()

    result, state = learn(base())
    ours = _update(case, base(), result)
    try:
        found = _beside(case, files, ours)
        if files.left is not None:
            alike = state_cosine(state, _tensors(files.left))
            found = msgspec.structs.replace(found, state_cosine=alike)
    except (OSError, StorageFull, MemoryError) as error:  # a fault of this machine
        raise Unavailable(f"it could not be compared here: {error}") from error
    here = machine_of(device)[1]
    precision, alike = precision_of(case.job.train.precision, here.kind), case.comparable(here)
    if within(found, bound(found, precision, comparable=alike)):
        return found
    size = NUDGES[precision if alike else "bfloat16"]
    again, left = learn(nudged(base(), about.schema, size))
    other = _update(case, nudged(base(), about.schema, size), again)
    apart = _alike(ours, other, about.schema)
    drift = Drift(
        difference=difference(apart.cosine, apart.norm_ratio), state=state_cosine(state, left)
    )
    return msgspec.structs.replace(found, drift=drift)


def nudged(base: Tensors, schema: Schema, size: float) -> Tensors:
    """Return weights in which each parameter is changed slightly, relative to its size."""
    import torch

    random = torch.Generator().manual_seed(0)
    learnt = {spec.name for spec in schema if spec.role == "parameter"}
    return {
        name: value * (1.0 + size * torch.randn(value.shape, generator=random))
        if name in learnt
        else value
        for name, value in base.items()
    }


def _finish(stop: Stop, case: Case, work: Work, tell: Tell | None) -> None:
    """Do all steps of a task. Raises Unavailable when it is stopped, or memory is short."""
    while not work.done:
        if stop():
            raise Unavailable("the coordinator is stopping")
        try:
            found = work.advance()
        except Exception as error:
            if not _out_of_memory(error):
                raise
            try:
                work.halve()  # the same samples, in smaller batches
            except MemoryError:
                raise Unavailable(SHORT) from error
            continue
        if tell is not None:
            tell(found.step, found.steps)
    if len(work.result()[0].halved) > len(case.job.halved):
        raise Unavailable(SHORT)


def missing_library(case: Case) -> str | None:
    """Return the name of a library that a task needs and this machine lacks; None if it has all.
    Raises NotFound where the workload is not installed.
    """
    workload = definition(case.run).workload
    here = libraries_here(workload)
    return next((name for name in workload.libraries(case.job.config) if name not in here), None)


def likeness(ours: bytes, theirs: bytes) -> Likeness:
    """Compare the sums of an audit's answer with the server's own."""
    import numpy as np

    mine, other = (np.frombuffer(each, np.float32).astype(np.float64) for each in (ours, theirs))
    with np.errstate(all="ignore"):
        norms = float(np.linalg.norm(mine)), float(np.linalg.norm(other))
        dot = float(mine @ other)
    if not any(norms):
        return Likeness(cosine=1.0, norm_ratio=1.0)  # neither update moved anything
    cosine = dot / max(1e-300, norms[0] * norms[1])
    return Likeness(cosine=cosine, norm_ratio=norms[1] / max(1e-300, norms[0]))


def _update(case: Case, base: Tensors, result: Tensors) -> Any:
    """Return the update of a result, before any codec."""
    schema = definition(case.run).schema
    start, end = (
        {name: value.detach().numpy() for name, value in one.items()} for one in (base, result)
    )
    return Delta(start, end, schema) if case.job.update == "delta" else ArrayReader(end, schema)


def _beside(case: Case, files: RecomputeFiles, ours: Any) -> Redone:
    """Compare the raw updates and the encoded ones; add the recompute's sums for an audit."""
    schema, chosen = definition(case.run).schema, codec(files.codec)
    with opened(files.update, schema, chosen, files.kept, files.residual) as (_, theirs):
        beside = _alike(ours, theirs, schema)
        found = Redone(cosine=beside.cosine, norm_ratio=beside.norm_ratio)
    if files.seed:
        own = sums(ours, schema, files.seed).tobytes()
        found = msgspec.structs.replace(found, sums=own)
    if files.kept is not None:
        found = msgspec.structs.replace(found, written=_written(files, chosen, schema))
    return found


def _written(files: RecomputeFiles, chosen: Codec, schema: Schema) -> float:
    """Return how much the sent update resembles its codec's output for the claimed input: their
    cosine divided by the ratio of lengths. It is 1 except for rounding, and lower if the claimed
    residual serves only to disguise a made-up update.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        opened(files.update, schema, chosen, files.kept, None) as (sent, whole),
    ):
        path, given = Path(folder) / "again", cast("Any", whole)
        chosen.encode(given, schema, path)
        with chosen.decode(path, schema) as again:
            found = _alike(again, sent, schema)
            longer = max(found.norm_ratio, 1.0 / max(1e-300, found.norm_ratio))
            return found.cosine / longer


def _alike(ours: SliceReader, theirs: SliceReader, schema: Schema) -> Likeness:
    """Compare the parameters of the worker's update and the server's."""
    import numpy as np

    dot = theirs_2 = ours_2 = 0.0
    for spec in schema:
        if spec.role != "parameter":
            continue
        for start, stop in grid(spec.count):
            mine = ours.read(spec.name, start, stop).astype(np.float64)
            other = theirs.read(spec.name, start, stop).astype(np.float64)
            dot += float(mine @ other)
            ours_2 += float(mine @ mine)
            theirs_2 += float(other @ other)
    return Likeness(
        cosine=dot / max(1e-300, (ours_2 * theirs_2) ** 0.5),
        norm_ratio=(theirs_2 / max(1e-300, ours_2)) ** 0.5,
    )


def state_cosine(ours: Weights, theirs: Weights) -> float:
    """Return the lowest likeness of the kinds of state ("exp_avg", "exp_avg_sq"), each a cosine
    times the ratio of lengths; -1 if a tensor is missing, of another shape, or differs in integers.
    """
    sums: dict[str, list[float]] = {}
    for name, mine in ours.items():
        other = theirs.get(name)
        if other is None or other.shape != mine.shape:
            return -1.0
        if not mine.is_floating_point():
            if not bool((mine == other).all()):
                return -1.0
            continue
        a, b = mine.double().flatten(), other.double().flatten()
        found = sums.setdefault(name.partition("/")[0], [0.0, 0.0, 0.0])
        for index, pair in enumerate(((a, b), (a, a), (b, b))):
            found[index] += float(pair[0] @ pair[1])
    least = 1.0
    for dot, ours_2, theirs_2 in sums.values():
        if ours_2 == theirs_2 == 0.0:
            continue
        alike = dot / max(ours_2, theirs_2, 1e-300)
        least = min(least, alike if math.isfinite(alike) else -1.0)
    return least


def _out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise NotFound(f"a revealed state is not a file of tensors: {error}") from error
