"""Proof that an answer was written by the named version with its seed: one pass over problem and
answer is compared with what was sent, see docs/decisions/0033-rollouts.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shared.workloads.generation.sampling import agrees, uniform

SLACK = 0.1  # nats by which a log-probability may differ on other hardware
# honest arithmetic has at most so many faulty tokens and this share
FAULTS, SHARE = 3, 0.005


def faults(
    scores: NDArray[np.floating],
    answer: Sequence[int] | NDArray[np.integer],
    said: Sequence[float] | NDArray[np.floating],
    seed: int,
    reach: float | NDArray[np.floating] = 0.0,
) -> NDArray[np.bool_]:
    """Return which tokens (T,) of an answer the version does not write with the seed.

    `scores` (T, V) are its logits by the temperature. A token must lie where the seed's number for
    its place falls, and have the log-probability that was `said`; `reach` is what rounding on the
    wire moves.
    """
    wide = scores.astype(np.float64)
    tokens = np.asarray(answer)
    true = wide[np.arange(len(tokens)), tokens] - np.logaddexp.reduce(wide, axis=1)
    far = np.abs(true - np.asarray(said, np.float64)) > SLACK + np.asarray(reach)
    drawn = [
        agrees(row, uniform(seed, place), int(token), temperature=1.0)
        for place, (row, token) in enumerate(zip(scores, tokens, strict=True))
    ]
    found: NDArray[np.bool_] = far | ~np.array(drawn, np.bool_)
    return found


def refuted(faulty: int, tokens: int) -> bool:
    """Return True if so many faulty tokens are no honest machine's. `tokens` are all that were read
    of a task or, for who cheats a little, of the draws of an account so far.
    """
    return faulty > FAULTS + SHARE * tokens
