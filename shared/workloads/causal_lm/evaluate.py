"""Evaluation of a language model: loss on held-out text, and a sample."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from shared.workloads.base import Data, Weights
from shared.workloads.causal_lm.base_model import frozen_of
from shared.workloads.causal_lm.config import CausalConfig, flops_per_sample, learnt_share
from shared.workloads.causal_lm.decoder import CausalDecoder
from shared.workloads.causal_lm.model import build
from shared.workloads.data.token_loss import Reading, heldout_loss
from shared.workloads.generation.batch import Batch, Sequence

SAMPLE_TOKENS = 120
_TEMPERATURE, _TOP_P = 0.8, 0.95
# The same settings in the form of the library transformers.
DRAWN = f"do_sample=True, temperature={_TEMPERATURE}, top_p={_TOP_P}, top_k=0"


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


def continued(decoder: CausalDecoder, prompt: str, seed: int) -> str:
    """Return the continuation of a prompt, as far as it fits the context."""
    tokens = decoder.encode(prompt)[-(decoder.context // 2) :]
    count = min(SAMPLE_TOKENS, decoder.context - len(tokens))
    batch = Batch(decoder)
    batch.add(
        Sequence(
            id="sample",
            prompt=tuple(tokens),
            max_tokens=count,
            seed=seed,
            temperature=_TEMPERATURE,
            top_p=_TOP_P,
        )
    )
    text = ""
    while len(batch):
        text += "".join(made.text for made in batch.step())
    return text


def _reading(config: CausalConfig) -> Reading:
    return Reading(
        context=config.context,
        vocab_size=config.shape.vocab_size,
        forward_flops=flops_per_sample(config) / 3,
    )
