"""Crowd in one process: workers in turns on one device, and the coordinator's merges between them.

A round is the product's: inner steps of `[train]`, the codec with error feedback, the merge with
the plan's phases, steadiness and cooling, and the link to the next published weights. There is no
queue, no HTTP and no check of updates, so a card can train millions of parameters in minutes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor

from coordinator.aggregation import step
from coordinator.aggregation.server_optimizer import Push
from coordinator.plan.plan import in_phase, phase_index, plan
from coordinator.rules import steadiness
from coordinator.rules.steadiness import Heading
from shared.tensors.downlink import LINK_CODEC, LINK_CODECS, Following, write_link
from shared.tensors.frame import open_frame
from shared.tensors.quantize import EXACT_CODECS, Residual, codec
from shared.tensors.spec import Schema
from shared.tensors.update import Delta
from shared.workloads.base import TrainSettings
from shared.workloads.gpt.config import GptConfig, schema
from shared.workloads.gpt.model import Gpt, build
from shared.workloads.gpt.workload import GptWorkload
from shared.workloads.training.device_differences import autocast, to_host
from shared.workloads.training.lr_schedule import learning_rate
from shared.workloads.training.optimizer import InnerOptimizer

LOCAL_STEPS = 30  # of a preset that sets none


class CutOff(Exception):
    """The time of the experiment is over."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Model, steps of each worker and text as tokens: the same for all cells."""

    model: Mapping[str, Any]
    steps: int
    batch: int  # windows of one worker's step
    workers: int
    train: Tensor  # (N,) tokens
    validation: Tensor
    test: Tensor
    device: str
    precision: str = "float32"
    deadline: float = math.inf  # of `time.monotonic`
    heldout: int = 512  # windows of an evaluation, at most

    @property
    def config(self) -> GptConfig:
        return GptConfig.from_dict(self.model)

    @property
    def schema(self) -> Schema:
        return schema(self.config)

    def settings(self, rate: float) -> TrainSettings:
        precision: Any = self.precision
        return TrainSettings(lr=rate, precision=precision)

    def begin(self, seed: int) -> dict[str, Tensor]:
        """Return the weights of version 0."""
        return dict(GptWorkload().init(dict(self.model), seed))

    def windows(self, seed: int) -> Tensor:
        """Return the first tokens of all windows, (steps, workers x batch): a worker takes its
        columns, data-parallel all of them.
        """
        generator = torch.Generator().manual_seed(seed)
        most = len(self.train) - self.config.block_size - 1
        shape = (self.steps, self.workers * self.batch)
        return torch.randint(most, shape, generator=generator).to(self.device)


