"""Chores of the coordinator, the same on SQLite and PostgreSQL."""

from __future__ import annotations

import msgspec
from sqlalchemy import Connection, func, insert, select, update

from coordinator.database import contributions, tasks
from coordinator.database.engine.open_database import Database
from coordinator.database.ledger import payments
from coordinator.database.tables.contributions import contributions as contributions_table
from coordinator.runs.settlement import close
from tests.support.account_rows import breaches
from tests.support.run_rows import add_contribution, add_run, add_worker, claim, queue_of
from tests.support.virtual_clock import VirtualClock

MANY = 1_050  # more than one batch


async def test_all_that_was_accepted_is_paid_when_a_run_ends(database: Database) -> None:
    run = await database.write(lambda conn: add_run(conn, task={"batch_size": 4}))
    ann = await database.write(add_worker)
    queue = queue_of(database, VirtualClock())
    lease = (await claim(queue, ann)).lease
    assert lease is not None
    await queue.begin(ann, lease.task, 1)

    def accepted(conn: Connection) -> None:
        """As many accepted parts of one task."""
        one = contributions.by_id(conn, add_contribution(conn, tasks.holder(conn, lease.task)))
        copy = {k: v for k, v in msgspec.structs.asdict(one).items() if k != "id"}
        lines = [copy | {"part": n, "digest": f"part-{n}"} for n in range(1, MANY)]
        conn.execute(insert(contributions_table), lines)
        conn.execute(update(contributions_table).values(state="accepted"))
        rows = contributions.mergeable(conn, run, 2 * MANY)
        payments.post_step(conn, "pending", [payments.Payment.of(row) for row in rows], 1.0)

    await database.write(accepted)
    assert await database.write(lambda conn: close(conn, run, 2.0)) == MANY
    c = contributions_table.c
    counted = select(c.state, func.count()).group_by(c.state)
    states = await database.read(lambda conn: conn.execute(counted).all())
    assert [tuple(row) for row in states] == [("superseded", MANY)]
    has = await database.read(lambda conn: payments.balances(conn, ann.volunteer_id))
    assert (has.pending_micro, has.earned_micro) == (0, MANY * lease.price_micro)
    assert await breaches(database) == []
