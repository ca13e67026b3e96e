"""Audits: tasks that a vetted volunteer repeats for another, answering with sums of the result.
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

AUDIT = "audit"  # kind of the tasks in which a volunteer repeats another's task
OPEN_MAX = 16  # audits offered at once
# wait of a recompute before it is offered; one that is too large for the server is offered at once
OFFERED_AFTER_S = 600.0
LEASES_PER_AUDIT = 10  # accepted contributions that an account needs for each audit that it gets
CONFIRM_MIN = 0.1  # least share of agreeing answers that the organiser recomputes


class AccountMarks(msgspec.Struct, frozen=True, kw_only=True):
    """Marks by which two accounts may be one person's."""

    volunteer: str
    invite: int | None = None
    network: str = ""  # "" = unknown


class WaitingAudit(msgspec.Struct, frozen=True, kw_only=True):
    """Audit without an auditor yet."""

    kind: str  # kind of the task that is repeated
    worker: AccountMarks
    declined: frozenset[str] = frozenset()  # accounts that gave the audit back


class Auditor(msgspec.Struct, frozen=True, kw_only=True):
    """Volunteer that asks for work and can audit."""

    person: AccountMarks
    kind: str  # class of its device
    accepted: int  # number of its accepted contributions
    audits: int  # number of audits that it was given


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
    """Return the probability that the organiser recomputes an agreeing answer nevertheless: so high
    that an auditor who confirms a second account of its own loses as much as it gains.

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
    """Return True if an answer differs from the organiser's recompute by more than its task
    drifts.
    """
    widest = bound(found, "float32", comparable=False).difference
    return difference(said.cosine, said.norm_ratio) > widest
