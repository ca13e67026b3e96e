"""Audits: tasks that a vetted volunteer repeats for another and answers with sums of the result.
Pure rules.

    who      an account of another person as far as can be told (account, invite, network), with a
             device whose arithmetic can be compared, and by lot: its ticket is a hash of the seed
             of this audit, which nobody knows before, and of what one person has least of
    agrees   the sums are those of the update that was submitted, but for rounding: that passes,
             but for a share that the organiser does again all the same
    differs  proves nothing: the organiser does the task again, and that settles both

An auditor is no authority. What it says changes nothing of another account by itself.
"""

from __future__ import annotations

import math
from hashlib import sha256

import msgspec

from coordinator.rules.checks import (
    ComputeDevice,
    Likeness,
    Result,
    comparable,
)

AUDIT = "audit"  # a task of another volunteer that is done again
OPEN_MAX = 16  # audits offered at once
OFFERED_AFTER_S = 600.0  # that a recompute has waited; what is too large for the server at once
SPREAD_S = 7200.0  # over which tickets come up: who asks for work all the time gains little
LEASES_PER_AUDIT = 10  # accepted contributions of an account for each audit that it may have
CONFIRM_MIN = 0.1  # of the answers that agree, done again by the organiser all the same
AGREES_FROM = 0.98  # a larger difference orders the organiser's recompute
# Sums that are as far from the organiser's own result were made up, or half of the work (measured).
FAILED_BELOW = 0.97
TICKETS = float(1 << 64)


class AccountMarks(msgspec.Struct, frozen=True, kw_only=True):
    """Marks by which two accounts may be one person's."""

    volunteer: str
    invite: int | None = None
    network: str = ""  # "" is unknown

    @property
    def lot(self) -> str:
        """Return the identity by which accounts share one lot: invite, network, or account."""
        if self.invite is not None:
            return f"invite {self.invite}"
        return f"network {self.network}" if self.network else f"account {self.volunteer}"


class WaitingAudit(msgspec.Struct, frozen=True, kw_only=True):
    """Audit without an auditor yet."""

    seed: int
    age_s: float
    kind: str  # of the task that is done again
    worker: AccountMarks
    machine: ComputeDevice  # that did it
    declined: frozenset[str] = frozenset()  # accounts that gave it back


class Auditor(msgspec.Struct, frozen=True, kw_only=True):
    """Volunteer that asks for work and can audit."""

    person: AccountMarks
    machine: ComputeDevice
    accepted: int  # contributions, in all
    audits: int  # that it had


def ticket(seed: int, lot: str) -> float:
    """Return when an identity's lot comes up, in [0, 1) of the time over which lots spread."""
    said = sha256(f"{seed} {lot}".encode()).digest()
    return int.from_bytes(said[:8], "big") / TICKETS


def may_audit(terms: WaitingAudit, auditor: Auditor) -> bool:
    """Return True if an auditor may have this audit now."""
    one, other = terms.worker, auditor.person
    same_invite = one.invite is not None and one.invite == other.invite
    same_network = bool(one.network) and one.network == other.network
    if one.volunteer == other.volunteer or same_invite or same_network:
        return False
    if other.volunteer in terms.declined:
        return False
    if not comparable(terms.machine, auditor.machine):
        return False
    if auditor.accepted < LEASES_PER_AUDIT * (auditor.audits + 1):
        return False
    return terms.age_s >= SPREAD_S * ticket(terms.seed, other.lot)


def confirmed_chance(gained: int, stake: int | None) -> float:
    """Return the probability that the organiser recomputes an agreeing answer all the same: so
    large that an auditor of its own second account loses as much as that gains.

    `gained` is the pay that the answer frees, that of the work and that of the answer itself;
    `stake` what its auditor would lose beside, None for one that the organiser vouched for.
    """
    if stake is None or gained <= 0:
        return CONFIRM_MIN
    return max(CONFIRM_MIN, gained / (gained + stake))


def agree(found: Likeness) -> bool:
    """Return True if an auditor's sums match the update's."""
    return _within(found, AGREES_FROM)


def judge(found: Likeness | None, *, comparable: bool) -> Result:
    """Judge an answer by the sums of the organiser's own recompute; None where it has none."""
    if found is None:
        return "unproven"
    if _within(found, FAILED_BELOW):
        return "passed"
    return "failed" if comparable else "unproven"


def _within(found: Likeness, least: float) -> bool:
    told = found.cosine, found.norm_ratio
    return (
        all(map(math.isfinite, told))
        and found.cosine >= least
        and abs(found.norm_ratio - 1.0) <= 1.0 - least
    )
