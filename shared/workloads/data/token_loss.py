"""Held-out loss of a language model, computed from a function of tokens, without torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from time import monotonic
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from shared.errors import InvalidRunFile
from shared.workloads.base import Data
from shared.workloads.data.tokenizer import LEARNT, MARKED, dtype_of
from shared.workloads.data.whole_dialogues import rows_of, whole_dialogues
from shared.workloads.data.windows import Windows, spread, windows_of

_EVAL_TOKENS = 32_768
_EVAL_FLOPS = 6e11  # twenty seconds on a slow core
_LOGITS_MAX = 16 << 20  # elements of the logits at one time

# Returns the loss of each target, (B, T), in nats, for tokens (B, T + 1).
Losses = Callable[[NDArray[np.int64]], NDArray[np.float32]]


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """Facts needed to measure a model: tokens of a window, vocabulary, forward cost of a window."""

    context: int
    vocab_size: int
    forward_flops: float


class _Read(NamedTuple):
    """Tokens of a measurement in batches, their number of rows, and figures about them."""

    batches: Iterator[NDArray[np.int64]]
    rows: int
    figures: dict[str, float]


def _windows(heldout: Data, reading: Reading) -> _Read:
    T = reading.context
    count = max(8, min(_EVAL_TOKENS // T, int(_EVAL_FLOPS / reading.forward_flops)))
    rows = spread(windows_of(heldout.manifest, T, last=True), count)
    windows = Windows(heldout, T, reading.vocab_size, rows)
    batch = max(1, min(16, _LOGITS_MAX // (T * reading.vocab_size)))
    starts = range(0, len(windows), batch)
    batches = (windows.read(start, min(start + batch, len(windows))) for start in starts)
    return _Read(batches, len(windows), {})


def _dialogues(heldout: Data, reading: Reading) -> _Read:
    T = reading.context
    most = max(8 * T, min(_EVAL_TOKENS, int(_EVAL_FLOPS * T / reading.forward_flops)))
    dialogues = whole_dialogues(heldout, reading.vocab_size, most)
    cut = sum(len(dialogue) > T + 1 for dialogue in dialogues)
    figures = {"dialogues": float(len(dialogues)), "cut": float(cut)}
    targets = max(1, min(16 * T, _LOGITS_MAX // reading.vocab_size))
    return _Read(rows_of(dialogues, T, targets), len(dialogues), figures)


def heldout_loss(
    losses: Losses, reading: Reading, heldout: Data, budget_s: float, stop: Callable[[], bool]
) -> dict[str, float]:
    """Return the mean loss of all counted targets: every target of a text's windows, or the targets
    in the answers of whole dialogues. The tokens that are read depend only on the model's shape and
    the data; `budget_s` and `stop` end the measurement early.

    The metrics are "loss" in nats a token, "perplexity", "tokens" (number counted), "complete" 1 or
    0, for dialogues "dialogues" and "cut" (dialogues longer than the context), and "bits_per_byte"
    if the manifest has `bytes_per_token`. `heldout` has the held-out chunks. Raises InvalidRunFile.
    """
    marked = dtype_of(heldout.manifest) == MARKED
    read = _dialogues(heldout, reading) if marked else _windows(heldout, reading)
    ends = monotonic() + budget_s
    # smallest target that counts: padding is -1, and answers carry the mark LEARNT
    least = LEARNT if marked else 0
    total, counted, done = 0.0, 0, 0
    for tokens in read.batches:
        if counted and (stop() or monotonic() > ends):
            break
        row_losses = losses(np.maximum(tokens, 0))[tokens[:, 1:] >= least]
        total += float(row_losses.sum(dtype=np.float64))
        counted += row_losses.size
        done += len(tokens)
    if not counted:
        raise InvalidRunFile("the held-out part has no token to measure a loss on")
    mean = total / counted
    metrics = {
        "loss": mean,
        "perplexity": math.exp(min(mean, 700.0)),
        "tokens": float(counted),
        "complete": float(done == read.rows),
        **read.figures,
    }
    bytes_per_token = float(heldout.manifest.meta.get("bytes_per_token", 0))
    if bytes_per_token > 0:
        metrics["bits_per_byte"] = mean / math.log(2) / bytes_per_token
    return metrics
