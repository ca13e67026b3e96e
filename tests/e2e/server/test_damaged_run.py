"""A stored run file that cannot be read costs its own run, and no other."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from sqlalchemy import update

from coordinator.database.tables.runs import runs
from tests.support.local_coordinator import RUN, local_coordinator


async def test_a_damaged_run_file_costs_no_other_run(tmp_path: Path, database_url: str) -> None:
    settings: dict[str, Any] = {"database": database_url}
    async with local_coordinator(tmp_path, **settings) as home:
        await home.start_run(RUN)
        ann = await home.join("Ann")
        assert (await ann.claim(claim_id="once")).run == "tiny"
        await home.start_run(RUN.replace('"tiny"', '"other"'))
        damaged = update(runs).where(runs.c.name == "tiny").values(file='{"name": "tiny", "mod')
        await home.coordinator.db.write(lambda conn: conn.execute(damaged))
    async with local_coordinator(tmp_path, **settings) as home:
        coordinator, ann.http = home.coordinator, home.client(f"{ann.worker_id}.{ann.secret}")
        again = {"claim_id": "once", "wait_s": 0.0, "codecs": ["float32"]}
        async with coordinator.working():
            refused = await ann.post("/claims", again)
            assert "run file cannot be read" in refused.json()["message"]
            workers = [await home.join(name) for name in ("Mia", "Bob")]
            for seed, worker in enumerate(workers):
                lease = await worker.claim()
                assert lease.run == "other"
                verdict = await worker.hand_in(lease, await worker.begin(lease), seed)
                assert verdict.state == "accepted"
            versions = coordinator.runs.queries.versions
            async with asyncio.timeout(120):
                # Of two versions made at once only the newest is evaluated.
                while all(made.loss is None for made in (await versions("other"))[1:]):
                    await asyncio.sleep(0.02)
            listed = await workers[0].get("/runs")
            assert [run["name"] for run in listed.json()] == ["other"]
            assert (await home.client().get("/")).status_code == 200
        assert [beat.run for beat in await coordinator.runs.queries.beats()] == ["other"]
        assert await coordinator.upkeep.prune() == 0
        (alert,) = [each for each in await coordinator.alerts.list() if each.about == "tiny"]
        assert "cannot be read" in alert.message