class Learner:
    """One worker: a model and its inner optimiser, both on the device."""

    def __init__(self, setting: Setting, weights: Mapping[str, Tensor], rate: float) -> None:
        self._setting = setting
        self._settings = setting.settings(rate)
        self.model: Gpt = build(setting.config, weights, setting.device)
        self._named = dict(self.model.named_parameters())
        self._optimizer = InnerOptimizer(self._named, self._settings)
        self._autocast = autocast(setting.precision, setting.device)
        self._span = torch.arange(setting.config.block_size + 1, device=setting.device)
        self.residual: Residual = {}

    def load(self, weights: Mapping[str, Any]) -> None:
        with torch.no_grad():
            for name, value in self._named.items():
                value.copy_(torch.from_numpy(weights[name]))

    def run(self, windows: Tensor, first: int) -> None:
        """Make a step for each row of `windows`; `first` is the global step of the first."""
        for offset, starts in enumerate(windows):
            if time.monotonic() > self._setting.deadline:
                raise CutOff
            rate = learning_rate(self._settings, first + offset, self._setting.steps)
            tokens = self._setting.train[starts[:, None] + self._span].long()
            with self._autocast:
                loss = self.model(tokens[:, :-1], tokens[:, 1:])
            torch.autograd.backward(loss)
            self._optimizer.step(rate)

    def weights(self) -> dict[str, Any]:
        return {name: to_host(value).numpy() for name, value in self._named.items()}

    @torch.no_grad()
    def loss(self, text: Tensor) -> float:
        """Return the mean loss over evenly spread windows of a text."""
        width = self._setting.config.block_size
        count = min(self._setting.heldout, (len(text) - 1) // width)
        places = torch.linspace(0, len(text) - width - 1, count, device=text.device).long()
        found = []
        for starts in torch.split(places, 64):
            tokens = text[starts[:, None] + self._span].long()
            with self._autocast:
                found.append(self.model.losses(tokens[:, :-1], tokens[:, 1:]).mean(1))
        return float(torch.cat(found).mean())


def alone(setting: Setting, rate: float, seed: int, batch: int) -> Learner:
    """Train one worker with the first `batch` windows of each step."""
    learner = Learner(setting, setting.begin(seed), rate)
    learner.run(setting.windows(seed)[:, :batch], 0)
    return learner


@dataclass(kw_only=True)
class Crowd:
    """Workers and the version that they train from; `table` is `[plan]` of a run file."""

    setting: Setting
    table: Mapping[str, Any]
    rate: float
    seed: int
    folder: Path
    done: int = 0  # steps of each worker
    version: int = 0
    up: int = 0  # bytes that one worker sent
    down: int = 0  # bytes of links
    headings: list[Heading] = field(default_factory=list)  # of the phase, newest first
    phase: int = 0

    def __post_init__(self) -> None:
        self.plan = plan(self.table)
        weights = self.setting.begin(self.seed)
        self.learners = [
            Learner(self.setting, weights, self.rate) for _ in range(self.setting.workers)
        ]
        self._windows = self.setting.windows(self.seed)
        for name in ("master", "published"):
            save_file(dict(weights), self.path(name))

    def path(self, what: str) -> Path:
        return self.folder / f"{what}-{self.version}"

    def rounds(self) -> Iterator[int]:
        """Make one version after the other, and yield their numbers."""
        while self.done < self.setting.steps:
            reached = phase_index(self.plan, self.version, 0, reached=self.phase)
            if reached != self.phase:
                self.phase, self.headings = reached, []
            now = in_phase(self.plan, self.phase)
            steps = min(now.local_steps or LOCAL_STEPS, self.setting.steps - self.done)
            self._train(steps)
            self._merge(self._encode())
            self.done += steps
            yield self.version

    def measured(self) -> Learner:
        """Return the first worker with the master weights."""
        with open_frame(self.path("master"), self.setting.schema, copy_on_write=True) as frame:
            self.learners[0].load({name: frame.array(name) for name in frame})
        return self.learners[0]

    def _train(self, steps: int) -> None:
        with open_frame(self.path("published"), self.setting.schema, copy_on_write=True) as frame:
            base = {name: frame.array(name) for name in frame}
            for index, learner in enumerate(self.learners):
                learner.load(base)
                own = slice(index * self.setting.batch, (index + 1) * self.setting.batch)
                learner.run(self._windows[self.done : self.done + steps, own], self.done)

    def _encode(self) -> list[Path]:
        local = [learner.weights() for learner in self.learners]
        with ThreadPoolExecutor(len(local)) as pool:
            found = list(pool.map(self._encoded, self.learners, local, range(len(local))))
        self.up += found[0].stat().st_size
        return found

    def _encoded(self, learner: Learner, local: Mapping[str, Any], index: int) -> Path:
        path, about = self.folder / f"update-{index}", self.setting.schema
        before = None if self.plan.codec in EXACT_CODECS else learner.residual
        with open_frame(self.path("published"), about) as base:
            made = codec(self.plan.codec).encode(Delta(base, local, about), about, path, before)
        learner.residual = made.residual or {}
        return path

    def _merge(self, updates: list[Path]) -> None:
        order, about = self._order(updates), self.setting.schema
        old = [self.path(what) for what in ("published", "master", "state")]
        self.version += 1
        output = step.run(order, self.path("master"), self.path("state"))
        self.headings.insert(0, Heading(order.push.scale, output.heading))
        how = Following(codec=codec(LINK_CODECS.get(self.plan.codec, LINK_CODEC)), rounded=False)
        link = self.folder / "link"
        write_link(old[0], self.path("master"), about, (link, self.path("published")), how)
        self.down += link.stat().st_size
        for path in old:
            path.unlink(missing_ok=True)

    def _order(self, updates: list[Path]) -> step.MergeOrder:
        now, state, scale = in_phase(self.plan, self.phase), self.path("state"), 1.0
        if now.momentum:
            scale = steadiness.outer_scale(self.headings, steadiness.window(1.0))
            now = msgspec.structs.replace(now, lr=now.lr * self.cooling())
        inputs = [
            step.Input(path=path, codec=now.codec, weight=1.0, volunteer=str(index))
            for index, path in enumerate(updates)
        ]
        return step.MergeOrder(
            plan=now,
            schema=self.setting.schema,
            base=self.path("master"),
            state=(state,) if state.exists() else (),
            inputs=tuple(inputs),
            push=Push(scale=scale, work=len(updates), workers=len(updates)),
            threads=len(updates),
        )

    def cooling(self) -> float:
        return steadiness.cooling(self.done / self.setting.steps, self.version)
