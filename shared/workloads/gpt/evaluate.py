"""Evaluation of a trained GPT: loss on held-out text, and sampling."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.errors import InvalidRunFile
from shared.workloads.base import Data, Weights
from shared.workloads.data.token_loss import Losses, Reading, heldout_loss
from shared.workloads.data.tokenizer import end_of_text, load_tokenizer
from shared.workloads.gpt.config import GptConfig, flops_per_sample
from shared.workloads.gpt.model import Gpt, KeyValueCache, build


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for sampling. `temperature` 0 takes the likeliest; `top_k` 0 allows every token."""

    max_tokens: int = 160
    temperature: float = 0.8
    top_k: int = 40


# The same settings in the form of the library transformers.
DRAWN = f"do_sample=True, temperature={Sampling().temperature}, top_k={Sampling().top_k}"


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


class TextGenerator:
    """Model that answers prompts on the CPU; without a tokenizer, numbers in a text are its
    tokens.
    """

    def __init__(self, config: GptConfig, weights: Weights, tokenizer: bytes | None) -> None:
        self._config = config
        self._model: Gpt = build(config, weights, "cpu").train(False)
        self._tokenizer = load_tokenizer(tokenizer) if tokenizer is not None else None
        self._end = end_of_text(self._tokenizer) if self._tokenizer else None

    def encode(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt; an empty one stands for the end of a previous text.

        Raises InvalidRunFile for unknown tokens.
        """
        if self._tokenizer:
            tokens = self._tokenizer.encode(prompt, add_special_tokens=False).ids
        else:
            tokens = [int(word) for word in prompt.split() if word.isascii() and word.isdecimal()]
        if any(token >= self._config.vocab_size for token in tokens):
            raise InvalidRunFile("the prompt has tokens that this model does not know")
        return tokens or [self._end or 0]

    def decode(self, tokens: Sequence[int]) -> str:
        if self._tokenizer:
            text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
            return text
        return " ".join(map(str, tokens))

    def text(self, prompt: str, sampling: Sampling, seed: int) -> Iterator[str]:
        """Yield the continuation of `prompt` in whole characters, the same for the same seed."""
        tokens: list[int] = []
        told = 0
        for token in self.tokens(self.encode(prompt), sampling, seed):
            tokens.append(token)
            text = self.decode(tokens)
            if len(text) > told and not text.endswith(
                "\ufffd"
            ):  # half a character: wait for the rest
                yield text[told:]
                told = len(text)

    @torch.inference_mode()
    def tokens(self, prompt: Sequence[int], sampling: Sampling, seed: int) -> Iterator[int]:
        """Yield new tokens after `prompt`, until the end of the text or `max_tokens`."""
        block = self._config.block_size
        generator = torch.Generator().manual_seed(seed & ((1 << 63) - 1))
        context = list(prompt)[-block:]
        kept: list[KeyValueCache] = []
        fed = 0  # tokens of the context that `kept` holds
        for _ in range(sampling.max_tokens):
            if not kept or fed == block:  # at the window's end: continue from its second half
                context = context[-max(1, block // 2) :] if kept else context
                kept = [KeyValueCache() for _ in range(self._config.n_layer)]
                fed = 0
            new = torch.tensor([context[fed:]])  # (1, T)
            hidden = self._model.hidden(new, kept, fed)
            fed = len(context)
            token = _draw(self._model.logits(hidden[0, -1]), sampling, generator)
            if token == self._end:
                return
            yield token
            context.append(token)


def _draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw one token from logits (V,); NaN (of a run that diverged) counts as zero."""
    logits = torch.nan_to_num(logits)
    if sampling.temperature <= 0:
        return int(logits.argmax())
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < len(logits):
        least = torch.topk(logits, sampling.top_k).values[-1]
        logits = logits.masked_fill(logits < least, -math.inf)
    return int(torch.multinomial(torch.softmax(logits, 0), 1, generator=generator))
