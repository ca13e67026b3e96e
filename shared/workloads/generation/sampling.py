"""Sampling of a token from logits.

The random number of a token depends on the seed of its sequence and its place alone, never on the
batch, and the distribution is worked out in float64. Logits of a batch may differ from those of the
same sequence alone in the last bits of float32, so the tokens are the same unless two of them are
that near to each other.
"""

from __future__ import annotations

import math
from hashlib import sha256

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """A token, its log-probability under the model (temperature 1), and the likeliest ones."""

    token: int
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()


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
) -> Chosen:
    """Choose a token from logits (V,). `temperature` 0 takes the likeliest.

    What is no number (of a run that diverged) counts as zero. `logprobs` asks for the probability,
    and for so many of the likeliest tokens.
    """
    scores: Floats = np.nan_to_num(logits.astype(np.float64))
    if temperature <= 0:
        token = int(scores.argmax())
    else:
        token = _drawn(scores / temperature, draw, top_p)
    if logprobs is None:
        return Chosen(token=token)
    said = scores - scores.max()
    said -= math.log(float(np.exp(said).sum()))
    first = np.argsort(-said, kind="stable")[:logprobs]
    return Chosen(
        token=token,
        logprob=float(said[token]),
        top=tuple((int(each), float(said[each])) for each in first),
    )


def _drawn(scores: Floats, draw: float, top_p: float) -> int:
    weights = np.exp(scores - scores.max())
    weights /= weights.sum()
    if top_p >= 1:
        return min(int(np.searchsorted(weights.cumsum(), draw, side="right")), len(weights) - 1)
    order = np.argsort(-weights, kind="stable")
    sums = weights[order].cumsum()
    kept = int(np.searchsorted(sums, top_p)) + 1  # the fewest that reach top_p
    place = np.searchsorted(sums[:kept], draw * sums[min(kept, len(sums)) - 1], side="right")
    return int(order[min(int(place), kept - 1, len(order) - 1)])
