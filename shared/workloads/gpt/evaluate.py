"""Evaluation of a trained GPT: loss on held-out text, and sampling."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import monotonic

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.errors import InvalidRunFile
from shared.workloads.base import Data, ForwardFigures, Job
from shared.workloads.data.pass_order import PassOrder
from shared.workloads.data.tokenizer import end_of_text, load_tokenizer
from shared.workloads.data.windows import Windows, of_pass, spread, windows_of
from shared.workloads.gpt.config import GptConfig, flops_per_sample
from shared.workloads.gpt.model import Gpt, Kept, build

_EVAL_TOKENS = 32_768
_EVAL_FLOPS = 6e11  # a quarter of a minute on a slow core
_CHECKED = 32  # windows of a forward check, of the task and foreign ones each
_CHECKED_MIN = 4  # of a model so large that fewer fit into the work of a check
_CHECK_FLOPS = 2e12  # of all its forward passes: a minute on a slow core
_CHECKED_FROM = 4096  # held-out windows that those are drawn from
_LOGITS_MAX = 16 << 20  # elements held at a time


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for sampling text.

    `temperature` 0 takes the likeliest token each time; `top_k` 0 allows every token.
    """

    max_tokens: int = 160
    temperature: float = 0.8
    top_k: int = 40


@torch.inference_mode()
def evaluate(
    config: GptConfig,
    weights: Mapping[str, Tensor],
    heldout: Data,
    budget_s: float,
    stop: Callable[[], bool],
) -> dict[str, float]:
    """Mean loss over windows that depend on the config and the data alone; `budget_s` and `stop`
    only end it early.

    "loss" in nats a token, "perplexity", "tokens" that were measured, "complete" 1 or 0, and
    "bits_per_byte" where the dataset knows its bytes a token. The chunks of `heldout` are the
    held-out ones.
    """
    T = config.block_size
    forward_flops = flops_per_sample(config) / 3
    wanted = max(8, min(_EVAL_TOKENS // T, int(_EVAL_FLOPS / forward_flops)))
    rows = spread(windows_of(heldout.manifest, T), wanted)
    if not len(rows):
        raise InvalidRunFile(f"no held-out chunk has more than the {T} tokens of a window")
    windows = Windows(heldout, T, config.vocab_size, rows)
    model = build(config, weights, "cpu").train(False)
    batch = max(1, min(16, _LOGITS_MAX // (T * config.vocab_size)))
    ends = monotonic() + budget_s
    total, done = 0.0, 0
    while done < len(windows) and not (done and (stop() or monotonic() > ends)):
        size = min(batch, len(windows) - done)
        tokens = torch.from_numpy(windows.read(done, done + size))  # (B, T + 1)
        total += float(model(tokens[:, :-1], tokens[:, 1:])) * size
        done += size
    loss = total / done
    found = {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "tokens": float(done * T),
        "complete": float(done == len(windows)),
    }
    bytes_per_token = float(heldout.manifest.meta.get("bytes_per_token", 0))
    if bytes_per_token > 0:
        found["bits_per_byte"] = loss / math.log(2) / bytes_per_token
    return found


@torch.inference_mode()
def check(
    job: Job,
    base: Mapping[str, Tensor],
    updated: Mapping[str, Tensor],
    data: tuple[Data, Data],
    seed: int,
) -> ForwardFigures:
    """Compare the loss before and after an update on windows of its task, and on held-out ones.

    Work on other data, or none, lowers both alike, or neither.
    """
    config = GptConfig.from_dict(job.config)
    own, heldout = data
    order = PassOrder(windows_of(own.manifest, config.block_size), job.order_seed)
    mine = of_pass(order, job.start, job.stop, job.steps, job.batch_size)
    foreign = spread(windows_of(heldout.manifest, config.block_size), _CHECKED_FROM)
    forward_flops = flops_per_sample(config) / 3
    count = max(_CHECKED_MIN, min(_CHECKED, int(_CHECK_FLOPS / (4 * forward_flops))))
    random = np.random.default_rng(seed)
    tokens = [
        Windows(source, config.block_size, config.vocab_size, rows).read(0, len(rows))
        for source, rows in (
            (own, _drawn(random, mine, count)),
            (heldout, _drawn(random, foreign, count)),
        )
    ]
    before, after = (
        [_losses(model, windows) for windows in tokens]
        for model in (build(config, weights, "cpu").train(False) for weights in (base, updated))
    )
    drops = [was - now for was, now in zip(before, after, strict=True)]
    drop, other = (float(each.mean()) for each in drops)
    noise = math.sqrt(sum(float(each.var(ddof=1)) / len(each) for each in drops if len(each) > 1))
    return ForwardFigures(drop=drop, gap=drop - other, noise=noise)


def _drawn(random: np.random.Generator, rows: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    return rows[np.sort(random.permutation(len(rows))[:count])]


def _losses(model: Gpt, windows: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the loss of each window of (N, T + 1) tokens, (N,), nats a token."""
    tokens = torch.from_numpy(windows)
    return np.array([float(model(row[None, :-1], row[None, 1:])) for row in tokens])


class TextGenerator:
    """A model that answers prompts on the CPU, one token at a time.

    Without a tokenizer a text is the numbers of its tokens.
    """

    def __init__(
        self, config: GptConfig, weights: Mapping[str, Tensor], tokenizer: bytes | None
    ) -> None:
        self._config = config
        self._model: Gpt = build(config, weights, "cpu").train(False)
        self._tokenizer = load_tokenizer(tokenizer) if tokenizer is not None else None
        self._end = end_of_text(self._tokenizer) if self._tokenizer else None

    def encode(self, prompt: str) -> list[int]:
        """The tokens of a prompt; an empty one is the end of the text before.

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
        """The continuation of `prompt` in pieces, whole characters only; the same seed gives the
        same text.
        """
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
        """New tokens after `prompt`, until the end of the text or `max_tokens`."""
        block = self._config.block_size
        generator = torch.Generator().manual_seed(seed & ((1 << 63) - 1))
        context = list(prompt)[-block:]
        kept: list[Kept] = []
        fed = 0  # tokens of the context that `kept` holds
        for _ in range(sampling.max_tokens):
            if not kept or fed == block:  # begin, or the window is full: go on from its second half
                context = context[-max(1, block // 2) :] if kept else context
                kept = [Kept() for _ in range(self._config.n_layer)]
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
    """One token from logits (V,); what is no number (a run that diverged) counts as zero."""
    logits = torch.nan_to_num(logits)
    if sampling.temperature <= 0:
        return int(logits.argmax())
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < len(logits):
        least = torch.topk(logits, sampling.top_k).values[-1]
        logits = logits.masked_fill(logits < least, -math.inf)
    return int(torch.multinomial(torch.softmax(logits, 0), 1, generator=generator))
