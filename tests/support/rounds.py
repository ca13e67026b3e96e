"""Rounds of a run in a whole coordinator: the work of two workers, its effects, and the cost of
each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from coordinator.database import runs
from coordinator.database.ledger import record_tree
from shared.decoding import decode as parsed
from shared.protocol.versions import VersionManifest
from tests.support.local_coordinator import LocalCoordinator, Worker

T = TypeVar("T")


class MergeRounds:
    """Rounds of two workers, and the cost of each step: `spent` returns the total so far."""

    def __init__(
        self,
        home: LocalCoordinator,
        run: str,
        workers: Sequence[Worker],
        spent: Callable[[], float],
    ) -> None:
        self.cost: defaultdict[str, float] = defaultdict(float)  # in all rounds
        self._home, self._run, self._workers, self._spent = home, run, workers, spent

    async def _took(self, what: str, doing: Awaitable[T]) -> T:
        before = self._spent()
        found = await doing
        self.cost[what] += self._spent() - before
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
        await self._took("expire leases", inside.task_leases.expire())
        await self._took("prune", inside.upkeep.prune())
        await self._took("sweep", inside.upkeep.sweep())
        await self._took("seal", inside.db.write(record_tree.extend))
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
