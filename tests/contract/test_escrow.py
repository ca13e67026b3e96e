"""Pay of accounts that nobody vouched for, on SQLite and PostgreSQL."""

from __future__ import annotations

import json

import pytest
from sqlalchemy import Connection, insert

from coordinator.accounts.accounts import Principal, Volunteers
from coordinator.accounts.suspension import suspend
from coordinator.config import Settings
from coordinator.database import audit, contributions, verdicts, volunteers
from coordinator.database.engine.open import Database
from coordinator.database.ledger import escrow, payments
from coordinator.database.ledger.payments import Payment
from coordinator.database.tables import accounts as tables
from coordinator.database.verdicts import Ruling
from coordinator.rules.standing import DAY_S, VEST_AFTER, VEST_DAYS
from shared.errors import BadRequest, Conflict
from shared.protocol.contributions import Verdict
from tests.support.account_rows import add_contribution, add_run, breaches
from tests.support.virtual_clock import VirtualClock

NEW = "volunteer-new-000001"
FRIEND = "volunteer-friend-01"
PRICE = 10


def add(conn: Connection, who: str, **values: object) -> None:
    row = {
        "id": who, "nickname": who, "nickname_key": who, "state": "active", "public": True,
        "trust": 1.0, "created_at": 0.0, "standing": "probation", "invited": False,
    }  # fmt: skip
    conn.execute(insert(tables.volunteers).values(**(row | values)))


def as_before(trust: float, streak: int) -> tuple[float, int]:
    return trust, streak


def merged(conn: Connection, run: int, who: str, now: float, weight: float = 1.0) -> int:
    """A contribution that is accepted, counted and merged; its number."""
    number = add_contribution(conn, run, who, "merged", PRICE, weight=weight, version=1)
    row = contributions.by_id(conn, number)
    volunteers.set_trust(conn, who, as_before, accepted=1)
    payments.post_pending_many(conn, [Payment.of(row)], now)
    escrow.vest_due(conn, who, now)
    verdicts.record(conn, [row], Ruling(state="merged", message="merged into version 1"), now)
    escrow.pay(conn, [row], now)
    return number


def accepted(conn: Connection, run: int, who: str, now: float) -> int:
    """A contribution that waits for a merge; its number."""
    number = add_contribution(conn, run, who, "accepted", PRICE, weight=1.0)
    payments.post_pending_many(conn, [Payment.of(contributions.by_id(conn, number))], now)
    return number


async def verdict(db: Database, number: int) -> Verdict:
    found = await db.read(lambda conn: verdicts.latest_verdict(conn, number))
    assert found is not None
    return found


async def have(db: Database, who: str = NEW) -> tuple[int, int, int]:
    found = await db.read(lambda conn: payments.balances(conn, who))
    return found.pending_micro, found.escrow_micro, found.earned_micro


async def setting(db: Database, **values: object) -> int:
    def write(conn: Connection) -> int:
        add(conn, NEW, **values)
        add(conn, FRIEND, standing="vetted", invited=True)
        return add_run(conn)

    return await db.write(write)


async def test_who_is_vouched_for_is_paid_at_once_and_a_stranger_after_later_work(
    database: Database,
) -> None:
    run = await setting(database)
    await database.write(lambda conn: merged(conn, run, FRIEND, 1.0))
    await database.write(lambda conn: merged(conn, run, NEW, 1.0))
    assert await have(database, FRIEND) == (0, 0, PRICE)
    assert await have(database) == (0, PRICE, 0)
    for _ in range(VEST_AFTER - 1):
        await database.write(lambda conn: merged(conn, run, NEW, 2.0))
    assert await have(database) == (0, PRICE * VEST_AFTER, 0)
    await database.write(lambda conn: merged(conn, run, NEW, 3.0))
    assert await have(database) == (0, PRICE * VEST_AFTER, PRICE)
    assert await breaches(database) == []


async def test_time_vests_only_with_a_check_passed_since(database: Database) -> None:
    run = await setting(database)
    await database.write(lambda conn: merged(conn, run, NEW, 1.0))
    late = VEST_DAYS * DAY_S + 2.0
    assert await database.write(lambda conn: escrow.vest_aged(conn, late)) == 0
    await database.write(lambda conn: volunteers.set_volunteer(conn, NEW, passed=1))
    assert await database.write(lambda conn: escrow.vest_aged(conn, late - 5.0)) == 0
    assert await database.write(lambda conn: escrow.vest_aged(conn, late)) == 1
    assert await have(database) == (0, 0, PRICE)
    assert await database.write(lambda conn: escrow.vest_aged(conn, late)) == 0
    assert await breaches(database) == []


