"""The record: history cannot be changed, and what somebody changes all the same is found."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from sqlalchemy import Connection, func, select, text, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine

from coordinator.accounts.ledger import Ledger
from coordinator.database import record
from coordinator.database.engine.open_database import Database
from coordinator.database.ledger import payments, record_tree
from coordinator.database.tables.ledger import accounts, events, postings
from tests.support.account_rows import earn, pay

MIA = "volunteer-mia-000001"


async def test_the_database_itself_refuses_changes_of_history(database: Database) -> None:
    await database.write(lambda conn: earn(conn, pay()))
    for statement in (
        "UPDATE postings SET amount_micro = 1",
        "DELETE FROM postings",
        "UPDATE events SET memo = 'x'",
        "DELETE FROM events",
    ):
        with pytest.raises(DBAPIError, match="never change"):
            await database.write(lambda conn, s=statement: conn.execute(text(s)))  # type: ignore[misc]


async def test_sealing_goes_on_where_it_stopped(database: Database) -> None:
    await database.write(lambda conn: earn(conn, *(pay(n) for n in range(1, 8))))
    assert await database.write(lambda conn: record_tree.extend(conn, 5)) == 5
    await database.write(lambda conn: earn(conn, pay(20)))
    await database.write(lambda conn: record.append(conn, "organiser", "x", "y", {"n": 1}, 1.0))
    assert await database.write(record_tree.extend) == 11 + 1
    assert await database.write(record_tree.extend) == 0
    assert await Ledger(database).check() == ()


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
async def test_writers_do_not_wait_while_rows_are_sealed(database: Database) -> None:
    held = text(
        "SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() "
        "AND relation = 'events'::regclass AND mode = 'ShareRowExclusiveLock'"
    )
    await database.write(lambda conn: earn(conn, pay()))

    def sealed(conn: Connection) -> tuple[int, int]:
        return record_tree.extend(conn), conn.execute(held).scalar_one()

    assert await database.write(sealed) == (2, 0)


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
async def test_a_log_without_new_rows_is_not_locked(database: Database, database_url: str) -> None:
    await database.write(lambda conn: earn(conn, pay(), pay(2)))
    server = create_async_engine(database_url)
    async with server.connect() as other, asyncio.timeout(120):
        await other.execute(text("LOCK TABLE record IN ROW EXCLUSIVE MODE"))  # it writes rows
        assert await database.write(record_tree.extend) == 4
        await other.execute(text("LOCK TABLE events IN ROW EXCLUSIVE MODE"))
        assert await database.write(record_tree.extend) == 0
    await server.dispose()


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
async def test_writers_do_not_wait_while_two_replicas_seal(
    database: Database, database_url: str
) -> None:
    await database.write(lambda conn: earn(conn, pay()))
    await database.write(record_tree.extend)
    server = create_async_engine(database_url)
    waits = text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
    async with server.connect() as other, server.connect() as watch:
        await other.execute(text("LOCK TABLE events IN ROW EXCLUSIVE MODE"))  # it writes rows
        await other.execute(text("SELECT value FROM meta WHERE key = 'tree' FOR UPDATE"))
        sealing = asyncio.create_task(database.write(record_tree.extend))
        while not (await watch.execute(waits)).scalar_one():
            await asyncio.sleep(0.01)
        async with asyncio.timeout(120):
            await database.write(lambda conn: earn(conn, pay(2)))
        await other.rollback()
        assert await sealing >= 0
    await server.dispose()


async def test_sealing_while_others_post_leaves_no_gap(database: Database) -> None:
    def submit(number: int) -> Callable[[Connection], None]:
        return lambda conn: earn(conn, pay(number, 1))

    jobs = [database.write(submit(n)) for n in range(1, 41)]
    seals = [database.write(record_tree.extend) for _ in range(2)]
    await asyncio.gather(*jobs[:20], seals[0], *jobs[20:], seals[1])
    await database.write(record_tree.extend)
    assert await Ledger(database).check() == ()
    assert not await database.read(record_tree.has_backlog)


# What a person with the database in hands might do, and what the check then says.
TAMPERING = {
    "UPDATE postings SET amount_micro = amount_micro + 1 WHERE id = 1": "sum to 1",
    "UPDATE postings SET amount_micro = amount_micro + 2 WHERE id = "
    "1": "all accounts together hold 2 instead of 0",
    "UPDATE postings SET amount_micro = amount_micro * 2 WHERE event_id = 1": "not what was posted",
    "DELETE FROM meta WHERE key = 'tree'": "up to row 0 there are other rows than the tree has",
    "INSERT INTO events (id, key, digest, kind, memo, at) "
    "VALUES (0, 'earn:0', 'x', 'earn', '', 1)": "events: up to row 3 there are other rows",
    "UPDATE accounts SET balance_micro = balance_micro + 5 WHERE kind = "
    "'earned'": "its postings sum to",
    "UPDATE events SET contribution_id = 77 WHERE id = 1": "not what was posted",
    "UPDATE events SET at = at - 1 WHERE id = 2": "not what the tree says",
    "DELETE FROM postings WHERE event_id = 2; DELETE FROM events WHERE id = 2": "was removed since",
    "DELETE FROM postings WHERE event_id = 3; DELETE FROM events WHERE id = 3": "was removed since",
    "UPDATE accounts SET owner = 'volunteer-eve-00001' WHERE kind = "
    "'earned'": "not what was posted",
}


@pytest.mark.parametrize(("statements", "sentence"), TAMPERING.items())
async def test_tampering_is_found(database: Database, statements: str, sentence: str) -> None:
    def prepare(conn: Connection) -> None:
        earn(conn, pay(1, 100))
        payments.post_step(conn, "pending", [pay(2, 50)], 3.0)

    await database.write(prepare)
    await database.write(record_tree.extend)
    assert await Ledger(database).check() == ()

    def tamper(conn: Connection) -> None:
        names = ("events", "postings")
        for name in names:
            if conn.dialect.name == "postgresql":
                conn.execute(text(f"ALTER TABLE {name} DISABLE TRIGGER USER"))
            else:
                conn.execute(text(f"DROP TRIGGER {name}_no_update"))
                conn.execute(text(f"DROP TRIGGER {name}_no_delete"))
        for statement in statements.split("; "):
            conn.execute(text(statement))

    await database.write(tamper)
    assert any(sentence in said for said in await Ledger(database).check())


async def test_a_negative_balance_is_refused_by_the_table_too(database: Database) -> None:
    await database.write(lambda conn: earn(conn, pay()))
    with pytest.raises(DBAPIError):
        await database.write(
            lambda conn: conn.execute(
                update(accounts).where(accounts.c.kind == "earned").values(balance_micro=-1)
            )
        )


async def test_the_record_notices_a_changed_line(database: Database) -> None:
    def write(conn: Connection) -> None:
        record.append(conn, "organiser", "volunteer.ban", MIA, {"why": "x" * 10_000}, 1.0)
        record.append(conn, "organiser", "volunteer.unban", MIA, "mended", 2.0)

    await database.write(write)
    await database.write(record_tree.extend)
    lines = await database.read(record.entries)
    assert [line.action for line in lines] == ["volunteer.unban", "volunteer.ban"]
    assert len(lines[1].detail) <= record.DETAIL_CHARS_MAX
    assert await Ledger(database).check() == ()

    def tamper(conn: Connection) -> None:
        off = "ALTER TABLE record DISABLE TRIGGER USER"
        postgresql = conn.dialect.name == "postgresql"
        conn.execute(text(off if postgresql else "DROP TRIGGER record_no_update"))
        conn.execute(text("UPDATE record SET actor = 'nobody' WHERE action = 'volunteer.ban'"))

    await database.write(tamper)
    assert "not what the tree says" in (await Ledger(database).check())[0]


async def test_postings_are_never_left_without_their_event(database: Database) -> None:
    await database.write(lambda conn: earn(conn, pay(1), pay(2, 0)))
    orphans = (
        select(func.count())
        .select_from(postings)
        .where(postings.c.event_id.not_in(select(events.c.id)))
    )
    assert await database.read(lambda conn: conn.execute(orphans).scalar()) == 0
