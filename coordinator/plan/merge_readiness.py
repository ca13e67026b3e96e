"""Readiness for a merge: the quorum, the deadline and the grace of a plan, and what waits."""

from __future__ import annotations

import math

import msgspec

from coordinator.plan.plan_tables import Plan

ROUND = 1.25  # length of a round with transfers and waits, as a multiple of its longest training


class Pending(msgspec.Struct, frozen=True, kw_only=True):
    """Accepted contributions that wait to be merged."""

    count: int
    # accounts whose contributions these are, in a run on data of members; None = they do not count
    members: int | None = None
    work: int = 0  # steps (deltas) or samples (gradients)
    waited_s: float = 0.0  # time since the oldest contribution was accepted
    quiet_s: float = 0.0  # time since the newest contribution was accepted
    round_s: float = 0.0  # longest training time of one of these contributions
    live_workers: int = 1


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """Readiness for a merge."""

    now: bool  # True: the merge is due
    needs: int  # contributions that the quorum lacks
    members: int = 0  # members whose contributions must be among these
    deadline_in_s: float | None  # seconds until the merge is due anyway; None without a deadline


def quorum_of(plan: Plan, live_workers: int) -> int:
    """Return the number of contributions that make a merge, with this number of live workers."""
    quorum = max(plan.quorum, math.ceil(plan.quorum_share * live_workers))
    return min(quorum, max(1, live_workers))


def ready(plan: Plan, pending: Pending) -> Ready:
    """Return the readiness for a merge of the pending contributions under a plan. Contributions of
    too few members are never merged, whoever is live.
    """
    quorum = quorum_of(plan, pending.live_workers)
    needs = max(0, quorum - pending.count)
    if pending.members is None:
        lacks = min(plan.min_contributions, quorum) - pending.count
    else:
        lacks = plan.min_contributions - pending.members
    if lacks > 0:
        members = 0 if pending.members is None else lacks
        return Ready(now=False, needs=max(needs, lacks), members=members, deadline_in_s=None)
    # A deadline shorter than a round would leave out machines that only began later.
    patience_s = max(plan.deadline_seconds, ROUND * pending.round_s)
    left_s = max(0.0, patience_s - pending.waited_s) if plan.deadline_seconds else None
    enough_work = 0 < plan.work_target <= pending.work
    grace_s = _grace_left(plan, pending)
    if needs == 0 and grace_s > 0:
        left_s = grace_s if left_s is None else min(left_s, grace_s)
    is_due = (needs == 0 and grace_s <= 0) or enough_work or left_s == 0
    return Ready(now=is_due, needs=needs, deadline_in_s=left_s)


def _grace_left(plan: Plan, pending: Pending) -> float:
    """Return the seconds that a merge with a quorum still waits for the other live workers."""
    if pending.count >= pending.live_workers:
        return 0.0
    return max(0.0, plan.grace * pending.round_s - pending.quiet_s)
