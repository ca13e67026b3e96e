"""What a contribution costs does not depend on how many there were before it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, delete, insert

from coordinator.store import ledger, runs, versions
from coordinator.store.database import Database
from coordinator.store.tables import evaluations
from shared.decoding import decode as parsed
from shared.protocol import VersionManifest
from tests.aged import effort, grow, look_again
from tests.house import House, Worker, house
from tests.runs import add_run, add_version

T = TypeVar("T")

SHORT, LONG = 100, 2000  # rounds before: a page of history is full after the first
LOOKED_AT = 3  # rounds, of each
MORE = 1.5  # times as much work in the long run is no growth
LITTLE = 400  # steps or rows: neither


class Season:
    """Rounds of two workers, and what each of their steps took."""

    def __init__(self, home: House, run: str, workers: tuple[Worker, Worker], spent: Any) -> None:
        self.cost: Counter[str] = Counter()
        self._home, self._run, self._workers, self._effort = home, run, workers, spent

    async def _took(self, what: str, doing: Awaitable[T]) -> T:
        before = self._effort.spent
        found = await doing
        self.cost[what] += self._effort.spent - before
        return found

    async def round(self, seed: int) -> None:
        for worker in self._workers:
            await self._contribute(worker, seed)
            seed += 1
        inside = self._home.coordinator
        run = await inside.db.read(lambda conn: runs.by_name(conn, self._run))
        assert await self._took("merge", inside.merger.merge_if_due(run.id))
        await self._home.clock.advance(3)
        await self._took("evaluate", inside.evaluation.evaluate_next())
        await self._took("end runs", inside.upkeep.end_runs())
        await self._took("recheck", inside.intake.recheck())
        await self._took("expire uploads", inside.uploads.expire())
        await self._took("expire leases", inside.queue.expire())
        await self._took("prune", inside.upkeep.prune())
        await self._took("sweep", inside.upkeep.sweep())
        await self._took("seal", inside.db.write(ledger.seal))
        for path in ("/contributions", "/me/ledger", "/runs", f"/runs/{self._run}"):
            answer = await self._took(f"GET {path}", self._workers[0].get(path))
            assert answer.status_code == 200, answer.text
        assert (
            await self._took("GET /metrics", self._home.admin.get("/metrics"))
        ).status_code == 200

    async def _contribute(self, worker: Worker, seed: int) -> None:
        lease = await self._took("claim", worker.claim())
        begun = await self._took("begin", worker.begin(lease))
        assert begun.manifest is not None
        weights = parsed(begun.manifest.payload, VersionManifest).weights
        got = await self._took("download", worker.get(f"/blobs/{weights.sha256}"))
        assert got.status_code == 200
        data = await worker.update(self._run, seed)
        await self._took("upload", worker.upload(lease, data))
        said = worker.submission(lease, begun, data)
        answer = await self._took("submit", worker.post(f"/tasks/{lease.task}/submit", said))
        assert answer.status_code == 200, answer.text
        beat = {"tasks": [], "news_since": 0}
        await self._took("heartbeat", worker.post("/workers/heartbeat", beat))


async def test_a_round_costs_no_more_after_many(tmp_path: Path, database_url: str) -> None:
    with effort() as spent:
        async with house(tmp_path, database=database_url) as home:
            run = await home.start_run()
            workers = (await home.join("Mia"), await home.join("Bob"))
            row = await home.coordinator.db.read(lambda conn: runs.by_name(conn, run))
            seasons = []
            for rounds in (SHORT, LONG):
                # What is looked up once and remembered, then what is to be repeated.
                await Season(home, run, workers, spent).round(10 * rounds)
                await home.coordinator.db.write(partial(grow, run_id=row.id, rounds=rounds))
                await home.coordinator.db.write(look_again)
                seasons.append(Season(home, run, workers, spent))
                for turn in range(LOOKED_AT):
                    await seasons[-1].round(10 * (rounds + turn + 1))
            young, old = seasons
    assert young.cost["submit"] > 0
    grown = {
        what: (young.cost[what], cost)
        for what, cost in old.cost.items()
        if cost > MORE * young.cost[what] + LITTLE
    }
    assert not grown, f"these grow with what was done before, effort then and now: {grown}"


async def test_a_long_curve_keeps_its_shape_and_its_end(database: Database) -> None:
    def learn(conn: Connection) -> int:
        run = add_run(conn)
        for version in range(1, 1001):
            add_version(conn, run, version)
        e = evaluations.c
        made = [
            {"run_id": run, "version": v, "state": "done", "loss": 10.0 - v / 1000, "at": float(v)}
            | {"metrics": "{}", "sample": "", "message": "", "pruned": False}
            for v in range(1, 1001)
        ]
        conn.execute(delete(evaluations).where(e.run_id == run, e.version > 0))
        conn.execute(insert(evaluations), made)
        return run

    run = await database.write(learn)
    whole = await database.read(lambda conn: versions.measured(conn, run, 1000))
    assert [point.version for point in whole] == list(range(1, 1001))
    some = await database.read(lambda conn: versions.measured(conn, run, 100))
    assert [point.version for point in some] == list(range(10, 1001, 10))
    assert some[-1] == (1000, 9.0, 1000.0)
    few = await database.read(lambda conn: versions.measured(conn, run, 3))
    assert [point.version for point in few] == [332, 666, 1000]
