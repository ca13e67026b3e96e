"""Audits: tasks that a vetted volunteer repeats for another, answering with sums of the result.
Pure rules.

    auditor  the first volunteer that asks for work: on a processor, and as far as can be told
             another person (account, invite, network)
    agrees   the sums match the submitted update except for rounding: the draw passes, but the
             organiser still recomputes a share of such audits
    differs  proves nothing: the organiser's recompute judges both accounts

Only tasks done on a processor are audited: for others the organiser could not compare an answer
closely, and a friend's answer would count for more than the organiser's own recompute.

An auditor's answer alone changes nothing of another account.
"""

from __future__ import annotations

from typing import Final

import msgspec

from coordinator.rules.draws import HERE, Likeness, Redone
from coordinator.rules.recompute_result import LOOSE, bound, difference, raw_difference

AUDIT: Final = "audit"  # kind of the tasks in which a volunteer repeats another's task
OPEN_MAX = 16  # audits offered at once
# Age from which a waiting recompute is offered; one that is too large for the server is offered at
# once.
OFFERED_AFTER_S = 600.0
PAY_PER_AUDIT = 10  # accepted pay that an account needs, as a multiple of its pay for audits
CONFIRM_MIN = 0.1  # least share of agreeing answers that the organiser recomputes


class AccountMarks(msgspec.Struct, frozen=True, kw_only=True):
    """Marks of an account: two accounts with an equal mark may belong to one person."""

    volunteer: str
    invite: int | None = None
    network: str = ""  # "" = unknown


class WaitingAudit(msgspec.Struct, frozen=True, kw_only=True):
    """Audit that has no auditor yet."""

    kind: str  # kind of the task that is repeated
    worker: AccountMarks
    declined: frozenset[str] = frozenset()  # accounts that gave the audit back
    price_micro: int = 0


class Auditor(msgspec.Struct, frozen=True, kw_only=True):
    """Volunteer that asks for work and can do audits."""

    person: AccountMarks
    kind: str  # class of its device
    accepted_micro: int  # pay of its accepted contributions
    audited_micro: int  # pay of the audits that it was given


def may_audit(terms: WaitingAudit, auditor: Auditor) -> bool:
    """Return True if an auditor may have this audit now."""
    worker, person = terms.worker, auditor.person
    same_invite = worker.invite is not None and worker.invite == person.invite
    same_network = bool(worker.network) and worker.network == person.network
    if worker.volunteer == person.volunteer or same_invite or same_network:
        return False
    if person.volunteer in terms.declined:
        return False
    audited_micro = auditor.audited_micro + terms.price_micro
    return auditor.kind == HERE and auditor.accepted_micro >= PAY_PER_AUDIT * audited_micro


def confirmed_chance(gained: int, stake: int | None) -> float:
    """Return the probability that the organiser still recomputes an agreeing answer; with it, an
    auditor who confirms a second account of its own loses as much as it gains.

    `gained` is the pay for the work, which the answer frees, plus the pay for the answer; `stake`
    is the auditor's further loss, None for an invited account.
    """
    if stake is None or gained <= 0:
        return CONFIRM_MIN
    return max(CONFIRM_MIN, gained / (gained + stake))


def agree(likeness: Likeness) -> bool:
    """Return True if an auditor's sums match the update's."""
    return difference(likeness.cosine, likeness.norm_ratio) <= LOOSE


def made_up(sums_of_auditor: Likeness, figures: Redone) -> bool:
    """Return True if an answer misses the loose bound around the organiser's recompute."""
    auditor = Redone(
        cosine=sums_of_auditor.cosine,
        norm_ratio=sums_of_auditor.norm_ratio,
        rounding=figures.rounding,
    )
    return raw_difference(auditor) > bound(figures, "float32", comparable=False)
