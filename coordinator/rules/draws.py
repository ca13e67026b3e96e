"""Draws: the choice of recomputes and their checkers, and the meaning of a result. Pure rules.

    passed    the recompute agrees: all pay accepted before it is freed, except for a bond
    failed    it differs on comparable arithmetic: the account is suspended
    unproven  nothing shows that the work was done: its pay stays at stake, like all older pay

A draw is a keyed hash of the contribution with a secret of the server: no client can predict it,
and a restarted coordinator draws the same. The probability of a draw is proportional to the
contribution's pay. It begins at certainty and falls with the account's draws to a floor, never to
zero, so that the first credits of an honest account are free after its second or third task.
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Collection
from hashlib import sha256
from typing import Literal

import msgspec

from coordinator.rules.run_file import TrustSettings

Kind = Literal["recompute", "audit"]
Result = Literal["passed", "failed", "unproven"]

FLOOR = 0.03  # least drawn share of an account's contributions on an open server
CERTAIN = 3  # first contributions of an account, which are drawn whatever their price
KIND_CHARS_MAX = 16  # longest name of a class of devices
HERE = "cpu"  # class of the device on which a server makes its recomputes
RECOMPUTE_FLOPS_MAX = 5e13  # operations of the largest task that a server recomputes
CORE_FLOPS = 1e10  # operations that move a recompute back by a second in the queue
SHARED_S = 86_400.0  # age up to which finished recomputes count for the queue's order and speed
OVERTAKES_FROM = 4.0  # a recompute may overtake another that is this many times larger
POSTPONED_S = 600.0  # wait before the server tries a failed recompute again
HOLD_S = 600.0  # lease of a checker on a recompute; a checker can renew it
CHECKER_TRIES_MAX = 2  # failed tries of checkers after which the server takes over
# A recompute waits for a checker that was seen within this time: the first for work of a processor,
# which the server can compare itself, the second for work that only a checker can compare.
CHECKER_HERE_S, CHECKER_AWAY_S = 600.0, 93_600.0
DRAWS = float(1 << 64)


def floor_of(trust: TrustSettings, usual: float) -> float:
    """Return the least probability of a draw in a run: the run file's, but at least the server's
    usual one, since a draw in one run frees pay of all runs.
    """
    return max(usual, trust.recompute)


def chance(draws: int, price: int, mean: float, floor: float) -> float:
    """Return the probability that a contribution is drawn, which falls with its account's earlier
    draws.

    `price` and `mean`, the account's usual price, are micro-credits. Floor 0 turns draws off.
    """
    if not floor:
        return 0.0
    if draws < CERTAIN:
        return 1.0
    return min(1.0, price / max(1.0, mean) * max(floor, _usual_chance(draws)))


def bond(draws: int, mean: float) -> int:
    """Return the pay that stays at stake when a draw passes, so that faking does not pay until the
    next draw.

    A faker gains the price with probability 1 - h and loses the stake with the draw's probability
    h. Faking never pays at a stake of price / h, not even right after a draw.
    """
    return math.ceil(mean / max(FLOOR, _usual_chance(draws)))


def _usual_chance(draws: int) -> float:
    """Return the probability of a draw at the usual price, before the floor."""
    return 1.0 / max(1, draws - 1)


def shortfall(share: float, stake: int) -> int:
    """Return the debt of an account for a draw that shows only a share of its work. `stake` is the
    loss for a wholly faked task: the price divided by the draw's probability, at most the account's
    stake.
    """
    return math.ceil((1.0 - share) * max(0, stake))


def drawn(secret: bytes, kind: Kind, contribution: int, digest: str, chance: float) -> bool:
    """Return True if this contribution is drawn. `digest` covers the whole submission."""
    message = f"{kind}\n{contribution}\n{digest}".encode()
    value = int.from_bytes(hmac.new(secret, message, sha256).digest()[:8], "big")
    return value < chance * DRAWS


class Likeness(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of two updates, or of their sums."""

    cosine: float
    norm_ratio: float


class Redone(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a recompute, which compares the encoded updates of worker and server."""

    cosine: float
    norm_ratio: float
    # length of what the codec changed in the server's update, relative to the update
    rounding: float = 0.0
    # length of the difference of the buffers, relative to their own change from the base
    buffers: float = 0.0
    sums: bytes = b""  # sums of the server's update, in the form of an audit's answer; float32
    # length of the difference between the server's update and its update from a slightly changed
    # base, relative to the server's update; measured if the tight bound was missed
    drift: float | None = None
    loss: float | None = None  # last loss of the recompute; None if it is no number


class ComputeDevice(msgspec.Struct, frozen=True, kw_only=True):
    """Class ("cpu", "cuda") of a device, and its model; "" for an unknown model."""

    kind: str
    model: str = ""


def device_kind(device: str) -> str:
    """Return the class of a device by its name ("cuda" of "cuda:0"), as it is stored."""
    return device.partition(":")[0][:KIND_CHARS_MAX]


def comparable(worker: ComputeDevice, checker: ComputeDevice) -> bool:
    """Return True if a difference between two devices' results proves anything: on processors,
    whose differences are measured, and on graphics cards of one model, which differ only in the
    order of sums.
    """
    if worker.kind != checker.kind:
        return False
    model = worker.model.strip().casefold()
    return worker.kind == HERE or (bool(model) and model == checker.model.strip().casefold())


def precision_of(precision: str, kind: str) -> str:
    """Return the precision whose bounds apply; graphics cards may round float32 factors."""
    return precision if kind == HERE else "bfloat16"


def is_served(kind: str, seen_at: float, now: float) -> bool:
    """Return True if a checker last seen at `seen_at` still covers this class of devices."""
    return now - seen_at < (CHECKER_HERE_S if kind == HERE else CHECKER_AWAY_S)


def unprovable(kind: str, flops: float, served: Collection[str]) -> str:
    """Return why no active machine can recompute a task of `flops` operations that a device of this
    class did; "" if a machine can.
    """
    if flops <= RECOMPUTE_FLOPS_MAX or kind in served:
        return ""
    return "it is too large to recompute on this server: a checker can (`coordinator checker`)"
