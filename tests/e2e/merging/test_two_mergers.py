"""Two servers on one PostgreSQL that want the same merges."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from coordinator.config import Settings
from coordinator.database import runs
from coordinator.services import Coordinator, opened
from tests.support.databases import Postgres, deadlocks
from tests.support.local_coordinator import LocalCoordinator, Worker, local_coordinator

ROUNDS = 24


@asynccontextmanager
async def two_servers(
    url: str, path: Path
) -> AsyncIterator[tuple[LocalCoordinator, Coordinator, list[Worker]]]:
    """Yield a server with a run, another one, and the run's two workers."""
    where: dict[str, Any] = {"database": url, "blobs": str(path / "blobs")}
    async with local_coordinator(path / "one", **where) as home:
        await home.start_run()
        workers = [await home.join(f"volunteer-{number}") for number in range(2)]
        (path / "two").mkdir()
        shutil.copy(path / "one" / "signing.key", path / "two")
        settings = Settings(data_dir=str(path / "two"), **where)
        async with opened(settings, home.clock) as other:
            yield home, other, workers


async def test_a_server_that_looks_never_stops_one_that_merges(
    postgres: Postgres, tmp_path: Path
) -> None:
    url = await postgres.fresh()
    before = await deadlocks(url)
    async with two_servers(url, tmp_path) as (home, other, workers):
        over = False

        async def look() -> None:
            while not over:
                await other.merger.merge_if_due(1)

        looking = asyncio.create_task(look())
        for number in range(ROUNDS):
            for place, worker in enumerate(workers):
                verdict = await worker.work(seed=2 * number + place)
                assert verdict.state in ("accepted", "merged")
            await home.coordinator.merger.merge_if_due(1)
        over = True
        await looking
        run = await home.coordinator.db.read(lambda conn: runs.by_id(conn, 1))
    assert run.head >= ROUNDS
    assert await deadlocks(url) == before
    await postgres.recycle(url)


async def test_a_server_that_starts_leaves_the_merge_of_another_alone(
    postgres: Postgres, tmp_path: Path
) -> None:
    url = await postgres.fresh()
    async with two_servers(url, tmp_path) as (home, other, workers):
        for seed, worker in enumerate(workers):
            await worker.work(seed)
        merger = home.coordinator.merger
        job = await home.coordinator.db.write(lambda conn: merger._lease(conn, 1))
        assert job is not None
        ended = asyncio.Event()
        ended.set()
        await other.merger.run(ended)
        assert not await other.merger.merge_if_due(1)
        assert await merger._merge(job)
    await postgres.recycle(url)
