"""Contributions decided later than they came: what happened to their account since counts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.util import await_only

from coordinator.accounts.suspension import suspend, unsuspend
from coordinator.admin import people_commands
from coordinator.database.engine.open_database import Database
from coordinator.database.tables.contributions import contributions
from coordinator.database.verdicts import latest_verdict
from shared.protocol.accounts import Me
from shared.protocol.leases import BeginReply
from tests.support.databases import Postgres
from tests.support.failpoints import fail, faults
from tests.support.local_coordinator import (
    RUN,
    LocalCoordinator,
    Worker,
    decode,
    local_coordinator,
    refused,
)

WAITING = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"


async def unchecked(worker: Worker) -> None:
    """Submit a task to a server that dies before it looks at the result."""
    lease = await worker.claim()
    begun = await worker.begin(lease)
    data = await worker.update("tiny", 1)
    await worker.upload(lease, data)
    submission = worker.submission(lease, begun, data)
    with faults(fail(RuntimeError("the process is gone")).after("write _receive")).installed():
        refused(await worker.post(f"/tasks/{lease.task}/submit", submission), 500)


async def state(home: LocalCoordinator, number: int = 1) -> str:
    query = sa.text("SELECT state FROM contributions WHERE id = :id")
    return await home.coordinator.db.read(
        lambda conn: str(conn.execute(query, {"id": number}).scalar_one())
    )


async def pay(worker: Worker) -> tuple[int, int, int]:
    me = decode(await worker.get("/workers/me"), Me)
    return me.pending_micro, me.escrow_micro, me.earned_micro


async def test_what_was_under_way_in_a_suspension_that_is_lifted_is_paid(tmp_path: Path) -> None:
    """The organiser vouched for the account; a stranger's pay stays at stake for good."""
    async with local_coordinator(tmp_path / "coordinator") as home:
        await home.start_run(RUN.replace("[plan]", "[plan]\noverlap = true"))
        ann = await home.join("Ann")
        await unchecked(ann)
        await home.coordinator.db.write(lambda c: suspend(c, ann.volunteer_id, "copies", 1.0))
        await home.coordinator.db.write(lambda c: unsuspend(c, ann.volunteer_id, "a mistake", 2.0))
        assert await home.coordinator.intake.recheck() == 1
        assert await state(home) == "accepted"
        price = await home.coordinator.db.read(
            lambda conn: conn.execute(sa.select(contributions.c.price_micro)).scalar_one()
        )
        assert await pay(ann) == (price, 0, 0)
        assert (await ann.work(2)).credits_micro > 0
        assert await home.coordinator.ledger.check() == ()


async def test_a_suspension_that_a_decision_waits_for_counts(
    postgres: Postgres, tmp_path: Path
) -> None:
    url = await postgres.fresh()
    async with local_coordinator(tmp_path / "coordinator", database=url) as home:
        await home.start_run()
        ann = await home.join("Ann")
        await unchecked(ann)
        done, held = asyncio.Event(), asyncio.Event()

        def slow_suspension(conn: Connection) -> None:
            suspend(conn, ann.volunteer_id, "copies", 1.0)
            held.set()
            await_only(done.wait())

        other = await Database.open(url)
        suspension = asyncio.create_task(other.write(slow_suspension))
        await held.wait()
        decision = asyncio.create_task(home.coordinator.intake.recheck())
        async with asyncio.timeout(120):
            while not await home.coordinator.db.read(
                lambda conn: conn.execute(sa.text(WAITING)).scalar_one()
            ):
                await asyncio.sleep(0.01)
        done.set()
        await suspension
        assert await decision == 1
        assert await state(home) == "superseded"
        assert await pay(ann) == (0, 0, 0)
        assert await home.coordinator.ledger.check() == ()
        await other.close()
    await postgres.recycle(url)


async def test_a_ban_with_a_reversal_takes_back_what_waits_for_a_merge(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path / "coordinator") as home:
        await home.start_run(RUN.replace("quorum = 2", "quorum = 1000"))
        ann = await home.join("Ann")
        waiting = await ann.work(1)
        assert (waiting.state, await pay(ann)) == ("accepted", (waiting.credits_micro, 0, 0))
        queue = home.coordinator.signals.watch("queue")
        done = await people_commands.ban.run(
            home.coordinator, people_commands.Ban(name="Ann", reverse=True, reason="copies")
        )
        assert await queue.wait(0.0)  # its task is for another machine
        assert done.reversal is not None
        taken = done.reversal.taken
        assert (taken.contributions, taken.pending_micro) == (1, waiting.credits_micro)
        assert (taken.escrow_micro, taken.earned_micro) == (0, 0)
        await home.coordinator.volunteers.unban("Ann")
        assert await pay(ann) == (0, 0, 0)
        verdict = await home.coordinator.db.read(
            lambda conn: latest_verdict(conn, waiting.contribution)
        )
        assert verdict is not None
        assert (verdict.state, verdict.credits_micro) == ("superseded", 0)
        assert (
            verdict.message == "what this account had at stake is given up: neither merged nor paid"
        )
        assert await home.coordinator.ledger.check() == ()


async def test_a_task_that_has_not_begun_takes_no_result(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path / "coordinator") as home:
        await home.start_run()
        ann = await home.join("Ann")
        lease = await ann.claim()
        data = await ann.update("tiny", 1)
        await ann.upload(lease, data)
        submission = ann.submission(lease, BeginReply(version=0, finish_by=0.0), data)
        error = refused(await ann.post(f"/tasks/{lease.task}/submit", submission), 409)
        assert "has not begun" in error.message
        assert (await ann.submit(lease, await ann.begin(lease), data)).state == "accepted"
