"""Tasks done again by vetted volunteers for others: a real server and real volunteers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, select

from coordinator.database import volunteers
from coordinator.database.ledger import payments
from coordinator.database.tables.trust import audits, recomputes
from coordinator.rules import audits as rules
from tests.e2e.server.test_recomputes import balances, lazy, run_file
from tests.support.local_coordinator import LocalCoordinator, local_coordinator
from tests.support.local_volunteer import LocalMachine

RUN = run_file().replace("recompute = 1.0", "audit = 1.0")


async def proven(home: LocalCoordinator, name: str) -> None:
    """Let an account have had enough accepted contributions to audit."""
    found = next(p for p in await home.coordinator.volunteers.list() if p.nickname == name)
    many = 10 * rules.LEASES_PER_AUDIT
    await home.coordinator.db.write(
        lambda conn: volunteers.set_volunteer(conn, found.volunteer_id, accepted=many)
    )


@asynccontextmanager
async def checked(
    path: Path, database: str, load: Any = None
) -> AsyncIterator[tuple[LocalCoordinator, LocalMachine]]:
    """A coordinator where Ann did a task that is to be audited, and Bob, who may."""
    async with local_coordinator(path / "coordinator", database=database) as home:
        await home.start_run(RUN)
        ann, bob = LocalMachine(path / "ann", home), LocalMachine(path / "bob", home)
        await ann.join("Ann")
        await bob.join("Bob")
        await proven(home, "Bob")
        async with home.coordinator.working():
            async with ann.working(load, max_tasks=1) as process:
                assert await process.ended(120) == 0
                await until(home, "open")
            await home.clock.advance(rules.SPREAD_S)
            yield home, bob


async def until(home: LocalCoordinator, state: str) -> str:
    """Wait until the audit is in this state; its result."""

    def read(conn: Connection) -> tuple[str, str] | None:
        row = conn.execute(select(audits.c.state, audits.c.result)).first()
        return None if row is None else (row[0], row[1])

    async with asyncio.timeout(60):
        while (found := await home.coordinator.db.read(read)) is None or found[0] != state:
            await asyncio.sleep(0.02)
    return found[1]


async def result(home: LocalCoordinator) -> str:
    """Return the result of the recompute that was ordered."""

    def read(conn: Connection) -> str:
        return str(conn.execute(select(recomputes.c.result)).scalar_one())

    return await home.coordinator.db.read(read)


async def escrow(home: LocalCoordinator, name: str) -> int:
    found = next(p for p in await home.coordinator.volunteers.list() if p.nickname == name)
    read = payments.balances
    return (
        await home.coordinator.db.read(lambda conn: read(conn, found.volunteer_id))
    ).escrow_micro


async def audited(bob: LocalMachine, load: Any = None) -> None:
    async with bob.working(load, max_tasks=1) as process:
        assert await process.ended(120) == 0


async def test_an_honest_audit_passes_and_is_paid(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "confirmed_chance", lambda passed: 0.0)
    async with checked(tmp_path, database_url) as (home, bob):
        await audited(bob)
        await until(home, "done")
        assert await result(home) == "passed"
        assert await escrow(home, "Bob") > 0
        assert (await balances(home, "Ann"))[0] == "vetted"
        assert await home.coordinator.ledger.check() == ()
        assert (await home.coordinator.checks.run()).breaches == ()


async def test_a_lying_worker_is_caught_by_an_audit_and_the_organiser(
    tmp_path: Path, database_url: str
) -> None:
    async with checked(tmp_path, database_url, lazy) as (home, bob):
        await audited(bob)
        assert await until(home, "done") == "passed"
        assert await result(home) == "failed"
        assert await balances(home, "Ann") == ("suspended", 0, 0)
        assert (await balances(home, "Bob"))[0] == "vetted"
        assert await escrow(home, "Bob") > 0
        assert await home.coordinator.ledger.check() == ()


async def test_a_lying_auditor_is_caught_and_its_pay_taken_back(
    tmp_path: Path, database_url: str
) -> None:
    async with checked(tmp_path, database_url) as (home, bob):
        await audited(bob, lazy)
        assert await until(home, "done") == "failed"
        assert await result(home) == "passed"
        assert (await balances(home, "Ann"))[0] == "vetted"
        assert await balances(home, "Bob") == ("suspended", 0, 0)
        assert await home.coordinator.ledger.check() == ()
