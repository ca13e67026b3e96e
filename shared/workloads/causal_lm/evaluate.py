"""Evaluation of a language model: loss on held-out text."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from shared.workloads.base import Data, Weights
from shared.workloads.causal_lm.base_model import frozen_of
from shared.workloads.causal_lm.config import CausalConfig, flops_per_sample, learnt_share
from shared.workloads.causal_lm.model import build
from shared.workloads.data.token_loss import Reading, heldout_loss


def evaluate(
    config: CausalConfig, weights: Weights, heldout: Data, budget_s: float, stop: Callable[[], bool]
) -> dict[str, float]:
    """Return the metrics of a version; see `heldout_loss`."""
    marked = learnt_share(heldout.manifest) is not None
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
