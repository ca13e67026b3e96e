"""Two servers on one PostgreSQL that want the same merges."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

from coordinator.config import Settings
from coordinator.database import runs
from coordinator.services import opened
from tests.support.databases import Postgres, deadlocks
from tests.support.local_coordinator import local_coordinator

ROUNDS = 24


async def test_a_server_that_looks_never_stops_one_that_merges(
    postgres: Postgres, tmp_path: Path
) -> None:
    url = await postgres.fresh()
    before = await deadlocks(url)
    where: dict[str, Any] = {"database": url, "blobs": str(tmp_path / "blobs")}
    async with local_coordinator(tmp_path / "one", **where) as home:
        name = await home.start_run()
        workers = [await home.join(f"volunteer-{number}") for number in range(2)]
        (tmp_path / "two").mkdir()
        shutil.copy(tmp_path / "one" / "signing.key", tmp_path / "two")
        settings = Settings(data_dir=str(tmp_path / "two"), **where)
        async with opened(settings, home.clock) as other:
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
        run = await home.coordinator.db.read(lambda conn: runs.by_name(conn, name))
    assert run.head >= ROUNDS
    assert await deadlocks(url) == before
    await postgres.recycle(url)
