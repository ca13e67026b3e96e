"""Whose machines steer a run: threat T7, idle machines that only hold leases."""

from __future__ import annotations

from sqlalchemy import Connection

from coordinator.accounts.accounts import Principal
from coordinator.database import runs, volunteers
from coordinator.database.engine.open import Database
from tests.support import account_rows
from tests.support.run_rows import add_run, add_worker

NOW = 1000.0


def at_work(conn: Connection, run: int, volunteer: str | None = None) -> Principal:
    """A live worker that holds a task."""
    worker = add_worker(conn, volunteer)
    volunteers.set_worker(conn, worker.worker_id, last_seen_at=NOW)
    account_rows.add_task(conn, run, "doing", worker_id=worker.worker_id)
    return worker


def deliver(conn: Connection, run: int, worker: Principal) -> None:
    """Its last work went into the newest version."""
    account_rows.add_contribution(
        conn, run, worker.volunteer_id, "merged", worker_id=worker.worker_id, version=0
    )


async def steering(db: Database, run: int, *, vetted: bool = True) -> int:
    def read(conn: Connection) -> int:
        return runs.steering_workers(conn, runs.by_id(conn, run), NOW - 60, vetted=vetted)

    return await db.read(read)


async def test_sixty_idle_machines_of_one_volunteer_are_one(database: Database) -> None:
    def write(conn: Connection) -> tuple[int, Principal]:
        run = add_run(conn)
        first = at_work(conn, run)
        for _ in range(59):
            at_work(conn, run, first.volunteer_id)
        return run, first

    run, ghost = await database.write(write)
    assert await steering(database, run) == 1

    def honest(conn: Connection) -> None:
        one = at_work(conn, run)
        for worker in (one, at_work(conn, run, one.volunteer_id)):
            deliver(conn, run, worker)
        at_work(conn, run)  # has just begun: its first work is awaited

    await database.write(honest)
    assert await steering(database, run) == 1 + 2 + 1

    def probation(conn: Connection) -> None:
        volunteers.set_volunteer(conn, ghost.volunteer_id, standing="probation")

    await database.write(probation)
    assert await steering(database, run) == 2 + 1
    assert await steering(database, run, vetted=False) == 4
