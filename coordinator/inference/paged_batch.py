"""Answers by the library transformers: its model of a version, and its continuous batching.

Keys and values of all texts lie in pages, so that many texts of any length fit. Its generation loop
runs in a thread of its own; tokens are drawn by the same code as the built-in engine's, so a seed
gives the same text on either.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Several
from typing import Any

import msgspec
import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor
from transformers.generation import GenerationConfig, LogitsProcessorList
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingLogitsProcessorList,
)

from shared.decoding import decode
from shared.errors import Internal, TooManyRequests
from shared.workloads.base import Converted
from shared.workloads.generation.batch import CHUNK, WAITING_MAX, Continuation, Made, Sequence
from shared.workloads.generation.prompt_text import PromptText
from shared.workloads.generation.sampling import Chosen

STREAMS = {"cpu": 16, "cuda": 64}  # texts that are written at once
PAGE = 32  # tokens
POLL_S = 0.01  # for a token, before orders are looked at again
STOP_S = 30.0


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that fit into a text, and memory for the pages of all texts."""

    context: int
    cache_bytes: int
    device: str

    @property
    def streams(self) -> int:
        return STREAMS[self.device]


class PagedBatch(PromptText):
    """A version that reads and continues texts: see `Reader` and `Batch`."""

    def __init__(self, files: Converted, tokenizer: bytes | None, room: Room) -> None:
        """Load the files of the format "transformers"."""
        config = _config(files.files["config.json"])
        super().__init__(tokenizer, config.vocab_size)
        self.context = room.context
        self._device = room.device
        self._streams = room.streams
        self._texts: dict[str, _Text] = {}
        self._model = _model(config, files.tensors).to(room.device)
        self._manager = _manager(self._model, _pages(config, room))
        self._manager.logit_processor = _processors(_Draws(self._texts))
        self._manager.warmup()  # memory that is not there is told here
        self._manager.start()

    def __len__(self) -> int:
        return len(self._texts)

    def add(self, sequence: Sequence) -> None:
        """Take in a sequence. Raises TooManyRequests when too many wait."""
        if len(self) >= self._streams + WAITING_MAX:
            raise TooManyRequests("too many prompts wait for an answer here", retry_after_s=5)
        room = self.context - len(sequence.prompt)
        self._texts[sequence.id] = _Text(sequence, self)
        self._manager.add_request(
            list(sequence.prompt),
            request_id=sequence.id,
            max_new_tokens=max(1, min(sequence.max_tokens, room)),
            eos_token_id=-1 if self.end is None else self.end,
            streaming=True,
        )

    def cancel(self, id: str) -> None:
        """Forget a sequence; its pages are free before the next token."""
        if self._texts.pop(id, None) is not None:
            self._manager.cancel_request(id)

    def step(self) -> Iterator[Made]:
        """Yield what was made since the last call; wait a moment for it."""
        for number in range(1 + len(self._texts)):
            found = self._manager.get_result(timeout=0.0 if number else POLL_S)
            if found is None:
                break
            yield from self._made(found)
        if self._texts and not self._manager.is_running():
            raise Internal("the continuous batching of transformers has ended")

    def scores(self, tokens: Several[int], places: Several[int]) -> NDArray[np.float32]:
        """Return logits (len(places), V) after the tokens at some places, all read at once."""
        given = torch.tensor([list(tokens)], device=self._device)
        wanted = torch.tensor(list(places), device=self._device)
        with self._manager.pause(), torch.inference_mode():
            read = self._model(input_ids=given, logits_to_keep=wanted, use_cache=False)
            found: NDArray[np.float32] = read.logits[0].float().cpu().numpy()
        return found

    def close(self) -> None:
        """End the loop, and let go of the memory."""
        self._texts.clear()
        self._manager.stop(block=True, timeout=STOP_S, hard_stop=True)
        self._manager.destroy()

    def _made(self, found: Any) -> Iterator[Made]:
        text = self._texts.get(found.request_id)
        if text is None:
            return
        if found.error is not None:  # as an error of the loop is: all its texts are lost
            raise Internal(f"the continuous batching of transformers failed: {found.error}")
        while text.told < len(found.generated_tokens):
            made = text.answer.add(text.drawn[text.told])
            text.told += 1
            if made.finish:
                self._texts.pop(found.request_id)
                if not found.is_finished():
                    self._manager.cancel_request(found.request_id)  # at a stop string
            yield made
            if made.finish:
                return


class _Text:
    """A text under way: tokens that were drawn, and how many of them were told."""

    def __init__(self, sequence: Sequence, reader: PagedBatch) -> None:
        self.answer = Continuation(sequence, reader)
        self.drawn: list[Chosen] = []
        self.told = 0


class _Draws(ContinuousBatchingLogitsProcessor):  # type: ignore[misc]
    """Chooses tokens as the built-in engine does, and leaves the library no other choice."""

    supported_kwargs: Mapping[str, type] = {}
    ignored_kwargs = ()

    def __init__(self, texts: Mapping[str, _Text]) -> None:
        self._all = texts
        self._rows: list[_Text | None] = []

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> Tensor:
        """Note whose logits come next; nothing has to be known on the device."""
        self._rows = [self._all.get(each.state.request_id) for each in requests_with_new_token]
        return torch.zeros(len(self._rows), dtype=torch.int32)

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        logits = scores.float().cpu().numpy()
        only = torch.full_like(scores, -torch.inf)
        for number, text in enumerate(self._rows):
            if text is not None:  # it was cancelled meanwhile
                chosen = text.answer.draw(logits[number], len(text.drawn))
                text.drawn.append(chosen)
                only[number, chosen.token] = 0.0
        return only


def _processors(draws: _Draws) -> Any:
    found = ContinuousBatchingLogitsProcessorList(LogitsProcessorList([draws]))
    found.tensors_required = 1
    return found


def _config(data: bytes) -> Any:
    found = transformers.AutoConfig.for_model(**decode(data, dict[str, Any]))
    found._attn_implementation = "sdpa"
    return found


def _model(config: Any, weights: Mapping[str, Tensor]) -> Any:
    transformers.utils.logging.disable_progress_bar()
    kind = getattr(transformers, config.architectures[0])
    whole = dict(weights)
    return kind.from_pretrained(None, config=config, state_dict=whole, dtype=torch.float32)


def _pages(config: Any, room: Room) -> Any:
    """Return pages for as many texts as there may be, or as fit; at least for one."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    page_bytes = 2 * 4 * config.num_hidden_layers * heads * width * PAGE
    each, streams = 1 + -(-room.context // PAGE), room.streams
    return ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=max(each, min(streams * each, room.cache_bytes // page_bytes)),
        max_batch_tokens=CHUNK + streams,
        max_requests_per_batch=streams,
        # Tokens are drawn in Python, and logits are those of float32.
        use_cuda_graph=False,
        use_async_batching=False,
        auto_switch_to_flash=False,
    )


def _manager(model: Any, pages: Any) -> Any:
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    how = GenerationConfig(do_sample=False, eos_token_id=-1)
    return model.init_continuous_batching(how, pages)
