"""Checks of work: which contributions are looked into, and what a look proves. Pure rules.

    forward check   loss of the update on samples of its task and on foreign ones, chosen after
                    it was submitted: cheap, tells nearly all made-up work, only orders a recompute
    recompute       the task done again from the committed inner state: the only thing that punishes

    passed    it is the work that was leased
    failed    it is not
    unclear   nobody's fault: too small, too young, other arithmetic, a base that is pruned; other
              arithmetic earns nothing, for the class of a device is what its owner says
    unproven  what it was committed to was not revealed, or does not follow from earlier work

Which are drawn is a keyed hash of the contribution with a secret of the server: no client can know
before submitting, and a coordinator that starts again draws the same. New accounts are checked
always; after that a share falls with the streak of passed checks down to a floor, never to zero.
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Collection, Sequence
from hashlib import sha256
from statistics import median
from typing import Literal

import msgspec

from coordinator.rules.run_file import TrustSettings
from shared.workloads.base import ForwardFigures

Kind = Literal["forward", "recompute", "audit"]
Result = Literal["passed", "failed", "unclear", "unproven"]

COSINE_MIN = 0.98  # of a recompute beside the update: same arithmetic, same state (measured)
# In bfloat16 sums in another order leave another momentum, though nearly the same update: down to
# 0.79 where 80 tasks were done again.
STATE_MINS = {"float32": 0.98, "bfloat16": 0.5}
OPEN_MAX = 64  # recomputes under way; beyond that none is drawn
NEWCOMERS_OPEN_MAX, ACCOUNT_OPEN_MAX = 32, 4  # of them: who reveals nothing fills no list
AUDITS_WAITING_MAX = 28  # more wait for no auditor: they would take the places of others
REVEAL_S = 259_200.0  # for a machine to reveal what it committed to
KIND_CHARS_MAX = 16  # of the class of a device
HERE = "cpu"  # class of the device on which a server makes its recomputes
RECOMPUTE_FLOPS_MAX = 5e13  # of a task: about twenty minutes of a core
# Of a task that an auditor does: twenty minutes of a large processor, an hour of a graphics card.
AUDIT_CPU_FLOPS_MAX, AUDIT_FLOPS_MAX = 1e15, 5e16
HOLD_S = 600.0  # an auditor has a recompute for so long, and longer by renewing
AUDIT_TRIES_MAX = 2  # by auditors that could not do it; then the server does
# What the server compares itself waits for an auditor only while one is at work; what it cannot,
# for one that comes once a day.
AUDITOR_HERE_S, AUDITOR_AWAY_S = 600.0, 93_600.0
DROP_NOISES = 2.0  # standard errors: one alone failed 1.8 of 1,000 honest updates (measured)
DROP_MIN = 0.0  # an update that raises the loss on its own task is no honest work
GAP_SHARE_MIN = 0.2  # of the median gap of vetted work: other data has 0.16 at most (measured)
DROP_SHARE_MIN = 0.2  # of the median drop of vetted work: a random step may lower a loss a little
WHOLE_MIN = 0.5  # of a gradient that its samples confirm: 1 is honest, 0 noise (measured)
SPARSE_CODECS = frozenset({"topk-int4"})  # what they send late agrees with earlier samples
PEERS_MIN = 8  # forward results of vetted work that a comparison needs
PRICE_WEIGHT_MAX = 4.0  # an expensive task is at most so many times likelier to be checked
DRAWS = float(1 << 64)


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Floors of the shares that are checked; 0 is none."""

    forward: float = 0.0
    recompute: float = 0.0
    audit: float = 0.0

    @property
    def may_recompute(self) -> bool:
        """True where a recompute may be ordered, by its draw, as an audit or after a failed forward
        check: workers then commit to what it begins from.
        """
        return bool(self.forward or self.recompute or self.audit)


NO_RATES = Rates()
OPEN_RATES = Rates(forward=0.1, recompute=0.02, audit=0.02)  # of an open server


def rates_of(trust: TrustSettings, usual: Rates) -> Rates:
    """Return the shares that hold for a run: those of its file, else the usual ones."""
    return Rates(
        forward=usual.forward if trust.forward is None else trust.forward,
        recompute=usual.recompute if trust.recompute is None else trust.recompute,
        audit=usual.audit if trust.audit is None else trust.audit,
    )


class Likeness(msgspec.Struct, frozen=True, kw_only=True):
    """Sums of an audit beside others."""

    cosine: float
    norm_ratio: float


