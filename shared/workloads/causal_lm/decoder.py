"""Language model that continues many texts at once, with the keys and values of each in a slot.

The library's model runs unchanged, with a cache that writes each token into the row of its slot and
a mask that shows each text only its own past, as far as a sliding window reaches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.workloads.causal_lm.config import CausalConfig
from shared.workloads.causal_lm.model import CausalModel, Past
from shared.workloads.generation.prompt_text import PromptText, padded

CACHE_BYTES_MAX = 4 << 30  # keys and values of all slots, where texts exceed the training context


class SlotCache:
    """Keys and values of every layer, (S, heads, T, D) each, made when a layer first writes, and
    doubled in length as texts grow.

    The library calls `update` and `get_seq_length`.
    """

    def __init__(self, slots: int, length: int) -> None:
        self._slots = slots
        self._length = length  # places that a layer has at first
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._new = (torch.zeros(0, 0), torch.zeros(0, 0))  # slots and places of the new tokens
        self._rows: slice | Tensor = slice(0, 0)  # slots of the batch, a slice if in a row
        self._longest = 0  # most places that a token sees

    def begin(self, slots: Sequence[int], places: Tensor, longest: int) -> None:
        """Prepare for a batch of new tokens at places (B, T) that see at most `longest` places."""
        rows = torch.tensor(list(slots), device=places.device)
        in_a_row = range(slots[0], slots[0] + len(slots))
        self._rows = slice(in_a_row.start, in_a_row.stop) if list(slots) == list(in_a_row) else rows
        self._new = rows[:, None], places
        self._longest = longest

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        if layer not in self._layers or self._layers[layer][0].shape[2] < self._longest:
            pair = (self._grown(keys, layer, 0), self._grown(values, layer, 1))
            self._layers[layer] = pair
        views = []
        for cache, new in zip(self._layers[layer], (keys, values), strict=True):
            rows, places = self._new
            cache[rows, :, places] = new.transpose(1, 2)  # (B, T, heads, D)
            views.append(cache[self._rows][:, :, : self._longest])
        return views[0], views[1]

    def _grown(self, new: Tensor, layer: int, part: int) -> Tensor:
        """Return the keys or values of a layer, with room for the longest text."""
        length = self._length
        while length < self._longest:
            length *= 2
        cache = new.new_zeros(self._slots, new.shape[1], length, new.shape[3])
        if layer in self._layers:
            old = self._layers[layer][part]
            cache[:, :, : old.shape[2]] = old
        return cache

    def share(self, source: int, slot: int, count: int) -> None:
        """Copy the first `count` places of the slot `source` to `slot`."""
        for cache in (tensor for pair in self._layers.values() for tensor in pair):
            cache[slot, :, :count] = cache[source, :, :count]

    def get_seq_length(self, layer: int = 0) -> int:
        return 0


def _context(config: CausalConfig, slots: int) -> int:
    """Return the most tokens of a text: the training context, or the whole length of a model that
    was trained elsewhere, as far as the keys and values of all slots fit.
    """
    if not config.source:
        return config.context
    place_bytes = 8 * slots * config.shape.layers * config.shape.key_width
    return max(config.context, min(config.shape.positions, CACHE_BYTES_MAX // place_bytes))


class CausalDecoder(PromptText):
    """Decoder of a causal language model; see `Decoder`."""

    def __init__(
        self,
        config: CausalConfig,
        model: CausalModel,
        tokenizer: bytes | None,
        slots: int,
        device: str,
    ) -> None:
        super().__init__(tokenizer, config.shape.vocab_size)
        self.slots = slots
        self.context = _context(config, slots)
        self._device = device
        self._model = model
        model.module.train(False)
        self._cache = SlotCache(slots, config.context)

    @torch.inference_mode()
    def share(self, source: int, slot: int, count: int) -> None:
        self._cache.share(source, slot, count)

    def prefill(self, slot: int, tokens: Sequence[int], start: int) -> NDArray[np.float32]:
        places = range(start, start + len(tokens))
        logits: NDArray[np.float32] = self._read([slot], [list(tokens)], [list(places)])[0]
        return logits

    def prefill_many(
        self, slots: Sequence[int], prompts: Sequence[Sequence[int]]
    ) -> NDArray[np.float32]:
        padded_prompts = padded(prompts)
        places = [list(range(len(padded_prompts[0])))] * len(padded_prompts)
        return self._read(slots, padded_prompts, places, [len(prompt) - 1 for prompt in prompts])

    def decode_step(
        self, slots: Sequence[int], tokens: Sequence[int], places: Sequence[int]
    ) -> NDArray[np.float32]:
        return self._read(slots, [[token] for token in tokens], [[place] for place in places])

    @torch.inference_mode()
    def scores(self, tokens: Sequence[int], places: Sequence[int]) -> NDArray[np.float32]:
        indices = torch.tensor(list(places), device=self._device)
        batch = torch.tensor([list(tokens)], device=self._device)
        logits = self._model.logits(batch, logits_to_keep=indices)
        logits_read: NDArray[np.float32] = logits[0].float().cpu().numpy()
        return logits_read

    @torch.inference_mode()
    def _read(
        self,
        slots: Sequence[int],
        tokens: list[list[int]],
        places: list[list[int]],
        ends: Sequence[int] = (),
    ) -> NDArray[np.float32]:
        """Read tokens (B, T) at places (B, T); return logits (B, V) after the last token of each
        text, or after the tokens with the indices `ends`.
        """
        cache = self._cache
        at = torch.tensor(places, device=self._device)
        longest = max(place[-1] for place in places) + 1
        cache.begin(slots, at, longest)
        last = list(ends) or [len(tokens[0]) - 1] * len(tokens)
        last_places = sorted(set(last))
        columns = torch.arange(longest, device=self._device)
        visible = (columns <= at[:, :, None])[:, None]  # (B, 1, T, longest)
        logits = self._model.logits(
            torch.tensor(tokens, device=self._device),
            Past(visible, at),
            position_ids=at,
            past_key_values=cache,
            logits_to_keep=torch.tensor(last_places, device=self._device),
        )
        rows = [last_places.index(place) for place in last]
        logits_read: NDArray[np.float32] = logits[range(len(rows)), rows].float().cpu().numpy()
        return logits_read
