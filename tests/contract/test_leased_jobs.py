"""Leased jobs: one owner at a time, whoever asks and whoever falls silent, on both databases."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import sqlalchemy as sa

from coordinator.database import evaluations
from coordinator.database.engine.open_database import Database
from coordinator.database.evaluations import JOBS, EvaluationRow
from coordinator.database.tables.versions import evaluations as TABLE
from tests.support.run_rows import add_run, add_versions

LEASE_S = 15.0
STEPS = 150


@dataclass
class ModelJob:
    """One job as it should be."""

    state: str = "waiting"
    attempt: int = 0
    until: float = 0.0


async def jobs(database: Database, count: int) -> None:
    def add(conn: sa.Connection) -> None:
        run = add_run(conn)
        add_versions(conn, run, count)
        text = dict.fromkeys(("sample", "message"), "")
        blank = {"run_id": run, "state": "waiting", "metrics": "{}", "pruned": False, **text}
        conn.execute(sa.delete(TABLE))
        conn.execute(sa.insert(TABLE), [blank | {"version": n} for n in range(count)])

    await database.write(add)


async def lease(database: Database, owner: str, now: float) -> EvaluationRow | None:
    query = sa.select(TABLE).where(JOBS.ready(now))
    query = query.order_by(TABLE.c.version)
    return await database.write(lambda conn: JOBS.take(conn, query, owner, now + LEASE_S))


async def change(database: Database, row: EvaluationRow, act: str, now: float) -> bool:
    changes: dict[str, Callable[[sa.Connection], bool]] = {
        "renew": lambda conn: JOBS.renew(conn, row, now + LEASE_S),
        "end": lambda conn: JOBS.change(conn, row, state="done"),
        "release": lambda conn: JOBS.release(conn, row),
        "postpone": lambda conn: JOBS.release(conn, row, now + LEASE_S),
    }
    return await database.write(changes[act])


async def states(database: Database) -> list[tuple[str, int, float]]:
    c = TABLE.c
    query = sa.select(c.state, c.attempt, c.lease_until).order_by(c.version)
    return await database.read(lambda conn: [tuple(row) for row in conn.execute(query)])


@pytest.mark.parametrize("seed", range(4))
async def test_jobs_are_as_the_model_says_after_every_step(database: Database, seed: int) -> None:
    rng, now = random.Random(seed), 1000.0
    model = [ModelJob() for _ in range(3)]
    leases: list[EvaluationRow] = []  # of every owner so far, most of them over
    await jobs(database, len(model))
    for _ in range(STEPS):
        act = rng.choice(("take", "take", "renew", "end", "release", "postpone", "wait"))
        if act == "wait":
            now += rng.choice((1.0, LEASE_S))
        elif act == "take":
            row = await lease(database, rng.choice("ab"), now)
            free = [
                number
                for number, job in enumerate(model)
                if job.state in ("waiting", "running") and job.until <= now
            ]
            assert (row.version if row else None) == (free[0] if free else None)
            if row is not None:
                job = model[row.version]
                model[row.version] = ModelJob("running", job.attempt + 1, now + LEASE_S)
                assert row.attempt == job.attempt + 1
                leases.append(row)
        elif leases:
            row = rng.choice(leases[-4:])
            job = model[row.version]
            is_owner = job.state == "running" and job.attempt == row.attempt
            assert is_owner == await change(database, row, act, now)
            if is_owner and act != "end":
                job.until = 0.0 if act == "release" else now + LEASE_S
            if is_owner and act != "renew":
                job.state = "done" if act == "end" else "waiting"
            if all(job.state == "done" for job in model):
                break
        assert await states(database) == [(job.state, job.attempt, job.until) for job in model]


async def test_no_job_goes_to_two_owners_that_ask_at_once(database: Database) -> None:
    await jobs(database, 6)
    rows = await asyncio.gather(*(lease(database, f"owner-{n}", 1000.0) for n in range(12)))
    versions = [row.version for row in rows if row is not None]
    assert sorted(versions) == list(range(6))


_WAITING_FOR_THIS = sa.text(
    "SELECT count(*) FROM pg_locks"
    " WHERE NOT granted AND pg_backend_pid() = ANY(pg_blocking_pids(pid))"
)


async def test_a_job_that_another_transaction_looks_at_is_still_leased(database: Database) -> None:
    await jobs(database, 1)
    asking: list[asyncio.Task[EvaluationRow | None]] = []
    is_locked = asyncio.Event()
    loop = asyncio.get_running_loop()

    def look(conn: sa.Connection) -> None:
        conn.execute(sa.select(TABLE).with_for_update()).all()
        loop.call_soon_threadsafe(is_locked.set)
        if database.dialect == "postgresql":  # in SQLite the other transaction waits for this one
            while not any(ask.done() for ask in asking):
                if conn.execute(_WAITING_FOR_THIS).scalar_one():
                    break

    looking = asyncio.create_task(database.write(look))
    await is_locked.wait()
    asking.append(asyncio.create_task(lease(database, "me", 1000.0)))
    await looking
    row = await asking[0]
    assert row is not None, "nobody would look at it again before the next sweep"
    assert row.version == 0


async def test_a_taken_evaluation_skips_older_ones_but_never_the_first(database: Database) -> None:
    await jobs(database, 4)

    async def take(now: float) -> int | None:
        row = await database.write(lambda conn: evaluations.take(conn, "me", now, LEASE_S))
        return None if row is None else row.version

    assert [await take(1000.0) for _ in range(3)] == [0, 3, None]
    assert [state for state, *_ in await states(database)] == [
        "running",
        "skipped",
        "skipped",
        "running",
    ]
    assert not await database.read(lambda conn: evaluations.waits(conn, 1000.0))
    assert await database.read(lambda conn: evaluations.waits(conn, 1000.0 + LEASE_S))
