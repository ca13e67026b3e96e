"""GPT that continues many texts at once, with the keys and values of each in a slot.

The cache is made once, (L, 2, S, K, T, D) for S slots of T places; a token writes its own row. No
copy is made as long as the slots in use are the first ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shared.workloads.base import Weights
from shared.workloads.generation.prompt_text import PromptText, padded
from shared.workloads.gpt.config import GptConfig
from shared.workloads.gpt.model import Block, Gpt, build


class GptDecoder(PromptText):
    """Decoder of a GPT; see `Decoder`."""

    def __init__(
        self, config: GptConfig, weights: Weights, tokenizer: bytes | None, slots: int, device: str
    ) -> None:
        super().__init__(tokenizer, config.vocab_size)
        self.slots = slots
        self.context = config.block_size
        self._device = device
        self._model = build(config, weights, device).train(False)
        if device == "cpu":
            _lay_out(self._model)
        shape = (
            *(config.n_layer, 2, slots),
            *(config.key_heads, config.block_size, config.head_width),
        )
        self._cache = torch.zeros(shape, device=device)

    @torch.inference_mode()
    def share(self, source: int, slot: int, count: int) -> None:
        self._cache[:, :, slot, :, :count] = self._cache[:, :, source, :, :count]

    @torch.inference_mode()
    def prefill(self, slot: int, tokens: Sequence[int], start: int) -> NDArray[np.float32]:
        stop = start + len(tokens)
        batch = torch.tensor([list(tokens)], device=self._device)
        x, turn = self._model.placed(batch, slice(start, stop))  # (1, T, C)
        mask: Tensor | None = None
        if start:  # a new token sees all earlier tokens, and the new tokens up to itself
            mask = torch.ones(len(tokens), stop, dtype=torch.bool, device=self._device)
            mask = mask.tril(diagonal=start)
        for layer, block in enumerate(self._blocks):
            q, k, v = block.attn.split(block.ln1(x), turn)
            cache = self._cache[layer, :, slot : slot + 1]
            cache[0, :, :, start:stop], cache[1, :, :, start:stop] = k, v
            keys, values = cache[0, :, :, :stop], cache[1, :, :, :stop]
            x = x + block.attn.attend(q, keys, values, mask, causal=mask is None)
            x = x + block.mlp(block.ln2(x))
        logits: NDArray[np.float32] = self._logits(x[:, -1])[0]
        return logits

    @torch.inference_mode()
    def prefill_many(
        self, slots: Sequence[int], prompts: Sequence[Sequence[int]]
    ) -> NDArray[np.float32]:
        slot_rows = torch.tensor(list(slots), device=self._device)
        ends = torch.tensor([len(prompt) - 1 for prompt in prompts], device=self._device)
        batch = torch.tensor(padded(prompts), device=self._device)
        longest = batch.shape[1]
        x, turn = self._model.placed(batch, slice(0, longest))  # (B, T, C)
        for layer, block in enumerate(self._blocks):
            q, k, v = block.attn.split(block.ln1(x), turn)
            cache = self._cache[layer]
            cache[0, slot_rows, :, :longest], cache[1, slot_rows, :, :longest] = k, v
            x = x + block.attn.attend(q, k, v, causal=True)
            x = x + block.mlp(block.ln2(x))
        return self._logits(x[torch.arange(len(slots), device=self._device), ends])

    @torch.inference_mode()
    def decode_step(
        self, slots: Sequence[int], tokens: Sequence[int], places: Sequence[int]
    ) -> NDArray[np.float32]:
        count, longest = len(slots), max(places) + 1
        at = torch.tensor(list(places), device=self._device)
        slot_rows = torch.tensor(list(slots), device=self._device)
        batch = torch.tensor(list(tokens), device=self._device)
        x, turn = self._model.placed(batch[:, None], at[:, None])  # (B, 1, C)
        mask: Tensor | None = None
        if min(places) + 1 < longest:
            columns = torch.arange(longest, device=self._device)
            mask = (columns <= at[:, None])[:, None, None]  # (B, 1, 1, T)
        in_a_row = list(slots) == list(range(count))
        for layer, block in enumerate(self._blocks):
            q, k, v = block.attn.split(block.ln1(x), turn)
            cache = self._cache[layer]
            cache[0, slot_rows, :, at], cache[1, slot_rows, :, at] = k[:, :, 0], v[:, :, 0]
            if in_a_row:
                keys, values = cache[0, :count, :, :longest], cache[1, :count, :, :longest]
            else:
                keys, values = cache[0, slot_rows, :, :longest], cache[1, slot_rows, :, :longest]
            x = x + block.attn.attend(q, keys, values, mask)
            x = x + block.mlp(block.ln2(x))
        return self._logits(x[:, -1])

    @torch.inference_mode()
    def scores(self, tokens: Sequence[int], places: Sequence[int]) -> NDArray[np.float32]:
        hidden = self._model.hidden(torch.tensor([list(tokens)], device=self._device))
        rows = hidden[0, torch.tensor(list(places), device=self._device)]
        logits: NDArray[np.float32] = self._model.logits(rows).float().cpu().numpy()
        return logits

    @property
    def _blocks(self) -> Sequence[Block]:
        return list(self._model.blocks)  # type: ignore[arg-type]

    def _logits(self, x: Tensor) -> NDArray[np.float32]:
        logits: NDArray[np.float32] = self._model.logits(self._model.ln_f(x)).float().cpu().numpy()
        return logits


def _lay_out(model: Gpt) -> None:
    """Store by column the weights with more outputs than inputs.

    The product with one or two rows of inputs then takes a third to three quarters of the time
    (MKL, one thread); with sixteen rows the time is the same.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            rows, columns = module.weight.shape
            if rows > columns:
                module.weight.data = module.weight.data.t().contiguous().t()
