"""A stored run file that cannot be read, or whose workload is not installed here, costs no other
run.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select, update

from coordinator.database.tables.runs import runs
from coordinator.database.tables.versions import evaluations
from shared.errors import Conflict
from tests.support.local_coordinator import RUN, local_coordinator


@pytest.mark.parametrize(
    ("file", "sentence", "todo"),
    [
        ('{"name": "tiny", "mod', "run file cannot be read", "restore a backup"),
        (
            func.replace(runs.c.file, '"workload":"gpt"', '"workload":"cnn"'),
            'the workload "cnn" is not installed here',
            "install it where the server runs, then start the server again",
        ),
    ],
    ids=["unreadable", "without its workload"],
)
async def test_a_run_that_cannot_go_on_here_costs_no_other_run(
    tmp_path: Path, database_url: str, file: object, sentence: str, todo: str
) -> None:
    settings: dict[str, Any] = {"database": database_url}
    async with local_coordinator(tmp_path, **settings) as home:
        await home.start_run(RUN)
        ann = await home.join("Ann")
        assert (await ann.claim(claim_id="once")).run == "tiny"
        await home.start_run(RUN.replace('"tiny"', '"other"'))
        damaged = update(runs).where(runs.c.name == "tiny").values(file=file)
        await home.coordinator.db.write(lambda conn: conn.execute(damaged))
    async with local_coordinator(tmp_path, **settings) as home:
        coordinator, ann.http = home.coordinator, home.client(f"{ann.worker_id}.{ann.secret}")
        again = {"claim_id": "once", "wait_s": 0.0, "codecs": ["float32"]}
        async with coordinator.working():
            refused = await ann.post("/claims", again)
            assert sentence in refused.json()["message"]
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
        state = select(evaluations.c.state).where(evaluations.c.run_id == 1)
        assert await coordinator.db.read(lambda conn: conn.execute(state).scalar()) == "waiting"
        assert await coordinator.upkeep.prune() == 0
        await home.clock.advance(90.0)
        await coordinator.alerts.look()
        (alert,) = [each for each in await coordinator.alerts.list() if each.about == "tiny"]
        assert sentence in alert.message
        assert alert.todo == todo
        (breach,) = (await coordinator.checks.run()).breaches
        assert '"tiny"' in breach
        assert sentence in breach
        with pytest.raises(Conflict, match='"sums" is the dataset of tiny, other'):
            await coordinator.wind_down.delete_dataset("sums", yes=True)
