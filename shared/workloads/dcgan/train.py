"""DCGAN task on one device, advanced by one micro-batch at a time.

A step has two turns over the same batch: the discriminator learns from real images and from fakes,
then the generator learns to fool it. Each network's gradient comes from its own loss alone: the
discriminator is frozen while the generator learns. Batch norm uses the statistics of one
micro-batch (Hoffer et al. 2017), so the result depends on the division of a batch. All machines
divide it alike, into even portions that suit a slow core. A machine short of memory draws the fakes
twice instead of keeping them; a task that still does not fit is given back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.errors import InvalidRunFile
from shared.workloads.base import Data, Job, Progress, Result, Weights
from shared.workloads.data.image_chunks import Images, images_of, to_pixels
from shared.workloads.data.pass_order import PassOrder
from shared.workloads.data.resize import braille, tile
from shared.workloads.data.windows import task_samples
from shared.workloads.dcgan.config import (
    DISCRIMINATOR,
    GENERATOR,
    DcganConfig,
    flops_per_sample,
    schema,
)
from shared.workloads.dcgan.model import build, statistics_kept
from shared.workloads.training.device_differences import autocast, to_device, to_host
from shared.workloads.training.learner import Learner
from shared.workloads.training.memory_release import release_memory
from shared.workloads.training.seeded_random import normal

_READ_S = 0.2  # interval of reading the figures on a GPU
_PREVIEW_S = 2.0
_PREVIEWED, _PREVIEW_SIGNS = 3, 54
_PORTION_FLOPS = 9e9  # a third of a second on a slow core, which bounds the delay of a pause
_PORTION_MIN = 16  # least images of a portion, since statistics of fewer are poor
_FIGURES = ("loss_d", "loss_g", "real_known", "fakes_known")
_COUNTERS = "counters"


class DcganWork:
    """Local training ("delta") or the mean gradients at the base ("gradient"); see `Work`."""

    def __init__(self, job: Job, weights: Weights, data: Data, device: str) -> None:
        config = DcganConfig.from_dict(job.config)
        order = PassOrder(images_of(data.manifest, config.shape), job.order_seed)
        rows = task_samples(order, job.start, job.stop, job.steps, job.batch_size)
        self._images = Images(data, config.shape, rows)
        self._job = job
        self._device = device
        self._latent = config.latent
        self._order = [spec.name for spec in schema(config)]
        self._model = build(config, weights, device).train()
        self._learners = [  # in the order of their turns
            Learner(_parameters(self._model, name), job) for name in (DISCRIMINATOR, GENERATOR)
        ]
        self._autocast = autocast(job.train.precision, device)
        self._portion = portion(min(job.batch_size, len(rows)), config)
        self._step = 0
        self._turn = 0
        self._in_turn = 0  # finished images of the present turn
        # fakes of this step by their place in it, with the graph for the generator
        self._fakes: dict[int, Tensor] = {}
        self._frugal = False  # memory was short: fakes are drawn again instead of kept
        self._statistics = (
            self._copy_statistics()
        )  # statistics of the networks at the turn's beginning
        self._now = torch.zeros(len(_FIGURES), device=device)  # figures of the running step
        self._figures = torch.zeros(job.steps, len(_FIGURES), device=device)
        self._read_at = self._shown_at = 0.0

    @property
    def done(self) -> bool:
        return self._step == self._job.steps

    @property
    def micro_batch(self) -> int:
        """Return the number of images of a micro-batch."""
        return self._portion

    def begin_with(self, micro_batch: int, *, most: bool, room: int) -> None:
        """Save memory from the beginning if it was short before. All machines divide a batch alike,
        since its statistics depend on it.
        """
        self._frugal = most

    def advance(self) -> Progress:
        """Do a micro-batch of one turn. Raises InvalidRunFile for a bad chunk or a nonfinite
        loss.
        """
        if self.done:
            raise RuntimeError("this task is done")
        began = perf_counter()
        first = self._step * self._job.batch_size
        size = min(self._job.batch_size, len(self._images) - first)
        micro = self._micro(size)
        if self._turn == 0:
            real = self._load(first + self._in_turn, micro)
            self._judge(real, self._noise(size, micro), micro / size)
        else:
            self._fool(self._drawn(size, micro), micro / size)
        self._in_turn += micro
        preview = self._preview(began)
        ended = self._in_turn == size and self._finish_turn(size)
        figures = self._read(began, ended)
        samples = min(self._step * self._job.batch_size, len(self._images))
        return Progress(
            step=self._step,
            steps=self._job.steps,
            samples=samples + (self._turn * size + self._in_turn) // 2,
            loss=figures["loss_d"] + figures["loss_g"] if figures else None,
            metrics=figures,
            preview=preview,
        )

    def result(self) -> tuple[Result, dict[str, Tensor]]:
        figures = self._figures.tolist()
        self._refuse_nan(figures)
        tenth = max(1, len(figures) // 10)  # a tenth at both ends, so that the two can be compared
        head, means = (
            [sum(column) / tenth for column in zip(*part, strict=True)]
            for part in (figures[:tenth], figures[-tenth:])
        )
        metrics = dict(zip(_FIGURES, means, strict=True))
        rate = {"lr": self._learners[0].rate(self._step - 1)}
        # the server applies its own rate to gradients
        applied = rate if self._job.update == "delta" else {}
        report = Result(
            steps=self._step,
            samples=len(self._images),
            loss_first=head[0] + head[1],
            loss_last=means[0] + means[1],
            metrics=metrics | {"micro_batch": float(self._portion)} | applied,
        )
        tensors = {name: to_host(value) for name, value in self._model.named_buffers()}
        for learner in self._learners:
            tensors |= learner.result()
        return report, {name: tensors[name] for name in self._order}

    def suspend(self) -> None:
        self._fakes.clear()  # drawn again from the same noise
        self._move("cpu")
        release_memory(self._device)

    def resume(self) -> None:
        self._move(self._device)

    def halve(self) -> int:
        """Draw the fakes twice from now on instead of keeping them; the running turn starts over.

        Raises MemoryError at the second time: smaller portions would have other statistics.
        """
        if self._frugal:
            raise MemoryError(
                f"{self._portion} images at once do not fit into the memory of this device, and "
                "smaller portions would change the result"
            )
        self._frugal = True
        self._learners[self._turn].drop()
        self._fakes.clear()
        self._now[1 if self._turn else slice(None)] = 0
        self._in_turn = 0
        with torch.no_grad():
            for name, value in self._model.named_buffers():
                value.copy_(self._statistics[name])
        release_memory(self._device)
        return self._portion

    def snapshot(self) -> dict[str, Tensor]:
        """Return weights, statistics, optimisers, sums and counters. Raises RuntimeError within a
        step.
        """
        if self._in_turn or self._turn:
            raise RuntimeError("a snapshot is taken between steps")
        tensors = _whole({name: learner.snapshot() for name, learner in self._named()})
        tensors |= {name: to_host(value) for name, value in self._model.named_buffers()}
        tensors["figures"] = to_host(self._figures)
        counters = [self._job.seed, self._step, int(self._frugal)]
        tensors[_COUNTERS] = torch.tensor(counters, dtype=torch.int64)
        return tensors

    def restore(self, snapshot: Weights) -> None:
        """Continue from a `snapshot`. Raises InvalidRunFile for the snapshot of another task."""
        tensors = {**dict(self._model.named_buffers()), "figures": self._figures}
        counters = snapshot.get(_COUNTERS, torch.zeros(0)).flatten().tolist()
        fits = len(counters) == 3 and counters[0] == self._job.seed
        fits = fits and 0 <= counters[1] <= self._job.steps
        for name, value in tensors.items():
            fits = fits and name in snapshot and snapshot[name].shape == value.shape
        if not fits or not all(
            learner.restore(_part(name, snapshot)) for name, learner in self._named()
        ):
            raise InvalidRunFile("this snapshot belongs to another task: start the task afresh")
        for name, value in tensors.items():
            value.copy_(snapshot[name])
        self._now.zero_()
        self._fakes.clear()
        self._turn = self._in_turn = 0
        self._step = int(counters[1])
        self._frugal |= bool(counters[2])
        self._statistics = self._copy_statistics()

    def _named(self) -> Iterator[tuple[str, Learner]]:
        yield from zip((DISCRIMINATOR, GENERATOR), self._learners, strict=True)

    def _copy_statistics(self) -> dict[str, Tensor]:
        """Return a copy of the networks' statistics."""
        return {name: value.clone() for name, value in self._model.named_buffers()}

    def _micro(self, size: int) -> int:
        left = size - self._in_turn
        parts = -(-left // self._portion)
        return -(-left // parts)  # equal parts, since a single image has no statistics

    def _noise(self, size: int, micro: int) -> Tensor:
        """Return the noise of the next images (micro, L), the same for any division of the
        batch.
        """
        drawn = normal(f"noise/{self._step}", self._job.seed, (size, self._latent))
        return to_device(
            torch.from_numpy(drawn[self._in_turn : self._in_turn + micro]), self._device
        )

    def _load(self, start: int, micro: int) -> Tensor:
        pixels = to_device(torch.from_numpy(self._images.read(start, start + micro)), self._device)
        return pixels.float().div_(127.5).sub_(1.0)  # (B, C, S, S)

    def _judge(self, real: Tensor, noise: Tensor, share: float) -> None:
        """Add the gradients of a micro-batch to the discriminator; `share` is its part of the
        step.
        """
        model = self._model
        with self._autocast:
            with torch.set_grad_enabled(not self._frugal):
                fakes = model.draw(noise)
            if not self._frugal:
                self._fakes[self._in_turn] = fakes
            on_real, on_fakes = model.judge(real), model.judge(fakes.detach())
            loss = F.binary_cross_entropy_with_logits(on_real, torch.ones_like(on_real))
            loss = loss + F.binary_cross_entropy_with_logits(on_fakes, torch.zeros_like(on_fakes))
        torch.autograd.backward(loss * share)
        accuracies = [(on_real > 0).float().mean(), (on_fakes < 0).float().mean()]
        figures = torch.stack([loss.detach().float(), torch.zeros_like(accuracies[0]), *accuracies])
        self._now.add_(figures, alpha=share)

    def _drawn(self, size: int, micro: int) -> Tensor:
        """Return the fakes that the discriminator saw, kept or drawn again."""
        if (fakes := self._fakes.pop(self._in_turn, None)) is not None:
            return fakes
        # the generator's running statistics already include this batch
        with self._autocast, statistics_kept(self._model.generator):
            return self._model.draw(self._noise(size, micro))

    def _fool(self, fakes: Tensor, share: float) -> None:
        """Add the gradients of a micro-batch to the generator; `share` is its part of the step."""
        model = self._model
        with self._autocast, _frozen(model.discriminator):
            on_fakes = model.judge(fakes)
            loss = F.binary_cross_entropy_with_logits(on_fakes, torch.ones_like(on_fakes))
        torch.autograd.backward(loss * share)
        self._now[1].add_(loss.detach().float(), alpha=share)

    def _finish_turn(self, size: int) -> bool:
        """Apply the gradients of a whole turn. Return True at the end of the step."""
        self._learners[self._turn].finish(self._step, size / len(self._images))
        self._in_turn = 0
        self._turn = 1 - self._turn
        self._statistics = self._copy_statistics()
        if self._turn:
            return False
        self._fakes.clear()
        self._figures[self._step] = self._now
        self._now.zero_()
        self._step += 1
        return True

    def _preview(self, now: float) -> str:
        """Return three of the fakes as text in dots, at most every two seconds; else no text."""
        if not self._fakes or now - self._shown_at < _PREVIEW_S:
            return ""
        self._shown_at = now
        some = to_pixels(to_host(next(iter(self._fakes.values()))[:_PREVIEWED]).numpy())
        return "\n".join(braille(tile(some, _PREVIEWED), _PREVIEW_SIGNS))

    def _read(self, began: float, ended: bool) -> dict[str, float]:
        """Wait for the device and read the figures: on a CPU always, on a GPU rarely and at the
        end.

        Return the figures of the finished step; {} within a step, or if they were not read.
        """
        if self._device != "cpu" and not self.done and began - self._read_at < _READ_S:
            return {}
        values = (self._figures[self._step - 1] if ended else self._now).tolist()
        self._refuse_nan([values])
        self._read_at = perf_counter()
        return dict(zip(_FIGURES, values, strict=True)) if ended else {}

    def _refuse_nan(self, figures: list[list[float]]) -> None:
        if not all(math.isfinite(value) for row in figures for value in row):
            raise InvalidRunFile(
                f"a loss is no longer a number (by step {self._step} of {self._job.steps});"
                " a lower [train] lr may help"
            )

    def _move(self, device: str) -> None:
        for learner in self._learners:
            learner.move(device)
        for value in self._model.buffers():
            value.data = value.data.to(device)
        self._now = self._now.to(device)
        self._figures = self._figures.to(device)


def portion(batch: int, config: DcganConfig) -> int:
    """Return the number of images in a micro-batch, the same on every device."""
    quick = int(_PORTION_FLOPS / max(1.0, flops_per_sample(config) / 2))
    return min(batch, max(_PORTION_MIN, quick))


@contextmanager
def _frozen(network: nn.Module) -> Iterator[None]:
    """Freeze the network in the block: it passes gradients on, but neither learns nor updates its
    statistics.
    """
    network.requires_grad_(False)
    try:
        with statistics_kept(network):
            yield
    finally:
        network.requires_grad_(True)


def _parameters(model: nn.Module, name: str) -> dict[str, nn.Parameter]:
    return {key: value for key, value in model.named_parameters() if key.startswith(f"{name}.")}


def _part(name: str, tensors: Weights) -> dict[str, Tensor]:
    start = f"{name}/"
    return {key[len(start) :]: value for key, value in tensors.items() if key.startswith(start)}


def _whole(parts: Mapping[str, Weights]) -> dict[str, Tensor]:
    """Return all parts as one state, each under its name: the inverse of `_part`."""
    return {f"{name}/{key}": value for name, part in parts.items() for key, value in part.items()}
