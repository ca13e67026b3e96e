"""Evaluation of a trained GPT: loss on held-out text."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from shared.workloads.base import Data, Weights
from shared.workloads.data.token_loss import Losses, Reading, heldout_loss
from shared.workloads.gpt.config import GptConfig, flops_per_sample
from shared.workloads.gpt.model import build


def evaluate(
    config: GptConfig, weights: Weights, heldout: Data, budget_s: float, stop: Callable[[], bool]
) -> dict[str, float]:
    """Return the metrics of a version; see `heldout_loss`."""
    return heldout_loss(_losses(config, weights), _reading(config), heldout, budget_s, stop)


def _reading(config: GptConfig) -> Reading:
    return Reading(
        context=config.block_size,
        vocab_size=config.vocab_size,
        forward_flops=flops_per_sample(config) / 3,
    )


def _losses(config: GptConfig, weights: Weights) -> Losses:
    model = build(config, weights, "cpu").train(False)

    @torch.inference_mode()
    def losses(windows: NDArray[np.int64]) -> NDArray[np.float32]:
        tokens = torch.from_numpy(windows)
        return model.losses(tokens[:, :-1], tokens[:, 1:]).numpy()

    return losses
