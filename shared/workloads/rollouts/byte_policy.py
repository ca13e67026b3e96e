"""Model as a policy: a decoder that generates answers, and log-probabilities of their tokens.

Shapes: B answers, T tokens of problem and answer, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.workloads.base import Weights
from shared.workloads.gpt.decoder import GptDecoder
from shared.workloads.gpt.model import Gpt
from shared.workloads.rollouts.config import RolloutsConfig
from shared.workloads.rollouts.problems import END, decoded, encoded


class ByteDecoder(GptDecoder):
    """Decoder of bytes; see `Decoder`. Logits are divided by `temperature`."""

    def __init__(
        self,
        config: RolloutsConfig,
        weights: Weights,
        slots: int,
        device: str,
        temperature: float = 1.0,
    ) -> None:
        super().__init__(config.network, weights, None, slots, device)
        self.end = END
        self._temperature = temperature

    def encode(self, text: str, *, marks: bool = False) -> list[int]:
        return encoded(text) or [END]

    def decode(self, tokens: Sequence[int]) -> str:
        return decoded(tokens)

    def _logits(self, x: Tensor) -> NDArray[np.float32]:
        return super()._logits(x) / self._temperature


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
        found = torch.zeros_like(self.mask)
        found[self.mask > 0] = torch.from_numpy(np.concatenate(values))
        return found


def log_probabilities(model: Gpt, rows: Rows, device: str, temperature: float) -> Tensor:
    """Return the log-probability of each wanted token, (B, T), zero outside the answers."""
    logits = model.logits(model.hidden(rows.given.to(device))).float() / temperature
    said = torch.log_softmax(logits, -1)
    found = said.gather(-1, rows.wanted.to(device)[..., None])[..., 0]
    return found * rows.mask.to(device)
