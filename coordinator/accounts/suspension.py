"""Suspension or ban of an account until the organiser lifts it.

The organiser's commands and failed checks call these functions within their transactions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from coordinator.database import contributions, recomputes, record, verdicts
from coordinator.database import volunteers as store
from coordinator.database.ledger import answer_pay, escrow
from coordinator.database.ledger.payments import Payment
from coordinator.database.ledger.reversal import TakenBack, take_back
from coordinator.database.members import member_rows
from coordinator.rules import reports
from coordinator.rules.validation import BANNED, FORGOTTEN
from shared.errors import BadRequest, Conflict, Forbidden

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.database.contributions import ContributionRow
    from coordinator.database.volunteers import VolunteerRow


REASON_CHARS_MAX = 300
UNMERGED = "what this account had at stake is given up: neither merged nor paid"


def reason_line(text: str) -> str:
    """Return a reason in the form that the record keeps: one printable line, perhaps empty."""
    return reports.line(text, REASON_CHARS_MAX)


def reason_of(text: str) -> str:
    """Return a reason as stored: one printable line. Raises BadRequest for an empty reason."""
    why = reason_line(text)
    if not why:
        raise BadRequest(
            "give a reason: the record keeps it, and the owner of the account reads it"
        )
    return why


def explained(reason: str, contact: str) -> str:
    """Return a reason as its owner reads it, with the contact to write to."""
    return f"{reason}; write to {contact or 'the organiser'}"


def ban(conn: Connection, row: VolunteerRow, reason: str, now: float) -> str:
    """Ban an account; return its id. Its updates that wait for a merge are paid like merged ones,
    and not merged; credits stay. Raises Forbidden.
    """
    detail = {"reason": record.reason(conn, row.id, reason)} if reason else ""
    _set_state(conn, row, "banned", detail, now)
    waiting = contributions.accepted_of(conn, row.id)
    _set_aside(conn, waiting, BANNED.message, now)
    member_rows.withdraw_all(conn, row.id, now)  # also cancels tasks returned just now
    escrow.pay(conn, waiting, now)
    return row.id


def unban(conn: Connection, row: VolunteerRow, now: float) -> str:
    """Lift the ban of an account; return its id. Raises Forbidden."""
    return _set_state(conn, row, "active", "", now)


def _set_state(
    conn: Connection, row: VolunteerRow, state: str, detail: dict[str, str] | str, now: float
) -> str:
    if row.state == "forgotten":
        raise Forbidden("this account was forgotten: it cannot be banned or unbanned")
    store.set_volunteer(conn, row.id, state=state)
    record.append(conn, "organiser", f"volunteer.{state}", row.id, detail, now)
    return row.id


def set_forgotten_aside(conn: Connection, volunteer_id: str, now: float) -> None:
    """Withdraw the data of a forgotten account; set aside, and pay, its updates that wait for a
    merge in runs on members' data.
    """
    waiting = contributions.accepted_at_home(conn, volunteer_id)
    _set_aside(conn, waiting, FORGOTTEN.message, now)
    member_rows.forget(conn, volunteer_id, now)  # also cancels tasks returned just now
    escrow.pay(conn, waiting, now)


def _set_aside(
    conn: Connection, waiting: Sequence[ContributionRow], message: str, now: float, **values: float
) -> None:
    """Set the state of locked updates that wait for a merge to superseded."""
    superseded = {"state": "superseded", "message": message} | values
    verdicts.decide_all(conn, [(row, superseded) for row in waiting], now)


def _forfeit(conn: Connection, volunteer_id: str, reason: str, now: float) -> TakenBack:
    """Forfeit an account's stake: escrow, unmerged work, open checks."""
    row = store.locked(conn, volunteer_id)
    waiting = contributions.accepted_of(conn, row.id)
    _set_aside(conn, waiting, UNMERGED, now, weight=0.0)
    totals = take_back(conn, [Payment.of(one) for one in waiting], reason, now)
    totals += take_back(conn, escrow.waiting(conn, row.id), reason, now)
    for number in recomputes.open_of(conn, row.id):
        recomputes.end(conn, number, "unproven", (UNMERGED, "{}"), now)
    newest = contributions.newest_of(conn, row.id)
    store.set_volunteer(conn, row.id, draws=0, proofs=0, unproved_to=newest)
    return totals


def suspend(
    conn: Connection, volunteer_id: str, reason: str, now: float, actor: str = "system"
) -> TakenBack:
    """Suspend an account and forfeit its stake. Raises NotFound."""
    store.existing(conn, volunteer_id)
    store.set_volunteer(conn, volunteer_id, standing="suspended", suspended_reason=reason)
    if actor == "organiser":
        reason = record.reason(conn, volunteer_id, reason)
    totals = _forfeit(conn, volunteer_id, reason, now)
    answers = answer_pay.forfeit(conn, volunteer_id, reason, now)
    forfeit = totals.pending_micro + totals.escrow_micro + answers
    detail = {"reason": reason, "forfeit_micro": forfeit}
    record.append(conn, actor, "volunteer.suspend", volunteer_id, detail, now)
    return totals


def unsuspend(conn: Connection, volunteer_id: str, reason: str, now: float) -> None:
    """Let a suspended account work again, on probation unless vouched for. Forfeited pay stays
    forfeited. Raises NotFound, Conflict.
    """
    row = store.existing(conn, volunteer_id)
    if row.standing != "suspended":
        raise Conflict(f"{row.nickname} is not suspended")
    store.set_volunteer(conn, row.id, standing="probation", suspended_reason="")
    if row.invited:
        store.vet(conn, row.id)
    detail = {"reason": record.reason(conn, row.id, reason)}
    record.append(conn, "organiser", "volunteer.unsuspend", row.id, detail, now)
