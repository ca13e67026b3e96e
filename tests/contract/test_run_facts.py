"""Facts about the failed tasks of a run, on both databases."""

from __future__ import annotations

import pytest
from sqlalchemy import Connection, insert, update

from coordinator.accounts import suspension
from coordinator.database import runs
from coordinator.database import volunteers as accounts
from coordinator.database.engine.open_database import Database
from coordinator.database.monitoring import run_facts
from coordinator.database.tables.tasks import failures, tasks
from coordinator.rules.standstill_causes import OutcomeFacts
from tests.support.account_rows import add_contribution, add_run, add_task
from tests.support.run_rows import add_worker

NOW = 10_000.0
NAN = "the loss is no longer a number"


def failed(conn: Connection, task: int, at: float) -> None:
    note = {"task_id": task, "attempt": 1, "worker_id": "worker", "kind": "failure"}
    conn.execute(insert(failures).values(**note, message=NAN, at=at))
    conn.execute(update(tasks).where(tasks.c.id == task).values(failures=1))


def outcome(conn: Connection, run_id: int, now: float, made_at: float | None) -> OutcomeFacts:
    bad = run_facts.of_server(conn, now).failures.get(run_id, ())
    return run_facts.outcomes(conn, runs.by_id(conn, run_id), bad, made_at, now)[0]


@pytest.mark.parametrize("kind", ["learn", "train"])
async def test_episodes_of_others_do_not_hide_the_failure_of_a_learner(
    kind: str, database: Database
) -> None:
    def change(conn: Connection) -> list[OutcomeFacts]:
        run_id = add_run(conn)
        task = add_task(conn, run_id, "todo", kind=kind)
        failed(conn, task, NOW)
        add_contribution(conn, run_id, "actor", "accepted", kind="games", decided_at=NOW + 10)
        later = NOW + run_facts.STUCK_S
        stuck = [outcome(conn, run_id, at, None) for at in (later - 1, later)]
        stuck.append(outcome(conn, run_id, later, NOW + 5))  # a version was made since
        conn.execute(update(tasks).where(tasks.c.id == task).values(state="doing"))
        return [*stuck, outcome(conn, run_id, later, None)]

    young, old, outdated, tried = await database.write(change)
    if kind == "train":
        assert {young.count, old.count, outdated.count, tried.count} == {0}
        return
    assert (young.count, young.stuck) == (1, False)
    assert (old.count, old.stuck, old.commonest) == (1, True, NAN)
    assert (outdated.count, outdated.stuck) == (0, False)
    assert (tried.count, tried.stuck) == (1, False)


async def test_machines_of_who_gets_no_work_are_not_online(database: Database) -> None:
    """The standstill of a run counts the machines that could work for it."""

    def online(conn: Connection) -> int:
        return len(run_facts.of_server(conn, NOW).machines)

    def change(conn: Connection) -> list[int]:
        ann, ben = (add_worker(conn).volunteer_id for _ in range(2))
        counts = [online(conn)]
        suspension.suspend(conn, ann, "a check failed", NOW)
        counts.append(online(conn))
        suspension.unsuspend(conn, ann, "a mistake", NOW)
        suspension.ban(conn, accounts.existing(conn, ben), "spam", NOW)
        return [*counts, online(conn)]

    assert await database.write(change) == [2, 1, 1]