async def test_a_suspended_account_forfeits_and_is_not_paid_for_what_is_under_way(
    database: Database,
) -> None:
    run = await setting(database)
    await database.write(lambda conn: merged(conn, run, NEW, 1.0))
    waiting = await database.write(lambda conn: accepted(conn, run, NEW, 1.0))
    before = await database.read(lambda conn: contributions.by_id(conn, waiting))
    taken = await database.write(lambda conn: suspend(conn, NEW, "copies", 2.0))
    assert (taken.contributions, taken.pending_micro, taken.escrow_micro) == (2, PRICE, PRICE)
    assert await have(database) == (0, 0, 0)
    # No merge takes it any more, and one that began with it pays nothing.
    after = await database.read(lambda conn: contributions.by_id(conn, waiting))
    assert (after.state, after.weight) == ("superseded", 0.0)
    await database.write(lambda conn: escrow.pay(conn, [before], 3.0))
    late = await database.write(lambda conn: merged(conn, run, NEW, 4.0))
    assert await have(database) == (0, 0, 0)
    said = await verdict(database, late)
    assert said.message == "merged into version 1; not paid: this account is suspended"
    assert said.credits_micro == 0
    said = await verdict(database, waiting)
    assert (said.message, said.credits_micro) == (
        "this account was suspended: neither merged nor paid", 0,
    )  # fmt: skip
    lines = await database.read(lambda conn: payments.history(conn, NEW, None, 10))
    assert [(line.kind, line.amount_micro, line.memo) for line in reversed(lines)] == [
        ("pending", PRICE, ""), ("in escrow", PRICE, ""), ("pending", PRICE, ""),
        ("forfeited", -PRICE, "copies"), ("forfeited", -PRICE, "copies"),
        ("pending", PRICE, ""), ("void", -PRICE, ""),
    ]  # fmt: skip
    assert await breaches(database) == []


async def test_nothing_is_paid_for_weight_zero_or_without_trust(database: Database) -> None:
    run = await setting(database, trust=0.2)
    number = await database.write(lambda conn: merged(conn, run, NEW, 1.0))
    assert await have(database) == (0, 0, 0)
    said = (await verdict(database, number)).message
    assert said.endswith("; not paid: the trust in this account is below 0.3")
    number = await database.write(lambda conn: merged(conn, run, FRIEND, 1.0, weight=0.0))
    assert await have(database, FRIEND) == (0, 0, 0)
    assert (await verdict(database, number)).message.endswith("it counts nothing in a merge")
    assert await breaches(database) == []


async def test_the_organiser_suspends_with_a_reason_and_vouches(
    database: Database,
) -> None:
    run = await setting(database)
    people = Volunteers(database, VirtualClock(), Settings(contact="ann@example.org"))
    await database.write(lambda conn: merged(conn, run, NEW, 1.0))
    with pytest.raises(BadRequest, match="needs a reason"):
        await people.suspend(NEW, "\x1b \n")
    with pytest.raises(Conflict, match="is not suspended"):
        await people.unsuspend(NEW, "a mistake")
    await people.suspend(NEW, "copies of others")
    me = await people.me(Principal(worker_id="worker", volunteer_id=NEW, nickname=NEW, trust=1.0))
    assert (me.standing, me.standing_reason) == (
        "suspended", "copies of others; write to ann@example.org",
    )  # fmt: skip
    assert await have(database) == (0, 0, 0)
    await database.write(lambda conn: volunteers.set_volunteer(conn, NEW, trust=0.0))
    await people.unsuspend(NEW, "a mistake")
    row = await database.read(lambda conn: volunteers.existing(conn, NEW))
    assert (row.standing, row.suspended_reason, row.trust) == ("probation", "", 1.0)
    lines = await database.read(lambda conn: audit.entries(conn))
    assert [(line.action, json.loads(line.detail)["reason"]) for line in lines] == [
        ("volunteer.unsuspend", "a mistake"), ("volunteer.suspend", "copies of others"),
    ]  # fmt: skip
    await people.vouch(NEW)
    await database.write(lambda conn: merged(conn, run, NEW, 2.0))
    assert await have(database) == (0, 0, PRICE)
    assert await breaches(database) == []