class Redone(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a recompute: the update beside ours, both before any codec; what was sent of it
    beside what its codec makes of it; and the optimiser's state that it left.
    """

    cosine: float
    norm_ratio: float
    written: float = 1.0  # cosine
    state_cosine: float | None = None  # None where none is kept
    sums: Likeness | None = None  # of an auditor's answer beside our update; None without one
    answered: Likeness | None = None  # and beside the update that was submitted


class Streaks(msgspec.Struct, frozen=True, kw_only=True):
    """Checks that an account passed in a row, by kind."""

    vetted: bool
    forward_streak: int
    recompute_streak: int


def chance(kind: Kind, standing: Streaks, rates: Rates, price: float = 1.0) -> float:
    """Return the probability of a check: max(floor, 1 / streak), dearer tasks likelier.

    `price` is relative to the run's usual task. Newcomers' forward checks are certain.
    """
    if kind == "audit":
        return rates.audit
    if kind == "forward":
        floor, streak = rates.forward, standing.forward_streak
    else:
        floor, streak = rates.recompute, standing.recompute_streak
    if not floor:
        return 0.0
    if kind == "forward" and not standing.vetted:
        return 1.0
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


def judge_forward(
    found: ForwardFigures, peers: Sequence[ForwardFigures], codec: str = "float32"
) -> Result:
    """Judge a forward check by peers that passed.

    Never punishes. Without enough peers, or where even their work shows no gap beyond the noise (a
    young model learns as much for foreign samples as for its own), only what makes the model worse
    on its own task fails, and only what makes it better passes. Of a gradient it is known without
    peers how much its samples confirm, but where the codec leaves most of it behind.
    """
    if not (math.isfinite(found.drop) and math.isfinite(found.gap)):
        return "failed"
    least = WHOLE_MIN if found.whole and codec not in SPARSE_CODECS else DROP_MIN
    if found.drop < least - DROP_NOISES * found.noise:
        return "failed"
    enough = len(peers) >= PEERS_MIN
    usual = median(each.gap for each in peers) if enough else 0.0
    if usual > found.noise and found.gap + found.noise < GAP_SHARE_MIN * usual:
        return "failed"
    clear = DROP_SHARE_MIN * median(each.drop for each in peers) if enough else 0.0
    return "passed" if found.drop > max(found.noise, clear) else "unclear"


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The device that computed: its class ("cpu", "cuda"), and its model where that is known."""

    kind: str
    model: str = ""


def device_kind(device: str) -> str:
    """Return the class of a device by its name ("cuda" of "cuda:0"), as it is stored."""
    return device.partition(":")[0][:KIND_CHARS_MAX]


def comparable(worker: Machine, auditor: Machine) -> bool:
    """Return True if a difference between two devices' results proves anything: processors, which
    are measured, and graphics cards of the same model, which add up alike but for the order.
    """
    if worker.kind != auditor.kind:
        return False
    model = worker.model.strip().casefold()
    return worker.kind == HERE or (bool(model) and model == auditor.model.strip().casefold())


def precision_of(precision: str, kind: str) -> str:
    """Return the precision whose tolerance holds: a graphics card may shorten the factors of
    float32.
    """
    return precision if kind == HERE else "bfloat16"


def flops_max(kind: str, served: Collection[str]) -> float:
    """Return how large a task may be to be done again, with auditors for these classes at work."""
    if kind not in served:
        return RECOMPUTE_FLOPS_MAX
    return AUDIT_CPU_FLOPS_MAX if kind == HERE else AUDIT_FLOPS_MAX


def is_served(kind: str, seen_at: float, now: float) -> bool:
    """Return True if what devices of this class computed is left to an auditor seen then."""
    return now - seen_at < (AUDITOR_HERE_S if kind == HERE else AUDITOR_AWAY_S)


def judge_recompute(found: Redone, precision: str = "float32", *, comparable: bool) -> Result:
    """Judge a recompute: direction and length of the update, that it is what was sent, and
    direction of the state left.

    `comparable` is False where the worker's arithmetic is not ours (another class of device): what
    differs then proves nothing; what agrees is proof all the same.
    """
    states = 1.0 if found.state_cosine is None else found.state_cosine
    fits = (
        all(map(math.isfinite, (found.cosine, found.norm_ratio, found.written, states)))
        and min(found.cosine, found.written) >= COSINE_MIN
        and abs(found.norm_ratio - 1.0) <= 1.0 - COSINE_MIN
        and states >= STATE_MINS[precision]
    )
    if fits:
        return "passed"
    return "failed" if comparable else "unclear"
