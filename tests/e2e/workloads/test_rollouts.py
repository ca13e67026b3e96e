"""Rollouts through a whole coordinator: a warm start, answers, learners, and what is done about
fakes.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, select

from coordinator.database import experience
from coordinator.database.tables.tasks import tasks
from tests.support.local_coordinator import LocalCoordinator, local_coordinator
from tests.support.local_volunteer import LocalMachine
from tests.support.rollouts_run import RUN
from volunteer.control import events


async def sound(home: LocalCoordinator) -> bool:
    report = await home.coordinator.checks.run()
    assert report.breaches == ()
    return await home.coordinator.ledger.check() == ()


async def kinds_done(home: LocalCoordinator) -> set[str]:
    def read(conn: Connection) -> set[str]:
        done = select(tasks.c.kind).where(tasks.c.state == "done").distinct()
        return set(conn.execute(done).scalars())

    return await home.coordinator.db.read(read)


async def version(home: LocalCoordinator) -> int:
    return (await home.coordinator.runs.queries.info("rollouts")).version


async def test_two_volunteers_go_on_after_one_was_killed_among_its_answers(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path / "coordinator") as home:
        await home.coordinator.runs.create(RUN)
        await home.coordinator.runs.start("rollouts")
        async with home.coordinator.working():
            ann, bob = (LocalMachine(tmp_path / name, home) for name in ("ann", "bob"))
            await ann.join("Ann")
            await bob.join("Bob")
            async with ann.working() as steady:
                async with bob.working() as killed:
                    await killed.until(events.Training, lambda e: e.counted == "problems", 120)
                before = await version(home)
                async with bob.working() as again:
                    await again.until(events.Submitted, timeout_s=60)
                    async with steady.eventually(120):
                        while await version(home) < before + 1:
                            await steady.tick()
        assert await kinds_done(home) == {"selfplay", "learn"}
        found = await home.coordinator.db.read(lambda conn: experience.totals(conn, 1))
        assert found.sealed >= 8
        assert found.samples % 16 == 0
        rows = await home.coordinator.runs.queries.versions("rollouts")
        assert {"solved", "cut", "loss"} <= set(rows[0].metrics)
        assert (await home.coordinator.runs.queries.decided("rollouts")).rejected == 0
        assert await sound(home)
