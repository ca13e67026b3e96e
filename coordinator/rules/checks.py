"""Checks of work: which contributions are looked into, and what a look proves. Pure rules.

    forward check   loss of the update on samples of its task and on foreign ones, chosen after it was
                    submitted: cheap, tells nearly all made-up work, and only ever orders a recompute
    recompute       the task done again from the committed inner state: the only thing that punishes

Which are drawn is a keyed hash of the contribution with a secret of the server: no client can know
before submitting, and a coordinator that starts again draws the same. New accounts are checked
always; after that a share falls with the streak of passed checks down to a floor, never to zero.
"""

from __future__ import annotations

import hmac
import math
from hashlib import sha256
from statistics import median
from typing import Literal

import msgspec

from shared.workloads.base import ForwardFigures

Kind = Literal["forward", "recompute"]
Result = Literal["passed", "failed", "unclear"]

COSINE_MIN = 0.98  # of a recompute beside the update: same arithmetic, same state (measured)
DROP_MIN = 0.0  # an update that raises the loss on its own task is no honest work
GAP_SHARE_MIN = 0.2  # of the median gap of vetted work: other data has 0.16 at most (measured)
PEERS_MIN = 8  # forward results of vetted work that a comparison needs
PRICE_WEIGHT_MAX = 4.0  # an expensive task is at most so many times likelier to be checked
DRAWS = float(1 << 64)


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Floors of the shares that are checked, from `[trust]` of the run file."""

    forward: float = 0.2
    recompute: float = 0.02


class Streaks(msgspec.Struct, frozen=True, kw_only=True):
    """Checks that an account passed in a row, by kind."""

    vetted: bool
    forward_streak: int
    recompute_streak: int


def chance(kind: Kind, standing: Streaks, rates: Rates, price: float = 1.0) -> float:
    """Return the probability of a check: max(floor, 1 / streak), dearer tasks likelier.

    `price` is relative to the run's usual task. Newcomers' forward checks are certain.
    """
    if kind == "forward":
        floor, streak = rates.forward, standing.forward_streak
        if not standing.vetted:
            return 1.0
    else:
        floor, streak = rates.recompute, standing.recompute_streak
    base = max(floor, 1.0 / max(1, streak))
    return min(1.0, base * min(PRICE_WEIGHT_MAX, max(1.0, price)))


def drawn(secret: bytes, kind: Kind, contribution: int, digest: str, chance: float) -> bool:
    """Return True if this contribution is checked. `digest` is of all that was submitted."""
    said = f"{kind}\n{contribution}\n{digest}".encode()
    value = int.from_bytes(hmac.new(secret, said, sha256).digest()[:8], "big")
    return value < chance * DRAWS


def seed(secret: bytes, contribution: int, digest: str) -> int:
    """Return the seed by which a check chooses its samples: 63 bits, unknown before submission."""
    said = f"samples\n{contribution}\n{digest}".encode()
    return int.from_bytes(hmac.new(secret, said, sha256).digest()[:8], "big") >> 1


def judge_forward(found: ForwardFigures, peers: list[float]) -> Result:
    """Judge a forward check by the gaps of peers that passed.

    Never punishes. Without enough peers, or where even their work shows no gap beyond the noise (a
    young model learns as much for foreign samples as for its own), only what makes the model worse
    on its own task fails, and only what makes it better passes.
    """
    if not (math.isfinite(found.drop) and math.isfinite(found.gap)):
        return "failed"
    if found.drop < DROP_MIN - found.noise:
        return "failed"
    usual = median(peers) if len(peers) >= PEERS_MIN else 0.0
    if usual > found.noise and found.gap + found.noise < GAP_SHARE_MIN * usual:
        return "failed"
    return "passed" if found.drop > found.noise else "unclear"


def judge_recompute(
    cosine: float, norm_ratio: float, *, comparable: bool, tolerance: float
) -> Result:
    """Judge a recompute: direction and length of the update beside ours.

    `comparable` is False where the worker's arithmetic is not ours (another device class or
    precision for which no tolerance was measured): then nothing is proved and no account punished.
    `tolerance` widens both bounds for what the codec and the arithmetic lose.
    """
    if not comparable:
        return "unclear"
    if not (math.isfinite(cosine) and math.isfinite(norm_ratio)):
        return "failed"
    low = COSINE_MIN - tolerance
    fits = cosine >= low and abs(norm_ratio - 1.0) <= (1.0 - low)
    return "passed" if fits else "failed"
