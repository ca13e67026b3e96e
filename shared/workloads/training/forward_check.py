"""Forward check by slices of a task: a few samples that nobody could know before, done by the
workload itself.

A delta is measured by the loss of slices before and after it. A mean gradient g over samples whose
own gradients are g_i has g . mean(g_i) = |g|^2, so slices give g . g_slice / |g|^2, which is 1 on
average for honest work, 0 for noise, -1 for a flipped sign and 1 / k for what was made k times
longer, whatever the model, without a step whose length would have to be chosen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.workloads.base import Data, ForwardFigures, Job, Result, Workload

_SLICES_MIN, _SLICES_MAX = 4, 8
_SLICE_MAX = 4  # samples, where a workload needs no more
_FLOPS_MAX = 4e12  # of a check: a minute or two on a slow core


class _Cut(msgspec.Struct, frozen=True, kw_only=True):
    """Slices of a check: how many, and samples of each."""

    count: int
    samples: int


def figures(
    workload: Workload,
    job: Job,
    tensors: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
    data: tuple[Data, Data],
    seed: int,
) -> ForwardFigures | None:
    """Measure an update of a model whose loss is a mean over samples; `tensors` are those that
    `Workload.check` has. None where there are too few samples.
    """
    cut = _cut(workload, job, 1)
    samples = sum(workload.samples(job.config, data[1].manifest))
    if cut is None or samples < cut.samples:
        return None
    random = np.random.default_rng(seed)
    measure = _confirmed if job.update == "gradient" else _drops
    own = measure(workload, job, tensors, data[0], _own(random, job, cut))[:, 0]
    places = cut.samples * _some(random, samples // cut.samples, cut)
    foreign = measure(workload, job, tensors, data[1], (places, cut.samples))[:, 0]
    return ForwardFigures(
        drop=float(own.mean()),
        gap=float(own.mean() - foreign.mean()),
        noise=math.sqrt(float(own.var(ddof=1) + foreign.var(ddof=1)) / cut.count),
        whole=job.update == "gradient",
    )


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of a model that learn by losses of their own."""

    starts: tuple[str, ...]  # of the names of their tensors
    least: int  # samples of a slice that means anything


def agreement_of_parts(
    workload: Workload,
    job: Job,
    tensors: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
    data: Data,
    seed: int,
    parts: Parts,
) -> ForwardFigures | None:
    """Measure a gradient of several parts: the figure is that of the part which agrees least, and
    there is no gap. None where there are too few samples.
    """
    cut = _cut(workload, job, parts.least)
    if cut is None:
        return None
    random = np.random.default_rng(seed)
    own = _confirmed(workload, job, tensors, data, _own(random, job, cut), parts.starts)
    worst = own[:, int(own.mean(axis=0).argmin())]
    noise = math.sqrt(float(worst.var(ddof=1)) / cut.count)
    return ForwardFigures(drop=float(worst.mean()), gap=0.0, noise=noise, whole=True)


def _confirmed(
    workload: Workload,
    job: Job,
    tensors: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
    data: Data,
    slices: tuple[NDArray[np.int64], int],
    parts: Sequence[str] = ("",),
) -> NDArray[np.float64]:
    """Return what slices, (where they start, samples of each), confirm of each part of a gradient,
    (slices, parts).
    """
    base, gradient = tensors
    names = [
        [s.name for s in workload.schema(job.config) if _learnt(s.role, s.name, part)]
        for part in parts
    ]
    lengths = [sum(_dot(gradient[n], gradient[n]) for n in of) for of in names]
    rows = []
    for start in slices[0].tolist():
        found = _done(workload, _slice(job, start, slices[1]), base, data)[1]
        dots = [sum(_dot(gradient[n], found[n]) for n in of) for of in names]
        rows.append([dot / max(1e-300, of) for dot, of in zip(dots, lengths, strict=True)])
    return np.array(rows)


def _drops(
    workload: Workload,
    job: Job,
    tensors: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
    data: Data,
    slices: tuple[NDArray[np.int64], int],
) -> NDArray[np.float64]:
    """Return how far the loss of slices fell, (slices, 1)."""
    jobs = [_slice(job, start, slices[1]) for start in slices[0].tolist()]
    before, after = (
        [_done(workload, each, weights, data)[0].loss_first for each in jobs] for weights in tensors
    )
    return np.subtract(before, after)[:, None]


def _own(random: np.random.Generator, job: Job, cut: _Cut) -> tuple[NDArray[np.int64], int]:
    places = (job.stop - job.start) // cut.samples
    return job.start + cut.samples * _some(random, places, cut), cut.samples


def _cut(workload: Workload, job: Job, least: int) -> _Cut | None:
    """Return slices that cost about an eighth of the task, where it is large enough for that."""
    count = job.stop - job.start
    affordable = _FLOPS_MAX / max(1.0, workload.flops_per_sample(job.config)) / 2
    samples = max(least, min(_SLICE_MAX, count // 128, int(affordable) // _SLICES_MAX))
    slices = min(_SLICES_MAX, count // (16 * samples), int(affordable) // samples)
    slices = min(max(_SLICES_MIN if least == 1 else 2, slices), count // samples)
    return _Cut(count=slices, samples=samples) if slices > 1 else None


def _some(random: np.random.Generator, places: int, cut: _Cut) -> NDArray[np.int64]:
    """Draw as many places as there are slices, each once where there are enough."""
    return random.choice(places, cut.count, replace=places < cut.count)


def _slice(job: Job, start: int, samples: int) -> Job:
    stop = start + samples
    return msgspec.structs.replace(
        job, start=start, stop=stop, steps=1, batch_size=samples, update="gradient"
    )


def _done(
    workload: Workload, job: Job, weights: Mapping[str, Tensor], data: Data
) -> tuple[Result, Mapping[str, Tensor]]:
    work = workload.begin(job, weights, data, "cpu", None)
    while not work.done:
        work.advance()
    return work.result()


def _learnt(role: str, name: str, part: str) -> bool:
    return role == "parameter" and name.startswith(part)


def _dot(one: Tensor, other: Tensor) -> float:
    return float(torch.dot(one.flatten(), other.flatten()))
