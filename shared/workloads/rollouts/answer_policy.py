"""Model as a policy: decoders that generate answers, and log-probabilities of their tokens.

Shapes: B answers, T tokens of problem and answer, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from typing_extensions import override

from shared.workloads.base import Decoder, Weights
from shared.workloads.causal_lm import model as causal_lm
from shared.workloads.causal_lm.base_model import frozen_in
from shared.workloads.causal_lm.config import CausalConfig, frozen_files
from shared.workloads.causal_lm.decoder import CausalDecoder
from shared.workloads.gpt.decoder import GptDecoder
from shared.workloads.gpt.model import build
from shared.workloads.rollouts.config import RolloutsConfig
from shared.workloads.rollouts.problems import END, decoded, encoded


class ByteDecoder(GptDecoder):
    """Decoder of bytes; see `Decoder`."""

    def __init__(self, config: RolloutsConfig, weights: Weights, slots: int, device: str) -> None:
        super().__init__(config.network, weights, None, slots, device)
        self.end = END

    @override
    def encode(self, text: str, *, marks: bool = False) -> list[int]:
        return encoded(text) or [END]

    @override
    def spelling(self, token: int) -> bytes:
        return bytes([token] if token != END else [])

    @override
    def continuation(self, text: str) -> list[int]:
        return encoded(text)

    @override
    def decode(self, tokens: Sequence[int]) -> str:
        return decoded(tokens)


class Model(NamedTuple):
    """Model of a version; `scores` returns the logits (B, T, V) of tokens (B, T)."""

    module: nn.Module
    scores: Callable[[Tensor], Tensor]


Files = Callable[[str], Path]  # files of a run by name


def model_of(config: RolloutsConfig, weights: Weights, file: Files, device: str) -> Model:
    """Return a version's model."""
    if config.causal is not None:
        model = _from_library(config.causal, weights, file, device)
        return Model(model.module, model.logits)
    gpt = build(config.network, weights, device)
    return Model(gpt, lambda tokens: gpt.logits(gpt.hidden(tokens)))


def decoder_of(
    config: RolloutsConfig, weights: Weights, file: Files, slots: int, device: str
) -> Decoder:
    """Return a decoder of a version."""
    base = config.causal
    if base is None:
        return ByteDecoder(config, weights, slots, device)
    model = _from_library(base, weights, file, device)
    decoder = CausalDecoder(base, model, None, slots, device)
    decoder.end = config.end
    return decoder


def _from_library(
    base: CausalConfig, weights: Weights, file: Files, device: str
) -> causal_lm.CausalModel:
    frozen = frozen_in(base, {name: file(name) for name in frozen_files(base)})
    return causal_lm.build(base, weights, frozen, device, base.base_precision)


class Rows:
    """Problems with answers as rows of one length, (B, T): given tokens, and wanted tokens."""

    def __init__(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> None:
        rows = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
        longest = max(map(len, rows)) - 1
        self.given = torch.zeros((len(rows), longest), dtype=torch.int64)
        self.wanted = torch.zeros_like(self.given)
        self.mask = torch.zeros((len(rows), longest))  # 1 at each wanted token of the answer
        for place, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
            size = len(row) - 1
            self.given[place, :size] = torch.tensor(row[:-1])
            self.wanted[place, :size] = torch.tensor(row[1:])
            self.mask[place, len(prompt) - 1 : size] = 1

    def spread(self, values: Sequence[NDArray[np.float32]]) -> Tensor:
        """Return a value for each token of the answers, (B, T), zero elsewhere."""
        tensor = torch.zeros_like(self.mask)
        tensor[self.mask > 0] = torch.from_numpy(np.concatenate(values))
        return tensor


def log_probabilities(model: Model, rows: Rows, device: str, temperature: float) -> Tensor:
    """Return the log-probability of each wanted token, (B, T), zero outside the answers."""
    logits = model.scores(rows.given.to(device)).float() / temperature
    logprobs = torch.log_softmax(logits, -1)
    chosen_logprobs = logprobs.gather(-1, rows.wanted.to(device)[..., None])[..., 0]
    return chosen_logprobs * rows.mask.to(device)
