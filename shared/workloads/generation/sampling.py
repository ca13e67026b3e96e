"""Sampling of a token from logits.

The random number of a token depends only on its sequence's seed and its place, not on the batch,
and the distribution is computed in float64. A batch's logits may differ from those of the sequence
alone in the last bits of float32, which changes a token only if its choice is that close.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from hashlib import sha256

import msgspec
import numpy as np
from numpy.typing import NDArray

from shared.errors import BadRequest

Floats = NDArray[np.float64]
LEFT_OUT = -1e30  # logit of a token that may not be chosen
SLACK = 0.02  # nats by which logits of the same weights may differ on other hardware


class SampledToken(msgspec.Struct, frozen=True, kw_only=True):
    """Token, its log-probability under the model (temperature 1), and the likeliest ones."""

    token: int
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()


class Shaping(msgspec.Struct, frozen=True, kw_only=True):
    """Options that change the model's logits before a token is chosen; none by default."""

    top_k: int = 0  # only this many of the likeliest tokens; 0 = all
    min_p: float = 0.0  # only tokens at least this share as likely as the likeliest
    presence_penalty: float = 0.0  # taken from the logits of tokens that the answer has
    frequency_penalty: float = (
        0.0  # taken from a token's logit for each time that the answer has it
    )
    repetition_penalty: float = 1.0  # divides logits of tokens in prompt or answer; above 1: fewer
    bias: tuple[tuple[int, float], ...] = ()  # tokens, and what is added to their logits

    def logits(
        self,
        logits: NDArray[np.floating],
        prompt: tuple[int, ...],
        counts: Mapping[int, int],
        temperature: float,
    ) -> Floats:
        """Return the logits (V,) to choose from; `counts` has the tokens of the answer so far."""
        scores = _finite(logits)
        if self.repetition_penalty != 1:
            tokens = np.array(sorted({*prompt, *counts}), np.int64)
            values = scores[tokens]
            scores[tokens] = np.where(
                values > 0, values / self.repetition_penalty, values * self.repetition_penalty
            )
        for token, count in counts.items():
            scores[token] -= self.presence_penalty + self.frequency_penalty * count
        for token, value in self.bias:
            scores[token] += value
        least = LEFT_OUT
        if 0 < self.top_k < len(scores):
            least = float(np.partition(scores, -self.top_k)[-self.top_k])
        if self.min_p > 0 and temperature > 0:
            least = max(least, float(scores.max()) + temperature * math.log(self.min_p))
        scores[scores < least] = LEFT_OUT
        return scores


def uniform(seed: int, place: int) -> float:
    """Return the number in [0, 1) that draws the token at `place` of a sequence."""
    digest = sha256(b"token\n%d\n%d" % (seed, place)).digest()
    return int.from_bytes(digest[:7], "big") / float(1 << 56)


def choose(
    logits: NDArray[np.floating],
    draw: float,
    *,
    temperature: float,
    top_p: float = 1.0,
    logprobs: int | None = None,
) -> SampledToken:
    """Choose a token from logits (V,). `temperature` 0 takes the likeliest.

    NaN (of a run that diverged) counts as zero. If `logprobs` is given, the result has the
    token's log-probability and that many of the likeliest tokens.
    """
    scores = _finite(logits)
    if temperature <= 0:
        token = int(scores.argmax())
    else:
        token = _draw_token(_tempered(scores, temperature), draw, top_p)
    if logprobs is None:
        return SampledToken(token=token)
    return probed(logits, token, logprobs)


def probed(logits: NDArray[np.floating], token: int, logprobs: int) -> SampledToken:
    """Return a token with its log-probability, and the `logprobs` likeliest tokens."""
    scores = _finite(logits)
    logprobs_all = scores - scores.max()
    logprobs_all -= math.log(float(np.exp(logprobs_all).sum()))
    first = np.argsort(-logprobs_all, kind="stable")[:logprobs] if logprobs else ()
    return SampledToken(
        token=token,
        logprob=float(logprobs_all[token]),
        top=tuple((int(index), float(logprobs_all[index])) for index in first),
    )


