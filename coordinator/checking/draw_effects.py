"""Effects of a draw's result on an account, its pay and its update, in one transaction.

passed    frees the pay of work accepted up to it except for a bond, unless an older draw is open;
          ten passed draws vet the account. If it shows only a share of the work, the account is
          charged for the missing share
failed    suspends the account and forfeits its stake and the pay of this contribution
unproven  frees and forfeits nothing: what is at stake stays there, whatever passes later, and
          probation restarts, unless the organiser vouched for the account; it rests, longer each
          time in a row

Recomputes of refused updates free and forfeit nothing: one that passes repeats the refusal, so the
run is at fault, and pauses itself after a few.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from coordinator.accounts.suspension import suspend
from coordinator.database import contributions, recomputes, record, runs, verdicts, versions
from coordinator.database import volunteers as accounts
from coordinator.database.contributions import ContributionRow
from coordinator.database.ledger import debts, escrow, payments
from coordinator.database.ledger.payments import Payment
from coordinator.database.ledger.reversal import take_back
from coordinator.database.recomputes import RecomputeRow
from coordinator.database.volunteers import VolunteerRow
from coordinator.plan.merge_weights import staleness_weight
from coordinator.rules import refusals, standing
from coordinator.rules.draws import Result, bond, shortfall
from coordinator.rules.validation import PAID
from coordinator.runs.definition import definition

if TYPE_CHECKING:
    from sqlalchemy import Connection

UNPROVED = "not merged: it could not be proved; its pay stays at stake"


def settle(
    conn: Connection,
    row: RecomputeRow,
    result: Result,
    messages: tuple[str, str],
    now: float,
    share: float = 1.0,
) -> bool:
    """End a recompute with its result; return False if it had one before. `messages` are a sentence
    and the figures (a `Redone`, as JSON); `share` is the share of the work that it shows.
    """
    if not recomputes.end(conn, row.contribution_id, result, messages, now):
        return False
    if row.refusal and result == "passed":
        if row.refusal in refusals.ADVICE:
            _blame_run(conn, row, now)
        return True
    account = accounts.locked(conn, row.volunteer_id)
    if account.standing == "suspended":
        return True
    _count_unproven(conn, account, result, now)
    if row.refusal:
        if result == "failed":
            why = f"a recompute of task {row.task_id}, whose update was refused, differs from it"
            suspend(conn, account.id, why, now)
        return True
    contribution = contributions.by_id(conn, row.contribution_id)
    if result == "failed":
        why = f"a recompute of task {row.task_id} differs from what was submitted"
        suspend(conn, account.id, why, now)
        take_back(conn, [Payment.of(contribution)], why, now)
        return True
    before = standing.Account(
        state=account.standing, invited=account.invited, proofs=account.proofs
    )
    fresh = result == "passed" and recomputes.is_fresh(conn, row)
    after = standing.after_draw(before, result, fresh=fresh)
    if result == "unproven" and not account.invited:
        _leave_at_stake(conn, account, now)
    accounts.set_volunteer(conn, account.id, proofs=after.proofs)
    if after.state != before.state:
        (accounts.vet if after.state == "vetted" else accounts.doubt)(conn, account.id)
    if result == "passed":
        late = _admit(conn, account, now)
        if not account.invited:
            _charge(conn, account, contribution, share, now)
        _free(conn, account, late, now)
    return True


def _count_unproven(conn: Connection, account: VolunteerRow, result: Result, now: float) -> None:
    """Let an account rest whose recomputes prove nothing, longer each time in a row."""
    count = account.unproven + 1 if result == "unproven" else 0
    if count or account.unproven:
        until = now + standing.proof_rest_s(count) if count else None
        accounts.set_volunteer(conn, account.id, unproven=count, rest_until=until)


def _blame_run(conn: Connection, row: RecomputeRow, now: float) -> None:
    """Pause a run if recomputes repeated the refusals of several of its updates."""
    run = runs.by_id(conn, row.run_id)
    since = versions.get(conn, run.id, run.head).created_at
    repeated = recomputes.repeated_refusals(conn, run.id, since)
    accepted = contributions.accepted_since(conn, run.id, since)
    if run.state != "running" or not refusals.is_at_fault(repeated, accepted):
        return
    reason = refusals.explanation(row.refusal, repeated)
    runs.move(conn, run, "paused", runs.StateChange(at=now, actor="run", reason=reason))
    record.append(conn, "coordinator", "run.pause", run.name, reason, now)


def end_without_verdict(
    conn: Connection, row: RecomputeRow, messages: tuple[str, str], now: float
) -> bool:
    """End a draw of a task that drifts too far for a verdict, or diverges: the standing of its
    account stays. Return False if the draw had a result before.
    """
    if not recomputes.end(conn, row.contribution_id, "unproven", messages, now):
        return False
    account = accounts.locked(conn, row.volunteer_id)
    if row.refusal or account.standing == "suspended":
        return True
    if account.invited:
        release(conn, account, now)
    else:
        _leave_at_stake(conn, account, now)
    return True


def _leave_at_stake(conn: Connection, account: VolunteerRow, now: float) -> None:
    """Leave the pay of an account's work so far at stake: no later draw frees it. Draw the
    account's next contributions with certainty. Otherwise the next honest draw would free the pay
    of faked work of which nothing can be proved. Updates that are not merged yet are superseded,
    and their tasks go to other workers.
    """
    waiting = contributions.accepted_of(conn, account.id)
    for row in waiting:
        verdicts.decide(conn, row, "superseded", now=now, message=UNPROVED)
    escrow.hold(conn, waiting, now)
    newest = contributions.newest_of(conn, account.id)
    accounts.set_volunteer(conn, account.id, draws=0, unproved_to=newest)


def release(conn: Connection, account: VolunteerRow, now: float) -> None:
    """Free the pay that the passed draws of an account prove, and let its updates before the oldest
    open draw be merged.
    """
    _free(conn, account, _admit(conn, account, now), now)


def _free(
    conn: Connection, account: VolunteerRow, late: Sequence[ContributionRow], now: float
) -> None:
    """Pay superseded updates, and free the pay that the passed draws of an account prove."""
    escrow.pay(conn, late, now)
    proven = recomputes.proven(conn, account.id, account.unproved_to)
    escrow.free(conn, account.id, proven, escrow.bond_and_debt(conn, account), now)


def bond_of(account: VolunteerRow) -> int:
    """Return the bond of an account."""
    return bond(account.draws, account.accepted_micro / max(1, account.accepted))


def _charge(
    conn: Connection, account: VolunteerRow, row: ContributionRow, share: float, now: float
) -> None:
    """Charge an account for the share of a task that its passed draw did not show."""
    balances = payments.balances(conn, account.id)
    stake = escrow.at_stake(conn, account.id, after=account.unproved_to)
    stake += balances.pending_micro - balances.debt_micro
    debt_micro = shortfall(share, min(stake, max(bond_of(account), row.price_micro)))
    why = f"task {row.task_id}, recomputed elsewhere, proves {share:.1%} of its work"
    debts.charge(conn, account.id, row.id, debt_micro, why, now)


def _admit(conn: Connection, account: VolunteerRow, now: float) -> list[ContributionRow]:
    """Release the updates of an account before its oldest open draw for merging; supersede the
    updates that are too old by now, and return them.
    """
    late: list[ContributionRow] = []
    before = recomputes.proven(conn, account.id, account.unproved_to).before
    for row in contributions.unproven_of(conn, account.id, before):
        run = runs.by_id(conn, row.run_id)
        plan = definition(run).plan
        weight = 0.0
        if row.kind == plan.update:
            weight = staleness_weight(plan, run.head - row.base_version)
        if weight > 0.0:
            contributions.proved(conn, row.id, weight)
            continue
        message = f"version {run.head} was merged before its proof ended; {PAID}"
        verdicts.decide(conn, row, "superseded", now=now, message=message)
        late.append(row)
    return late
