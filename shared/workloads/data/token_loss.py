"""Loss of a language model on windows of a dataset: on the held-out part, and of an update
beside its base. The model itself is a function of tokens, so that nothing here needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from time import monotonic

import msgspec
import numpy as np
from numpy.typing import NDArray

from shared.errors import InvalidRunFile
from shared.workloads.base import Data
from shared.workloads.data.windows import Windows, spread, windows_of

_EVAL_TOKENS = 32_768
_EVAL_FLOPS = 6e11  # a quarter of a minute on a slow core
_LOGITS_MAX = 16 << 20  # elements held at a time

Loss = Callable[[NDArray[np.int64]], float]  # tokens (B, T + 1) to the mean loss, nats a token


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a model as a reader: tokens of a window, vocabulary, cost of a window forward."""

    context: int
    vocab_size: int
    forward_flops: float


def heldout_loss(
    loss: Loss, reading: Reading, heldout: Data, budget_s: float, stop: Callable[[], bool]
) -> dict[str, float]:
    """Mean loss over windows that depend on the model's shape and the data alone; `budget_s` and
    `stop` only end it early.

    "loss" in nats a token, "perplexity", "tokens" that were measured, "complete" 1 or 0, and
    "bits_per_byte" where the dataset knows its bytes a token. The chunks of `heldout` are the
    held-out ones. Raises InvalidRunFile.
    """
    T = reading.context
    wanted = max(8, min(_EVAL_TOKENS // T, int(_EVAL_FLOPS / reading.forward_flops)))
    rows = spread(windows_of(heldout.manifest, T), wanted)
    if not len(rows):
        raise InvalidRunFile(f"no held-out chunk has more than the {T} tokens of a window")
    windows = Windows(heldout, T, reading.vocab_size, rows)
    batch = max(1, min(16, _LOGITS_MAX // (T * reading.vocab_size)))
    ends = monotonic() + budget_s
    total, done = 0.0, 0
    while done < len(windows) and not (done and (stop() or monotonic() > ends)):
        size = min(batch, len(windows) - done)
        total += loss(windows.read(done, done + size)) * size
        done += size
    mean = total / done
    found = {
        "loss": mean,
        "perplexity": math.exp(min(mean, 700.0)),
        "tokens": float(done * T),
        "complete": float(done == len(windows)),
    }
    bytes_per_token = float(heldout.manifest.meta.get("bytes_per_token", 0))
    if bytes_per_token > 0:
        found["bits_per_byte"] = mean / math.log(2) / bytes_per_token
    return found
