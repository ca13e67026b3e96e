"""Held-out loss of a language model, computed from a function of tokens, without torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from time import monotonic

import msgspec
import numpy as np
from numpy.typing import NDArray

from shared.errors import InvalidRunFile
from shared.workloads.base import Data
from shared.workloads.data.tokenizer import LEARNT, MARKED
from shared.workloads.data.windows import Windows, dtype_of, spread, windows_of

_EVAL_TOKENS = 32_768
_EVAL_FLOPS = 6e11  # twenty seconds on a slow core
_LOGITS_MAX = 16 << 20  # elements held at a time

# Returns the loss of each target, (B, T), in nats, for tokens (B, T + 1).
Losses = Callable[[NDArray[np.int64]], NDArray[np.float32]]


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """Facts needed to measure a model: tokens of a window, vocabulary, forward cost of a window."""

    context: int
    vocab_size: int
    forward_flops: float


def heldout_loss(
    losses: Losses, reading: Reading, heldout: Data, budget_s: float, stop: Callable[[], bool]
) -> dict[str, float]:
    """Return the mean loss of all counted targets: every target, or in dialogues the targets in
    answers. The windows depend only on the model's shape and the data; `budget_s` and `stop` only
    end the measurement early.

    The metrics are "loss" in nats a token, "perplexity", "tokens" (number counted), "complete" 1 or
    0, and "bits_per_byte" if the manifest has `bytes_per_token`. `heldout` has the held-out chunks.
    Raises InvalidRunFile.
    """
    T = reading.context
    window_count = max(8, min(_EVAL_TOKENS // T, int(_EVAL_FLOPS / reading.forward_flops)))
    rows = spread(windows_of(heldout.manifest, T, last=True), window_count)
    windows = Windows(heldout, T, reading.vocab_size, rows)
    batch = max(1, min(16, _LOGITS_MAX // (T * reading.vocab_size)))
    ends = monotonic() + budget_s
    # smallest target that counts: padding is -1, and answers carry the mark LEARNT
    least = LEARNT if dtype_of(heldout.manifest) == MARKED else 0
    total, counted, done = 0.0, 0, 0
    while done < len(windows) and not (counted and (stop() or monotonic() > ends)):
        size = min(batch, len(windows) - done)
        read = windows.read(done, done + size)
        row_losses = losses(np.maximum(read, 0))[read[:, 1:] >= least]
        total += float(row_losses.sum(dtype=np.float64))
        counted += row_losses.size
        done += size
    if not counted:
        raise InvalidRunFile("the held-out part has no token to measure a loss on")
    mean = total / counted
    metrics = {
        "loss": mean,
        "perplexity": math.exp(min(mean, 700.0)),
        "tokens": float(counted),
        "complete": float(done == len(windows)),
    }
    bytes_per_token = float(heldout.manifest.meta.get("bytes_per_token", 0))
    if bytes_per_token > 0:
        metrics["bits_per_byte"] = mean / math.log(2) / bytes_per_token
    return metrics
