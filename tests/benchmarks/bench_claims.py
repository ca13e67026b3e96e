"""Claims a second at the service call: 64 claimers joined into common statements, beside one claim
a statement.

    python tests/benchmarks/bench_claims.py --json claims.json
    python tests/benchmarks/bench_claims.py --rounds 5 --repeats 2 --database sqlite

Both databases, commits synced. "single" is the same service with one claim a transaction; "bare" is
nothing but UPDATE ... WHERE id = (SELECT ... FOR UPDATE SKIP LOCKED) RETURNING on waiting tasks,
one transaction each (8 clients at once on PostgreSQL, where that helps). The sides take turns; a
ratio is the median over the repeats. Every claim must be distinct.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sqlalchemy import Connection, insert, select, update

from coordinator.accounts.accounts import Principal
from coordinator.database.engine.open_database import Database, migrate
from coordinator.database.tables.tasks import tasks
from coordinator.scheduling.task_leases import TaskLeases
from shared.clock import SystemClock
from tests.support.databases import prepare_postgres, start_postgres
from tests.support.run_rows import add_run, add_worker, claim, queue_of

CLAIMERS = 64
BARE_CLIENTS = {"sqlite": 1, "postgresql": 8}
GOAL = {"sqlite": 10.0, "postgresql": 4.0}
GOAL_RATE = 2000.0


@dataclass(frozen=True, kw_only=True)
class Row:
    database: str
    tasks: str  # new ranges of the pass, or reissued
    joined_per_s: float
    single_per_s: float
    bare_per_s: float
    joined_to_single: float
    joined_to_bare: float
    distinct: bool
    goal: float
    reached: bool


def _end_all(conn: Connection) -> None:
    done = update(tasks).where(tasks.c.state == "doing")
    conn.execute(done.values(state="done", claim_id=None, renew_by=None, ended_at=0.0))


def _add_waiting(conn: Connection, run_id: int, count: int) -> None:
    """Add tasks that were given back."""
    line = {"run_id": run_id, "kind": "train", "pass_no": 1, "seed": 1, "steps": 1, "batch_size": 1}
    line |= {"price_micro": 1, "state": "todo", "attempt": 1, "device": "cpu", "returned": False}
    line |= {"failures": 0, "timeouts": 0, "options": "{}"}
    conn.execute(insert(tasks), [{**line, "start": i, "stop": i + 1} for i in range(count)])


def _bare(conn: Connection) -> int:
    waiting = select(tasks.c.id).where(tasks.c.state == "todo").order_by(tasks.c.id).limit(1)
    picked = waiting.with_for_update(skip_locked=True).scalar_subquery()
    taken = (
        update(tasks).where(tasks.c.id == picked).values(state="doing", attempt=2, worker_id=None)
    )
    return int(conn.execute(taken.returning(tasks.c.id)).scalar_one())


@dataclass
class Bench:
    """One database with a run and its claimers."""

    db: Database
    queue: TaskLeases
    workers: Sequence[Principal]
    run_id: int
    reissued: bool
    taken: int = 0
    distinct: bool = True

    async def timed(
        self, work: Callable[[], Awaitable[list[tuple[int, int]]]], count: int
    ) -> float:
        """Claims a second of one round. What was claimed is ended afterwards, outside the time."""
        if self.reissued:
            await self.db.write(lambda conn: _add_waiting(conn, self.run_id, count))
        began = time.perf_counter()
        got = await work()
        took = time.perf_counter() - began
        self.distinct &= len(set(got)) == len(got) == count
        await self.db.write(_end_all)
        return count / took

    async def service(self, joined_max: int, count: int) -> float:
        self.queue.claims.batcher.most = joined_max

        async def one(who: Principal) -> tuple[int, int]:
            lease = (await claim(self.queue, who)).lease
            assert lease is not None
            return lease.task, lease.attempt

        async def all_at_once() -> list[tuple[int, int]]:
            return await asyncio.gather(*(one(who) for who in self.workers[:count]))

        return await self.timed(all_at_once, count)

    async def bare(self, count: int) -> float:
        clients = BARE_CLIENTS[self.db.dialect]

        async def client() -> list[tuple[int, int]]:
            return [(await self.db.write(_bare), 2) for _ in range(count // clients)]

        async def work() -> list[tuple[int, int]]:
            return [
                each
                for some in await asyncio.gather(*(client() for _ in range(clients)))
                for each in some
            ]

        if not self.reissued:
            await self.db.write(lambda conn: _add_waiting(conn, self.run_id, count))
        return await self.timed(work, count)


async def measure(url: str, reissued: bool, rounds: int, repeats: int) -> Row:
    db = await Database.open(url)
    try:
        workers = await db.write(lambda conn: [add_worker(conn) for _ in range(CLAIMERS)])
        task = {"local_steps": 1, "batch_size": 1}
        name = f"bench-{int(reissued)}"
        run_id = await db.write(lambda conn: add_run(conn, name, counts=(10**6,) * 8, task=task))
        bench = Bench(db, queue_of(db, SystemClock(), 10**6), workers, run_id, reissued)
        for warm in (256, 1):
            await bench.service(warm, CLAIMERS)
        await bench.bare(CLAIMERS)
        seen: list[tuple[float, float, float]] = []
        for _ in range(repeats):
            joined = [await bench.service(256, CLAIMERS) for _ in range(rounds)]
            single = [await bench.service(1, CLAIMERS) for _ in range(max(1, rounds // 4))]
            bare = [await bench.bare(CLAIMERS) for _ in range(max(1, rounds // 4))]
            seen.append(
                (statistics.median(joined), statistics.median(single), statistics.median(bare))
            )
    finally:
        await db.close()
    joined_s, single_s, bare_s = (statistics.median(column) for column in zip(*seen, strict=True))
    to_single = statistics.median(joined / single for joined, single, _ in seen)
    to_bare = statistics.median(joined / bare for joined, _, bare in seen)
    goal = GOAL[db.dialect]
    return Row(
        database=db.dialect,
        tasks="reissued" if reissued else "new ranges",
        joined_per_s=round(joined_s),
        single_per_s=round(single_s),
        bare_per_s=round(bare_s),
        joined_to_single=round(to_single, 1),
        joined_to_bare=round(to_bare, 1),
        distinct=bench.distinct,
        goal=goal,
        reached=bench.distinct and to_single >= goal and joined_s >= GOAL_RATE,
    )


def table(rows: Sequence[Row]) -> str:
    head = (
        "database    tasks       joined/s  single/s    bare/s  x single  x bare   goal  "
        "distinct  reached"
    )
    lines = [
        f"{row.database:<11} {row.tasks:<11} {row.joined_per_s:>8.0f} {row.single_per_s:>9.0f}"
        f" {row.bare_per_s:>9.0f} {row.joined_to_single:>9.1f} {row.joined_to_bare:>7.1f}"
        f" {row.goal:>6.0f}  {row.distinct!s:<8}  {row.reached}"
        for row in rows
    ]
    return "\n".join([head, *lines])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20, help="of 64 claims, in each repeat")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--database", choices=["sqlite", "postgresql"], action="append")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[Row] = []

    def run(url: str) -> None:
        for reissued in (False, True):
            row = asyncio.run(measure(url, reissued, options.rounds, options.repeats))
            rows.append(row)

    kinds = options.database or ["sqlite", "postgresql"]
    if "sqlite" in kinds:
        with tempfile.TemporaryDirectory() as directory:
            url = f"sqlite:///{directory}/bench.db"
            asyncio.run(migrate(url))
            run(url)
    if "postgresql" in kinds:
        server = start_postgres()
        try:
            asyncio.run(prepare_postgres(server))
            run(asyncio.run(server.fresh()))
        finally:
            server.stop()
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2))


if __name__ == "__main__":
    main()
