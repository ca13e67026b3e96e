"""The overview: its figures, and that looking costs the same after many versions."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import Connection, func, insert, select, update

from coordinator.accounts.bearer_tokens import Principal
from coordinator.database import record, runs
from coordinator.database.engine.open_database import Database
from coordinator.database.monitoring import census, overview_rows, replicas
from coordinator.database.tables.accounts import volunteers, workers
from coordinator.database.tables.contributions import contributions
from coordinator.database.tables.merges import merges
from coordinator.database.tables.tasks import failures, tasks
from coordinator.database.tables.versions import evaluations, versions
from coordinator.rules import health
from coordinator.rules.overview import Flow, ReplicaFigures
from coordinator.runs.queries import RunQueries
from coordinator.upkeep.overview_cache import Overviews
from coordinator.upkeep.replica_beats import Beats
from tests.support.local_coordinator import local_coordinator
from tests.support.long_run import effort, look_again
from tests.support.run_rows import add_run, add_worker, claim, queue_of
from tests.support.virtual_clock import VirtualClock

VERSIONS, WORKERS = 20_000, 10_000
LITTLE = 4_000  # steps of SQLite's machine, or rows that PostgreSQL read: of the overview alone
A_WORKER = 60  # of the census, for each worker
NEWEST = 150_000  # of the census, for the newest contributions, failures and checks


def lived(conn: Connection, run_id: int, count: int) -> None:
    """A run of so many versions: a task, a contribution and a merge each."""
    head = int(conn.execute(select(func.max(versions.c.version))).scalar_one())
    volunteer, worker = conn.execute(select(workers.c.volunteer_id, workers.c.id)).one()
    rows = range(head + 1, head + 1 + count)
    shas = "0" * 64
    blank = {"run_id": run_id, "attempt": 1, "worker_id": worker, "volunteer_id": volunteer}
    task = {
        "kind": "train", "pass_no": 1, "start": 0, "stop": 8, "seed": 1, "steps": 4,
        "batch_size": 2, "price_micro": 1, "state": "done", "device": "cpu", "returned": False,
        "failures": 0, "timeouts": 0, "options": "{}",
    }  # fmt: skip
    done = {
        "part": 0, "tries": 0, "kind": "delta", "codec": "int8", "sha256": shas, "size": 100,
        "steps": 4, "samples": 8, "price_micro": 1, "train_s": 1.0, "clip": 1.0,
        "state": "merged", "reason": "", "message": "", "report": "{}",
    }  # fmt: skip
    version = {
        "run_id": run_id, "kind": "merge", "master_sha256": shas, "published_sha256": shas,
        "size": 1, "manifest": "{}", "signature": "", "contributions": "[]", "global_step": 1,
        "tokens": 1,
    }  # fmt: skip
    seen = {"run_id": run_id, "state": "done", "loss": 2.0, "metrics": "{}", "sample": ""}
    merge = {
        "run_id": run_id, "shard": 0, "state": "committed", "contributions": "[1]", "owner": "",
        "attempt": 1, "lease_until": 0.0, "failures": 0, "message": "", "terms": "{}",
    }  # fmt: skip
    for table, made in (
        (tasks, [blank | task | {"id": 10 + n} for n in rows]),
        (
            contributions,
            [
                blank
                | done
                | {"id": n, "task_id": 10 + n, "digest": str(n), "version": n}
                | {"base_version": n - 1, "received_at": n / 10, "merged_at": n / 10}
                for n in rows
            ],
        ),
        (versions, [version | {"version": n, "parent": n - 1, "created_at": n / 10} for n in rows]),
        (
            evaluations,
            [seen | {"version": n, "at": n / 10, "message": "", "pruned": True} for n in rows],
        ),
        (
            merges,
            [merge | {"base": n - 1, "created_at": n / 10, "ended_at": n / 10} for n in rows],
        ),
    ):
        conn.execute(insert(table), made)
    runs.set_values(conn, run_id, head=rows[-1])


def crowd(conn: Connection, count: int) -> None:
    """So many workers, each of a volunteer of its own."""
    person = {"state": "active", "public": True, "created_at": 0.0}
    machine = {
        "secret_hash": "", "hostname": "host", "hardware": "x" * 300, "benchmark": "[]",
        "software": "", "state": "training", "step_flops": 1e9, "workloads": "[]",
        "created_at": 0.0,
    }  # fmt: skip
    ids = [f"crowd-{n}" for n in range(count)]
    people = [person | {"id": who, "nickname": who, "nickname_key": who} for who in ids]
    conn.execute(insert(volunteers), people)
    made = [machine | {"id": f"w-{who}", "volunteer_id": who, "last_seen_at": 1.0} for who in ids]
    conn.execute(insert(workers), made)


async def test_the_overview_says_what_is_under_way(database: Database) -> None:
    clock = VirtualClock()

    def make(conn: Connection) -> Principal:
        run = add_run(conn, "busy")
        add_run(conn, "draft", state="draft")
        who = add_worker(conn, step_flops=3e9)
        lived(conn, run, 30)
        return who

    who = await database.write(make)
    queue = queue_of(database, clock)
    lease = (await claim(queue, who)).lease
    assert lease is not None

    def spoil(conn: Connection) -> None:
        now = clock.now()
        c = contributions.c
        newest = update(contributions).values(received_at=now - 60)
        conn.execute(newest)
        bad = {"state": "rejected", "reason": "norm", "message": "far too large", "version": None}
        conn.execute(update(contributions).where(c.id.in_((29, 30))).values(**bad))
        conn.execute(update(contributions).where(c.id == 28).values(state="accepted", version=None))
        conn.execute(update(tasks).where(tasks.c.id == 20).values(state="discarded"))
        note = {"task_id": 20, "attempt": 1, "kind": "failure", "message": "out of memory"}
        held = conn.execute(select(workers.c.id)).scalar_one()
        conn.execute(insert(failures).values(**note, worker_id=held, at=now))

    await database.write(spoil)
    seen = await Overviews(database, clock, "here", RunQueries(database, clock).standstills).get()
    busy, draft = seen.runs
    assert (busy.name, busy.version, busy.loss, busy.state) == ("busy", 30, 2.0, "running")
    assert (busy.workers, busy.doing, busy.failed, busy.accepted) == (1, 1, 1, 1)
    assert (draft.name, draft.state) == ("draft", "draft")
    assert seen.window.good == 28
    assert seen.window.refused == 2
    assert busy.pushed == Flow(contributions=28 * 60.0, samples=28 * 8 * 60.0)
    assert busy.pulled == Flow(contributions=27 * 60.0, samples=27 * 8 * 60.0)
    (refusal,) = seen.refusals
    assert (refusal.reason, refusal.count, refusal.newest) == ("norm", 2, "far too large")
    (worker,) = seen.machines
    assert (worker.task, worker.run, worker.step_flops) == (lease.task, "busy", 3e9)
    assert (worker.good, worker.refused, worker.failures) == (28, 2, 1)
    merge = seen.merges[3]  # of version 27, which merged one contribution that is not refused
    assert (merge.run, merge.version, merge.staleness, merge.staleness_max) == ("busy", 27, 0.0, 0)
    (failed,) = seen.failed
    assert (failed.id, failed.run, failed.message) == (20, "busy", "out of memory")
    assert seen.database.kind == database.dialect
    assert seen.database.bytes > 0
    assert seen.verdict.level == "bad"
    assert "no server is running" in seen.verdict.text


async def test_who_serves_is_seen_until_it_stops(database: Database, tmp_path: Path) -> None:
    clock, stop, seen = VirtualClock(), asyncio.Event(), list[int]()
    figures = ReplicaFigures(where="http://one", requests=7)
    killed = asyncio.ensure_future(
        Beats(database, clock, tmp_path, lambda: figures, lambda count: None).run(stop)
    )
    await _serves(database, "http://one")
    (line,) = await database.read(replicas.listing)
    assert line.figures.requests == 7
    killed.cancel()  # its line stays
    # The next process of that place takes over, of SQLite the next of all; no other one does.
    jobs: list[asyncio.Future[None]] = []
    for place, url in ((tmp_path, "http://again"), (tmp_path / "other", "http://two")):
        if jobs and database.dialect == "sqlite":  # which one process serves
            jobs.pop().cancel()
        other = ReplicaFigures(where=url)
        beats = Beats(database, clock, place, partial(msgspec.structs.replace, other), seen.append)
        jobs.append(asyncio.ensure_future(beats.run(stop)))
        await _serves(database, url)
    lines = await database.read(replicas.listing)
    both = {"http://again", "http://two"} if database.dialect == "postgresql" else {"http://two"}
    assert {one.figures.where for one in lines} == both
    before = clock.now() - replicas.FORGOTTEN_S - 1.0
    await database.write(lambda conn: replicas.begin(conn, "gone", "elsewhere", before))
    await clock.advance(60.0)  # nobody starts or stops
    while "gone" in {one.id for one in await database.read(replicas.listing)}:
        await asyncio.sleep(0.01)
    while not all(health.alive(one, clock.now()) for one in await database.read(replicas.listing)):
        await clock.advance(1.0)
    recently = clock.now() - health.SILENT_S - 1.0
    await database.write(lambda conn: replicas.begin(conn, "stopped", "elsewhere", recently))
    overviews = Overviews(database, clock, "home", RunQueries(database, clock).standstills)
    assert "stopped" in {one.id for one in (await overviews.get()).replicas}
    await overviews.forget_silent()  # a key of `top`
    assert {one.figures.where for one in await database.read(replicas.listing)} == both
    stop.set()
    await asyncio.gather(*jobs)
    assert seen[:2] == [1, len(both)]  # each takes its share of the limits
    assert await database.read(replicas.listing) == ()


async def _serves(database: Database, url: str) -> None:
    while url not in {one.figures.where for one in await database.read(replicas.listing)}:
        await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_looking_costs_no_more_after_many_versions(tmp_path: Path, database_url: str) -> None:
    with effort() as spent:
        async with local_coordinator(tmp_path, database=database_url) as home:
            db, now = home.coordinator.db, home.clock.now()
            run = await db.write(lambda conn: add_run(conn, "long"))
            await db.write(add_worker)

            async def cost(what: str) -> int:
                await db.write(look_again)
                before = spent.spent
                if what == "census":
                    await db.read(lambda conn: census.census(conn, now))
                else:
                    await db.read(lambda conn: overview_rows.listing(conn, now))
                    await db.read(lambda conn: overview_rows.queues(conn, now))
                    await db.read(lambda conn: overview_rows.newest_merges(conn, {}, now))
                    await db.read(lambda conn: census.failed_tasks(conn))
                return spent.spent - before

            await db.write(lambda conn: lived(conn, run, 3000))
            young = {what: await cost(what) for what in ("overview", "census")}
            assert min(young.values()) > 0
            for _ in range(10):
                await db.write(lambda conn: lived(conn, run, (VERSIONS - 3000) // 10))
            old = {what: await cost(what) for what in young}
            assert old["overview"] <= young["overview"] + LITTLE, (young, old)
            assert old["census"] <= young["census"] + LITTLE, (young, old)
            assert old["overview"] <= LITTLE, old
            await db.write(lambda conn: crowd(conn, WORKERS))
            many = {what: await cost(what) for what in young}
            assert many["overview"] <= old["overview"] + LITTLE, (old, many)
            assert many["census"] <= old["census"] + A_WORKER * WORKERS, (old, many)


async def test_one_picture_serves_all_who_ask_at_once(database: Database) -> None:
    clock = VirtualClock()
    overviews = Overviews(database, clock, "here", RunQueries(database, clock).standstills)
    first, *others = await asyncio.gather(*(overviews.get() for _ in range(50)))
    assert all(other is first for other in others)
    assert await overviews.get() is first
    await clock.advance(60.0)
    assert await overviews.get() is not first


async def test_reasons_of_the_organiser_stand_in_the_record(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home:
        run = await home.start_run()
        admin = {"name": run, "reason": "the disk\n is \x1b[31mfull"}
        for command in ("run.pause", "run.resume"):
            done = await home.admin.post(f"/api/v1/admin/{command}", json=admin)
            assert done.status_code == 200
        lines = await home.coordinator.db.read(record.entries)
        assert [(line.action, line.detail) for line in lines[:2]] == [
            ("run.resume", "the disk is [31mfull"),
            ("run.pause", "the disk is [31mfull"),
        ]
