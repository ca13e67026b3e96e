"""Whose machines steer a run: threat T7, idle machines that only hold leases."""

from __future__ import annotations

from sqlalchemy import Connection

from coordinator.accounts.accounts import Principal
from coordinator.database import runs, volunteers
from coordinator.database.engine.open_database import Database
from coordinator.runs.queries import PATIENCE_S, RunQueries
from tests.support import account_rows
from tests.support.run_rows import add_run, add_worker
from tests.support.virtual_clock import VirtualClock

NOW = 1000.0
MODEL = {"vocab_size": 64, "block_size": 8, "n_layer": 1, "n_head": 1, "n_embd": 8}
PLAN = {"preset": "fedavg", "quorum": 1, "deadline_seconds": 0}


def at_work(conn: Connection, run: int, volunteer: str | None = None) -> Principal:
    """A live worker that holds a task."""
    worker = add_worker(conn, volunteer)
    volunteers.set_worker(conn, worker.worker_id, last_seen_at=NOW)
    account_rows.add_task(conn, run, "doing", worker_id=worker.worker_id)
    return worker


def deliver(conn: Connection, run: int, worker: Principal) -> None:
    """Record that a worker's last work went into the newest version."""
    account_rows.add_contribution(
        conn, run, worker.volunteer_id, "merged", worker_id=worker.worker_id, version=0
    )


async def steering(db: Database, run: int, *, vetted: bool = True) -> int:
    def read(conn: Connection) -> int:
        return runs.turnout(conn, runs.by_id(conn, run), NOW - 60, vetted=vetted).workers

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
    # Of strangers those count that proved themselves once: ghosts cost nothing.
    assert await steering(database, run, vetted=False) == 2 + 1

    def proved(conn: Connection) -> None:
        volunteers.set_volunteer(conn, ghost.volunteer_id, proofs=1)

    await database.write(proved)
    assert await steering(database, run, vetted=False) == 4


async def test_a_vetted_machine_that_sends_nothing_holds_up_strangers_for_minutes_only(
    database: Database,
) -> None:
    clock = VirtualClock()

    def write(conn: Connection) -> int:
        run = add_run(conn, model=MODEL, plan=PLAN)
        ghost, stranger = at_work(conn, run), add_worker(conn)
        volunteers.set_worker(conn, ghost.worker_id, last_seen_at=clock.now() + 10 * PATIENCE_S)
        volunteers.set_volunteer(conn, stranger.volunteer_id, standing="probation")
        account_rows.add_contribution(
            conn, run, stranger.volunteer_id, vetted=False, decided_at=clock.now(), weight=1.0
        )
        return run

    run = await database.write(write)
    queries = RunQueries(database, clock)

    def due(conn: Connection) -> bool:
        return queries.readiness(conn, runs.by_id(conn, run))[0].now

    assert not await database.read(due)
    await clock.advance(PATIENCE_S)
    assert await database.read(due)