def agrees(
    logits: NDArray[np.floating], draw: float, token: int, *, temperature: float, top_p: float = 1.0
) -> bool:
    """Return True if a token could have been chosen from logits (V,) computed on other hardware.

    Greedy: no token is likelier by more than `SLACK` nats. Sampled: the draw lies within the
    token's part of [0, 1), or so close to it that a difference of `SLACK` nats explains it. Raises
    BadRequest for an unknown token.
    """
    scores = _finite(logits)
    if not 0 <= token < len(scores):
        raise BadRequest(f"there is no token {token}")
    if temperature <= 0:
        return bool(scores.max() - scores[token] <= SLACK)
    scores = _tempered(scores, temperature)
    if top_p >= 1:
        return bool(agree(scores[None], np.array([draw]), np.array([token]))[0])
    weights = np.exp(scores)
    weights /= weights.sum()
    surely, perhaps = _may_be_kept(weights, top_p)
    if not (surely[token] or perhaps[token]):
        return False
    surely[token] = perhaps[token] = False
    weight, before = float(weights[token]), np.arange(len(weights)) < token
    # the token's part begins earliest if all tokens after it are kept, and ends latest if no token
    # after it is kept
    least_before = float(weights[surely & before].sum())
    most_before = least_before + float(weights[perhaps & before].sum())
    least_after = float(weights[surely & ~before].sum())
    most_after = least_after + float(weights[perhaps & ~before].sum())
    low = least_before / (least_before + weight + most_after)
    end = most_before + weight
    return _within(low, end / (end + least_after), draw)


def _may_be_kept(weights: Floats, top_p: float) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return two masks (V,): the tokens that are among the likeliest tokens that reach `top_p`
    together on any hardware, and further tokens that are on some hardware.
    """
    order = np.argsort(-weights, kind="stable")
    sums = weights[order].cumsum()
    reach, last = SLACK * min(top_p, 1 - top_p), len(sums) - 1
    first_end, last_end = np.searchsorted(sums, [top_p - reach, top_p + reach])
    surely = weights > weights[order[min(int(first_end), last)]] * (1 + SLACK)
    possible = weights >= weights[order[min(int(last_end), last)]] * (1 - SLACK)
    return surely, possible & ~surely


def agree(
    logits: NDArray[np.floating], draws: Floats, tokens: NDArray[np.integer]
) -> NDArray[np.bool_]:
    """Return True for each of the tokens (T,) that could have been chosen from logits (T, V) at
    temperature 1 with the random numbers `draws` (T,); see `agrees`, which checks one token.
    """
    scores = _finite(logits)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    sums = weights.cumsum(1)
    rows, total = np.arange(len(tokens)), sums[:, -1]
    high = sums[rows, tokens] / total
    low = high - weights[rows, tokens] / total
    reach = SLACK * np.minimum(high, 1 - low)
    agreement: NDArray[np.bool_] = (low - reach <= draws) & (draws <= high + reach)
    return agreement


def _finite(logits: NDArray[np.floating]) -> Floats:
    scores: Floats = logits.astype(np.float64)
    return scores if math.isfinite(float(scores.sum())) else np.nan_to_num(scores)


def _tempered(scores: Floats, temperature: float) -> Floats:
    """Return scores (V,) divided by a temperature above 0, with the largest at 0, so that no
    temperature is too small: the other scores may become -inf.
    """
    with np.errstate(over="ignore"):
        tempered: Floats = (scores - scores.max()) / temperature
    return tempered


def _within(low: float, high: float, draw: float) -> bool:
    reach = SLACK * min(high, 1 - low)
    return low - reach <= draw <= high + reach


def _draw_token(scores: Floats, draw: float, top_p: float) -> int:
    """Return the token whose part of [0, 1) holds `draw`, among the likeliest tokens that reach
    `top_p` together; the largest of the scores is 0. The parts lie in the vocabulary's order, which
    rounding does not change.
    """
    weights = np.exp(scores)
    weights /= weights.sum()
    if top_p < 1:
        order = np.argsort(-weights, kind="stable")
        count = int(np.searchsorted(weights[order].cumsum(), top_p)) + 1
        weights[order[count:]] = 0.0
    sums = weights.cumsum()
    place = int(np.searchsorted(sums, draw * sums[-1], side="right"))
    return min(place, int(np.flatnonzero(weights)[-1]))
