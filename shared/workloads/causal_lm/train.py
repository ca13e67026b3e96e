"""Task of a language model on one device: its windows of tokens and their loss; and the loss on
held-out text.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from shared.workloads.base import Data, Job, Weights
from shared.workloads.causal_lm.base_model import frozen_of
from shared.workloads.causal_lm.config import CausalConfig, flops_per_sample
from shared.workloads.causal_lm.model import build
from shared.workloads.data.dialogue_windows import DialogueWindows, learnt_share
from shared.workloads.data.pass_order import PassOrder
from shared.workloads.data.token_loss import Reading, heldout_loss
from shared.workloads.data.tokenizer import MARKED, dtype_of
from shared.workloads.data.windows import Windows, task_samples, windows_of
from shared.workloads.training.device_differences import to_device
from shared.workloads.training.step_loop import StepLoss, StepWork


class CausalWork(StepWork):
    """Training of a causal language model; see `StepWork`. A sample is a window."""

    def __init__(self, job: Job, weights: Weights, data: Data, device: str) -> None:
        config = CausalConfig.from_dict(job.config)
        counts = windows_of(data.manifest, config.context)
        order = PassOrder(counts, job.order_seed)
        rows = task_samples(order, job.start, job.stop, job.steps, job.batch_size)
        marked = dtype_of(data.manifest) == MARKED
        windows = DialogueWindows if marked else Windows
        self._windows = windows(data, config.context, config.shape.vocab_size, rows)
        self._learnt = learnt_share(data.manifest, config.context) if marked else None
        self._dropout = config.lora is not None and config.lora.dropout > 0
        frozen = frozen_of(config, data)
        self._causal = build(config, weights, frozen, device, config.base_precision)
        super().__init__(
            job,
            self._causal.module,
            device=device,
            samples=len(rows),
            flops=flops_per_sample(config),
        )

    @override
    def measure(self, start: int, stop: int) -> StepLoss:
        tokens = to_device(
            torch.from_numpy(self._windows.read(start, stop)), self.device
        )  # (B, T + 1)
        if self._dropout:
            self._causal.samples.draw(self.job, start, stop, self.device)
        return self._causal.loss(tokens, self._learnt)


def evaluate(
    config: CausalConfig, weights: Weights, heldout: Data, budget_s: float, stop: Callable[[], bool]
) -> dict[str, float]:
    """Return the metrics of a version; see `heldout_loss`."""
    marked = dtype_of(heldout.manifest) == MARKED
    model = build(config, weights, frozen_of(config, heldout), "cpu")
    model.module.train(False)

    @torch.inference_mode()
    def losses(windows: NDArray[np.int64]) -> NDArray[np.float32]:
        return model.losses(torch.from_numpy(windows), marked=marked).numpy()

    return heldout_loss(losses, _reading(config), heldout, budget_s, stop)


def _reading(config: CausalConfig) -> Reading:
    return Reading(
        context=config.context,
        vocab_size=config.shape.vocab_size,
        forward_flops=flops_per_sample(config) / 3,
    )
