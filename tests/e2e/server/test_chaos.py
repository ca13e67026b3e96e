"""Coordinators killed at random moments under load, and at named points: nothing that was
acknowledged is lost or doubled.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from coordinator.database import runs
from coordinator.database.tables.merges import merges as merges_table
from coordinator.runs.definition import definition
from tests.e2e.conftest import ServedCoordinator
from tests.support.failpoints import kill
from tests.support.load_clients import Diary, Numbers, losses
from tests.support.local_coordinator import RUN

KILLS = int(os.environ.get("CHAOS_KILLS", "6"))
VOLUNTEERS = 6
STEPS = 30
# with an optimiser of its own, so that a merge writes two blobs
CHAOS = RUN.replace('preset = "fedavg"', 'preset = "diloco"\nmax_staleness = 1000') + (
    "[evaluation]\nbudget_seconds = 0.05\nsample_every = 1000\n"
)


@asynccontextmanager
async def load(
    served: ServedCoordinator, tmp_path: Path, *others: ServedCoordinator
) -> AsyncIterator[tuple[Diary, list[Numbers]]]:
    """Volunteers at work on a coordinator that is there already; at the end all of them have
    ended their task.
    """
    async with served.opened() as coordinator:
        schema = definition(
            await coordinator.db.read(lambda conn: runs.by_name(conn, "tiny"))
        ).schema
    diary = Diary()
    urls = itertools.cycle([each.url for each in (served, *others)])
    crowd = [
        Numbers(next(urls), f"Nr {number}", schema, diary, tmp_path) for number in range(VOLUNTEERS)
    ]
    await asyncio.gather(*(who.join() for who in crowd))
    try:
        async with asyncio.TaskGroup() as group:
            for who in crowd:
                group.create_task(who.work())
            yield diary, crowd
            for who in crowd:
                who.stopping = True
    finally:
        for who in crowd:
            await who.http.aclose()


async def found_wrong(served: ServedCoordinator, diary: Diary, crowd: list[Numbers]) -> list[str]:
    """Stop the coordinator and look at everything, ourselves and by its own command."""
    wrong = [] if await served.stop() == 0 else ["it did not end well"]
    async with served.opened() as coordinator:
        wrong += await losses(coordinator, diary, crowd)
        run = await coordinator.runs.queries.info("tiny")
        if not run.version:
            wrong.append("nothing was merged")
    where = ["--data-dir", served.settings["data_dir"], "--database", served.settings["database"]]
    check = await served.fork_server.run(["coordinator", "check", *where], served.log)
    return wrong if await check.ended() == 0 else [*wrong, check.said()[-2000:]]


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.timeout(300 + 40 * KILLS)
async def test_nothing_is_lost_when_the_coordinator_is_killed_at_random_moments(
    served: ServedCoordinator, tmp_path: Path
) -> None:
    """Draws on an open server are killed in test_chaos_of_checks.py."""
    await served.start_run(CHAOS)
    moments = random.Random(20)
    await served.serve()
    await served.listening()
    async with load(served, tmp_path) as (diary, crowd):
        for _ in range(KILLS):
            began = time.monotonic()
            await diary.more(1)  # it is up and works
            # The moment; where starting takes long, a submission does too, and some must succeed.
            slowness = time.monotonic() - began
            await asyncio.sleep(moments.uniform(0.0, max(0.25, slowness / 4)))
            served.child.kill()
            assert await served.child.ended() == -signal.SIGKILL, served.child.said()[-3000:]
            await served.serve()
        await diary.judged(2 * VOLUNTEERS)  # and the work goes on
    assert await found_wrong(served, diary, crowd) == []


POINTS = [
    kill().after("write _receive"),
    kill().amid("write _decide"),
    kill().after("write _decide"),
    kill().amid("write _lease"),
    kill().after("write _lease"),
    *(kill().on_the(nth).before("put_file") for nth in range(3, 7)),
    *(kill().on_the(nth).after("put_file") for nth in range(3, 7)),
    kill().before("write _commit"),
    kill().amid("write _commit"),
    kill().after("write _commit"),
]


@pytest.mark.slow
async def test_nothing_is_lost_when_the_coordinator_dies_at_each_named_point(
    served: ServedCoordinator, tmp_path: Path
) -> None:
    await served.start_run(CHAOS)
    await served.serve(POINTS[0])
    await served.listening()
    async with load(served, tmp_path) as (diary, crowd):
        for point in [*POINTS[1:], None]:
            assert await served.child.ended() == -signal.SIGKILL, served.child.said()[-3000:]
            await served.serve(*([point] if point else []))
        await diary.judged(VOLUNTEERS)
    assert await found_wrong(served, diary, crowd) == []


@pytest.mark.slow
@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
async def test_two_coordinators_on_one_database_merge_each_step_once(
    served: ServedCoordinator, twin: ServedCoordinator, tmp_path: Path
) -> None:
    await served.start_run(CHAOS.replace("quorum = 2", "quorum = 1"))
    for each in (served, twin):
        await each.serve()
        await each.listening()
    async with load(served, tmp_path, twin) as (diary, crowd):
        await diary.judged(STEPS)
    assert await twin.stop() == 0
    assert await found_wrong(served, diary, crowd) == []
    async with served.opened() as coordinator:
        rows = await coordinator.db.read(
            lambda conn: list(conn.execute(merges_table.select()).mappings())
        )
    assert len(rows) > STEPS // 4
    assert len({row["base"] for row in rows}) == len(rows)
    assert len({row["owner"] for row in rows}) == 2  # both had their share
