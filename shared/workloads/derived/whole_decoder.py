"""Decoder of an author's language model, which reads the whole text again for each token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.errors import InvalidRunFile
from shared.workloads.base import Config
from shared.workloads.derived.built_model import BuiltModel
from shared.workloads.derived.derived_facts import BLOCK
from shared.workloads.generation.prompt_text import PromptText, padded

_VOCABULARY = 1 << 20  # size of the vocabulary of a model that states no size


class WholeDecoder(PromptText):
    """Decoder of a model whose output for tokens (B, T) is logits (B, T, V), a table with `logits`,
    or a tuple that begins with logits; see `Decoder`.
    """

    def __init__(
        self, built: BuiltModel, config: Config, tokenizer: bytes | None, slots: int, device: str
    ) -> None:
        super().__init__(tokenizer, int(config.get("vocab_size", _VOCABULARY)))
        self.slots = slots
        self.context = int(config[BLOCK])
        self._built = built
        self._device = device
        self._texts: list[list[int]] = [[] for _ in range(slots)]
        built.model.eval()

    def share(self, source: int, slot: int, count: int) -> None:
        self._texts[slot] = self._texts[source][:count]

    def prefill(self, slot: int, tokens: Sequence[int], start: int) -> NDArray[np.float32]:
        self._texts[slot][start:] = tokens
        logits: NDArray[np.float32] = self._last([slot])[0]
        return logits

    def prefill_many(
        self, slots: Sequence[int], prompts: Sequence[Sequence[int]]
    ) -> NDArray[np.float32]:
        for slot, prompt in zip(slots, prompts, strict=True):
            self._texts[slot] = list(prompt)
        return self._last(slots)

    def decode_step(
        self, slots: Sequence[int], tokens: Sequence[int], places: Sequence[int]
    ) -> NDArray[np.float32]:
        for slot, token, place in zip(slots, tokens, places, strict=True):
            self._texts[slot][place:] = [token]
        return self._last(slots)

    def scores(self, tokens: Sequence[int], places: Sequence[int]) -> NDArray[np.float32]:
        scores: NDArray[np.float32] = self._logits([list(tokens)])[0, list(places)].numpy()
        return scores

    def _last(self, slots: Sequence[int]) -> NDArray[np.float32]:
        """Return the logits after the last token of each slot, (len(slots), V)."""
        texts = [self._texts[slot] for slot in slots]
        ends = torch.tensor([len(text) - 1 for text in texts])
        last: NDArray[np.float32] = self._logits(padded(texts))[
            torch.arange(len(ends)), ends
        ].numpy()
        return last

    @torch.inference_mode()
    def _logits(self, rows: list[list[int]]) -> Tensor:
        output: object = self._built.model(torch.tensor(rows, device=self._device))
        if isinstance(output, Mapping):
            output = output["logits"]
        elif isinstance(output, tuple):
            output = output[0]
        if not isinstance(output, Tensor) or output.ndim != 3:
            raise InvalidRunFile(
                f"{self._built.code.file}: the model returns no logits (batch, tokens, vocabulary)"
                " of tokens (batch, tokens), so it cannot write"
            )
        return output.float().cpu()
