"""GPT task on one device: its windows of tokens, and their loss."""

from __future__ import annotations

import torch
from typing_extensions import override

from shared.workloads.base import Data, Job, Weights
from shared.workloads.data.pass_order import PassOrder
from shared.workloads.data.windows import Windows, task_samples, windows_of
from shared.workloads.gpt.config import GptConfig, flops_per_sample
from shared.workloads.gpt.model import build
from shared.workloads.training.device_differences import to_device
from shared.workloads.training.learner import momenta
from shared.workloads.training.step_loop import StepLoss, StepWork


class GptWork(StepWork):
    """Training of a GPT; see `StepWork`. A sample is a window."""

    def __init__(self, job: Job, weights: Weights, data: Data, device: str) -> None:
        config = GptConfig.from_dict(job.config)
        order = PassOrder(windows_of(data.manifest, config.block_size), job.order_seed)
        rows = task_samples(order, job.start, job.stop, job.steps, job.batch_size)
        self._windows = Windows(data, config.block_size, config.vocab_size, rows)
        self._dropout = config.dropout > 0
        model = build(config, weights, device)
        self._dropping = model.samples
        super().__init__(
            job,
            model,
            device=device,
            samples=len(rows),
            flops=flops_per_sample(config),
            momenta=momenta(weights) if config.shared_momentum else None,
        )

    @override
    def measure(self, start: int, stop: int) -> StepLoss:
        tokens = to_device(
            torch.from_numpy(self._windows.read(start, stop)), self.device
        )  # (B, T + 1)
        if self._dropout:
            self._dropping.draw(self.job, start, stop, self.device)
        return StepLoss(self.model(tokens[:, :-1], tokens[:, 1:]))
