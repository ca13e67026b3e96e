"""Real volunteers on leases in parts: gradients every n mini-batches, newer weights every m, and
the loss falls.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, select

from coordinator.database import evaluations
from coordinator.database.tables.contributions import contributions as contributions_table
from tests.support.local_coordinator import RUN, LocalCoordinator
from tests.support.local_volunteer import LocalMachine, Process, local_machine

LEARNING = RUN.replace("local_steps = 2", "local_steps = 12") + (
    "[train]\nlr = 0.02\nwarmup_steps = 0\nweight_decay = 0.0\n"
)
ASYNC = LEARNING.replace(
    'preset = "fedavg"\nquorum = 2',
    'preset = "async-sgd"\ngradient_every = 2\npull_every = 3',
)
SYNC = LEARNING.replace('preset = "fedavg"\nquorum = 2', 'preset = "sync-sgd"\nquorum = 1')


async def contributions(home: LocalCoordinator) -> list[Any]:
    def read(conn: Connection) -> list[Any]:
        return list(conn.execute(select(contributions_table)))

    return await home.coordinator.db.read(read)


async def measured(home: LocalCoordinator) -> list[evaluations.VersionLoss]:
    return await home.coordinator.db.read(lambda conn: evaluations.measured(conn, 1, 1000))


async def until(process: Process, holds: Callable[[], Awaitable[bool]]) -> None:
    async with process.eventually(300):
        while not await holds():
            await process.tick()


async def sound(home: LocalCoordinator) -> bool:
    report = await home.coordinator.checks.run()
    assert report.breaches == ()
    return await home.coordinator.ledger.check() == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "bases", "versions"), [(ASYNC, 2, 30), (SYNC, 1, 15)], ids=["async-sgd", "sync-sgd"]
)
async def test_two_volunteers_bring_the_loss_down(
    tmp_path: Path, text: str, bases: int, versions: int
) -> None:
    async with local_machine(tmp_path, text) as ann:
        home = ann.home
        bob = LocalMachine(tmp_path / "second", home)
        await bob.join("Bob")
        async with ann.working() as one, bob.working() as two:

            async def far_enough() -> bool:
                found = await measured(home)
                return bool(found) and found[-1].version >= versions

            await until(one, far_enough)
            await two.kill()
        found = await measured(home)
        assert found[-1].loss is not None
        assert found[0].loss is not None
        assert found[-1].loss < found[0].loss - 0.5
        done = await contributions(home)
        merged = [row for row in done if row.state == "merged"]
        assert len({row.volunteer_id for row in merged}) == 2
        assert {row.steps for row in merged} == {2 if bases == 2 else 1}
        assert max(row.part for row in merged) > 0
        if text is SYNC:  # of two who compute on one version, one is late and computes again
            assert any(row.tries > 0 for row in merged)
        assert await sound(home)
