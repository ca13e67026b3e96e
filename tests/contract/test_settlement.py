"""Settlement: what a merge overtakes, and what it leaves alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Connection

from coordinator.accounts.accounts import Principal
from coordinator.database import contributions, runs, submissions
from coordinator.database import tasks as task_rows
from coordinator.database.contributions import ContributionRow
from coordinator.database.engine.open_database import Database
from coordinator.database.ledger import payments
from coordinator.database.tables.contributions import contributions as contributions_table
from coordinator.database.tables.tasks import failures, tasks
from coordinator.database.tasks import FailureKind
from coordinator.runs.settlement import close, lock_accounts, overtake, set_aside
from tests.support.account_rows import breaches
from tests.support.run_rows import (
    add_contribution,
    add_run,
    add_version,
    add_worker,
    claim,
    queue_of,
)
from tests.support.virtual_clock import VirtualClock

DELTAS = {"preset": "fedavg", "max_staleness": 1}
MODEL = {"vocab_size": 300, "block_size": 8, "n_layer": 1, "n_head": 1, "n_embd": 8}
GRADIENTS = {"preset": "gradient-average"}
C = contributions_table.c


async def begun(database: Database, plan: dict[str, Any], count: int) -> tuple[int, Principal]:
    """A run whose one volunteer has begun so many tasks from version 0; 1 to 3 follow it."""
    task = {"batch_size": 4, "in_flight": 16} | ({"local_steps": 1} if plan is GRADIENTS else {})
    run = await database.write(lambda conn: add_run(conn, task=task, plan=plan, model=MODEL))
    ann = await database.write(add_worker)
    queue = queue_of(database, VirtualClock())
    for _ in range(count):
        lease = (await claim(queue, ann)).lease
        assert lease is not None
        await queue.begin(ann, lease.task, lease.attempt)
    for number in (1, 2, 3):
        await database.write(partial(add_version, run_id=run, version=number))
    return run, ann


def accepted(conn: Connection, task_id: int, base: int) -> ContributionRow:
    """An accepted update of a task that began from `base`, with its pending credit."""
    number = add_contribution(conn, task_rows.holder(conn, task_id))
    values = {"state": "accepted", "base_version": base}
    conn.execute(sa.update(contributions_table).where(C.id == number).values(**values))
    task_rows.accept_all(conn, {task_id: number}, 1.0)
    row = contributions.by_id(conn, number)
    payments.post_step(conn, "pending", [payments.Payment.of(row)], 1.0)
    return row


def overtake_all(conn: Connection, run_id: int, head: int) -> None:
    run = runs.by_id(conn, run_id, lock=True)
    overtake(conn, run, head, (), lock_accounts(conn, run, head), 2.0)


async def states(database: Database, table: sa.Table, *columns: Any) -> list[Any]:
    query = sa.select(*columns).order_by(table.c.id)
    return [tuple(row) for row in await database.read(lambda conn: conn.execute(query).all())]


async def test_a_merge_supersedes_and_pays_only_what_is_too_old_to_merge(
    database: Database,
) -> None:
    run, ann = await begun(database, DELTAS, 3)
    other = await database.write(lambda conn: add_run(conn, "other", model=MODEL))

    def settle(conn: Connection) -> list[ContributionRow]:
        rows = [accepted(conn, base + 1, base) for base in (0, 1, 2)]
        overtake_all(conn, other, 9)  # of another run: nothing happens
        overtake_all(conn, run, 3)
        return rows

    rows = await database.write(settle)
    assert await states(database, contributions_table, C.state) == [
        ("superseded",),
        ("superseded",),
        ("accepted",),
    ]
    has = await database.read(lambda conn: payments.balances(conn, ann.volunteer_id))
    assert has.earned_micro == rows[0].price_micro + rows[1].price_micro
    assert has.pending_micro == rows[2].price_micro
    left = await states(database, tasks, tasks.c.state)
    assert left == [("todo",), ("todo",), ("accepted",)]
    assert await breaches(database) == []


@pytest.mark.parametrize(("plan", "state"), [(DELTAS, "doing"), (GRADIENTS, "todo")])
async def test_only_a_plan_that_cancels_takes_leases_of_older_versions_back(
    database: Database, plan: dict[str, Any], state: str
) -> None:
    run, _ = await begun(database, plan, 2)
    newest = sa.update(tasks).where(tasks.c.id == 2).values(base_version=3)

    def settle(conn: Connection) -> None:
        conn.execute(newest)
        overtake_all(conn, run, 3)

    await database.write(settle)
    assert await states(database, tasks, tasks.c.state) == [(state,), ("doing",)]
    assert await states(database, failures, failures.c.kind) == []


@pytest.mark.parametrize("kind", ["failure", None])
async def test_what_makes_merges_fail_goes_back_unpaid_and_counts_only_if_it_is_to_blame(
    database: Database, kind: FailureKind | None
) -> None:
    run, ann = await begun(database, DELTAS, 1)

    def settle(conn: Connection) -> None:
        row = accepted(conn, 1, 0)
        set_aside(conn, runs.by_id(conn, run), row, "x" * 900, 2.0, kind)

    await database.write(settle)
    ((state, reason, message),) = await states(
        database, contributions_table, C.state, C.reason, C.message
    )
    assert (state, reason, len(message)) == ("rejected", "merge_failed", 500)
    assert message.startswith("set aside: the merge failed with it (xxx")
    has = await database.read(lambda conn: payments.balances(conn, ann.volunteer_id))
    assert (has.pending_micro, has.escrow_micro, has.earned_micro) == (0, 0, 0)
    assert await states(database, tasks, tasks.c.state) == [("todo",)]
    assert await states(database, failures, failures.c.kind) == ([(kind,)] if kind else [])
    assert await breaches(database) == []


async def test_setting_a_part_aside_returns_its_range_and_leaves_its_lease(
    database: Database,
) -> None:
    run, _ = await begun(database, DELTAS, 1)

    def settle(conn: Connection) -> None:
        task = task_rows.holder(conn, 1)
        row = contributions.by_id(conn, add_contribution(conn, task))
        part = {"state": "accepted", "steps": 1, "samples": 4, "price_micro": 1}
        conn.execute(sa.update(contributions_table).values(**part))
        row = contributions.by_id(conn, row.id)
        payments.post_step(conn, "pending", [payments.Payment.of(row)], 1.0)
        submissions.advance(conn, [submissions.EndedPart(row=row, task=task, accepted=True)], 1.0)
        set_aside(conn, runs.by_id(conn, run), row, "it is no tensor", 2.0, None)

    await database.write(settle)
    assert await states(database, tasks, tasks.c.start, tasks.c.state) == [
        (4, "doing"),
        (0, "todo"),
    ]


async def test_the_end_of_a_run_settles_no_other_run(database: Database) -> None:
    run, _ = await begun(database, DELTAS, 1)
    other = await database.write(lambda conn: add_run(conn, "other", model=MODEL))
    await database.write(lambda conn: accepted(conn, 1, 0))
    assert await database.write(lambda conn: close(conn, other, 2.0)) == 0
    assert await states(database, contributions_table, C.state) == [("accepted",)]
    assert await database.write(lambda conn: close(conn, run, 2.0)) == 1
    assert await states(database, contributions_table, C.message) == [
        ("the run ended before the next merge; the work is paid",)
    ]


async def test_accounts_take_turns_in_a_batch_that_not_all_updates_fit_in(
    database: Database,
) -> None:
    task = {"batch_size": 4, "in_flight": 16}
    run = await database.write(lambda conn: add_run(conn, task=task, plan=DELTAS, model=MODEL))
    queue, accounts = queue_of(database, VirtualClock()), dict[int, int]()
    account_by_task: dict[int, int] = {}
    for account, count in enumerate((5, 2, 1)):  # the one with most came first
        worker = await database.write(add_worker)
        for _ in range(count):
            lease = (await claim(queue, worker)).lease
            assert lease is not None
            await queue.begin(worker, lease.task, lease.attempt)
            account_by_task[lease.task] = account
    for task_id, account in account_by_task.items():
        row = await database.write(partial(accepted, task_id=task_id, base=0))
        accounts[row.id] = account

    async def batch(limit: int) -> list[int]:
        read = partial(contributions.mergeable, run_id=run, limit=limit)
        rows = await database.read(read)
        assert rows == sorted(rows, key=lambda row: (row.task_id, row.part, row.tries))
        return [accounts[row.id] for row in rows]

    assert await batch(3) == [0, 1, 2]
    assert await batch(4) == [0, 0, 1, 2]
    assert await batch(5) == [0, 0, 1, 1, 2]
    assert await batch(100) == [0] * 5 + [1, 1, 2]
    for limit, count in ((1, 1), (3, 3), (9, 3)):
        waiting = partial(contributions.waiting_accounts, run_id=run, limit=limit)
        assert len(await database.read(waiting)) == count
