"""Audits: tasks that a vetted volunteer repeats for another and answers with sums of the result.
Pure rules.

    who      the first that asks: an account of another person as far as can be told (account,
             invite, network), on a processor
    agrees   the sums are those of the update that was submitted, but for rounding: that passes,
             but for a share that the organiser does again all the same
    differs  proves nothing: the organiser does the task again, and that settles both

Only what a processor did is audited: elsewhere the organiser could not compare an answer closely,
and one by a friend would be worth more than its own recompute.

An auditor is no authority. The answer of an auditor alone changes nothing of another account.
"""

from __future__ import annotations

import msgspec

from coordinator.rules.checks import HERE, Likeness, Redone
from coordinator.rules.likeness import LOOSE, bound, difference

AUDIT = "audit"  # a task of another volunteer that is done again
OPEN_MAX = 16  # audits offered at once
OFFERED_AFTER_S = 600.0  # after so long in the queue; too large for the server: at once
LEASES_PER_AUDIT = 10  # accepted contributions of an account for each audit that it may have
CONFIRM_MIN = 0.1  # share of agreeing answers that the organiser still recomputes


class AccountMarks(msgspec.Struct, frozen=True, kw_only=True):
    """Marks by which two accounts may be one person's."""

    volunteer: str
    invite: int | None = None
    network: str = ""  # "" is unknown


class WaitingAudit(msgspec.Struct, frozen=True, kw_only=True):
    """Audit without an auditor yet."""

    kind: str  # kind of the task that is repeated
    worker: AccountMarks
    declined: frozenset[str] = frozenset()  # accounts that gave it back


class Auditor(msgspec.Struct, frozen=True, kw_only=True):
    """Volunteer that asks for work and can audit."""

    person: AccountMarks
    kind: str  # class of its device
    accepted: int  # contributions, in all
    audits: int  # that it had


def may_audit(terms: WaitingAudit, auditor: Auditor) -> bool:
    """Return True if an auditor may have this audit now."""
    one, other = terms.worker, auditor.person
    same_invite = one.invite is not None and one.invite == other.invite
    same_network = bool(one.network) and one.network == other.network
    if one.volunteer == other.volunteer or same_invite or same_network:
        return False
    if other.volunteer in terms.declined:
        return False
    return auditor.kind == HERE and auditor.accepted >= LEASES_PER_AUDIT * (auditor.audits + 1)


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
    return difference(found.cosine, found.norm_ratio) <= LOOSE.difference


def made_up(said: Likeness, found: Redone) -> bool:
    """Return True if an answer, compared with the organiser's recompute, is farther off than its
    task drifts.
    """
    widest = bound(found, "float32", comparable=False).difference
    return difference(said.cosine, said.norm_ratio) > widest
