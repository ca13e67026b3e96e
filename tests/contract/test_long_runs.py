"""What a contribution costs does not depend on how many there were before it."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import Connection, delete, func, insert, select, update

from coordinator.accounts.accounts import COUNTED_S
from coordinator.database import audits, evaluations, recomputes, runs
from coordinator.database import contributions as contribution_rows
from coordinator.database.contributions import ContributionRow
from coordinator.database.engine.open_database import Database
from coordinator.database.recomputes import DrawTerms
from coordinator.database.tables.contributions import contributions
from coordinator.database.tables.tasks import tasks as table_of_tasks
from coordinator.database.tables.trust import recomputes as table_of_recomputes
from coordinator.database.tables.versions import evaluations as table
from shared.workloads.data.image_files import write_png
from tests.contract.test_escrow import NEW, add
from tests.support.account_rows import add_contribution, add_task
from tests.support.local_coordinator import RUN, local_coordinator
from tests.support.long_run import effort, grow, look_again
from tests.support.recompute_rows import first
from tests.support.rounds import MergeRounds
from tests.support.run_rows import add_run, add_versions

SHORT, LONG = 100, 2000  # rounds before: a page of history is full after the first
LOOKED_AT = 3  # rounds, of each
MORE = 1.5  # times as much work in the long run is no growth
SAMPLED = 5000  # versions with a sample
LITTLE = 700  # steps or rows: neither


def strand(conn: Connection) -> None:
    """Leave each volunteer's first contribution waiting for a merge that never comes: its run has
    ended.
    """
    ended = runs.by_name(conn, "ended").id
    c = contributions.c
    first = select(func.min(c.id)).group_by(c.volunteer_id)
    stranded = update(contributions).where(c.id.in_(first))
    conn.execute(stranded.values(state="accepted", run_id=ended))


@pytest.mark.slow
async def test_a_round_costs_no_more_after_many(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Standings are everybody's, and read anew at most a twentieth of the time, which stands here.
    monkeypatch.setattr("coordinator.accounts.leaderboard.FRESH_S", 1e9)
    with effort() as spent:
        async with local_coordinator(tmp_path, database=database_url) as home:
            run = await home.start_run()
            workers = (await home.join("Mia"), await home.join("Bob"))
            row = await home.coordinator.db.read(lambda conn: runs.by_name(conn, run))
            await home.coordinator.runs.stop(await home.start_run(RUN.replace('"tiny"', '"ended"')))
            seasons = []
            for rounds in (SHORT, LONG):
                # What is looked up once and remembered, then what is to be repeated.
                await MergeRounds(home, run, workers, lambda: spent.spent).round(10 * rounds)
                await home.coordinator.db.write(partial(grow, run_id=row.id, rounds=rounds))
                await home.coordinator.db.write(strand)
                await home.coordinator.db.write(look_again)
                await home.clock.advance(COUNTED_S + 1)  # as if they had taken their time
                seasons.append(MergeRounds(home, run, workers, lambda: spent.spent))
                await seasons[-1].round(10 * rounds + 5)
                seasons[-1].cost.clear()  # without what is counted once a minute
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


@pytest.mark.slow
async def test_a_check_reads_no_history_of_its_machine_nor_of_an_auditor(database_url: str) -> None:
    with effort() as spent:
        database = await Database.open(database_url)

        def begin(conn: Connection) -> int:
            add(conn, NEW, standing="vetted")
            return add_run(conn)

        run = await database.write(begin)

        def work(conn: Connection, tasks: int) -> ContributionRow:
            add_task(conn, run, kind="audit", volunteer_id=NEW)
            made = [add_contribution(conn, run, NEW, "merged") for _ in range(tasks)]
            conn.execute(update(table_of_tasks).values(volunteer_id=NEW))
            rows = contribution_rows.by_ids(conn, made)
            for row in rows:
                order = DrawTerms(work="{}", flops=1.0, kind="cpu")
                recomputes.add(conn, row, order)
            conn.execute(update(table_of_recomputes).values(state="done", result="passed"))
            return rows[-1]

        async def cost(tasks: int) -> int:
            row = await database.write(partial(work, tasks=tasks))
            await database.write(look_again)
            before = spent.spent
            assert await database.read(lambda conn: audits.auditors(conn, [NEW]))
            proven = await database.read(lambda conn: recomputes.proven(conn, NEW, 0))
            assert proven.last == row.id
            assert await database.write(lambda conn: first(conn, 1.0)) is None
            assert await database.read(recomputes.waiting) == 0
            assert await database.read(recomputes.blobs_in_use) == set()
            return spent.spent - before

        few, many = await cost(SHORT), await cost(LONG)
        await database.close()
    assert many <= MORE * few + LITTLE, (few, many)


async def test_a_long_curve_keeps_its_shape_and_its_end(database: Database) -> None:
    def learn(conn: Connection) -> int:
        run = add_run(conn)
        add_versions(conn, run, 1000)
        e = table.c
        made = [
            {"run_id": run, "version": v, "state": "done", "loss": 10.0 - v / 1000, "at": float(v)}
            | {"metrics": "{}", "sample": "", "message": "", "pruned": False}
            for v in range(1, 1001)
        ]
        conn.execute(delete(table).where(e.run_id == run, e.version > 0))
        conn.execute(insert(table), made)
        return run

    run = await database.write(learn)
    whole = await database.read(lambda conn: evaluations.measured(conn, run, 1000))
    assert [point.version for point in whole] == list(range(1, 1001))
    some = await database.read(lambda conn: evaluations.measured(conn, run, 100))
    assert [point.version for point in some] == list(range(10, 1001, 10))
    assert some[-1] == (1000, 9.0, 1000.0)
    few = await database.read(lambda conn: evaluations.measured(conn, run, 3))
    assert [point.version for point in few] == [332, 666, 1000]


async def test_strangers_asking_for_samples_read_no_history(
    tmp_path: Path, database_url: str
) -> None:
    """One row for a picture."""
    with effort() as spent:
        async with local_coordinator(tmp_path, database=database_url) as home:
            run = await home.start_run()
            row = await home.coordinator.db.read(lambda conn: runs.by_name(conn, run))
            picture = await home.coordinator.blobs.put_bytes(
                write_png(np.zeros((8, 8), dtype=np.uint8))
            )

            def draw(conn: Connection) -> None:
                made = [
                    {"run_id": row.id, "version": v, "state": "done", "loss": None, "at": 1.0}
                    | {"metrics": "{}", "sample": "x" * 500, "sample_sha256": picture}
                    | {"message": "", "pruned": True}
                    for v in range(1, SAMPLED)
                ]
                add_versions(conn, row.id, SAMPLED - 1)
                conn.execute(delete(table).where(table.c.run_id == row.id, table.c.version > 0))
                conn.execute(insert(table), made)

            await home.coordinator.db.write(draw)
            await home.coordinator.db.write(look_again)
            async with home.client() as client:

                async def get(path: str, times: int = 1) -> int:
                    before = spent.spent
                    replies = await asyncio.gather(
                        *(client.get(f"/runs/{run}/versions/{path}") for _ in range(times))
                    )
                    assert {reply.status_code for reply in replies} == {200}
                    return spent.spent - before

                few = {what: await get(f"{what}/sample.png") for what in (7, SAMPLED - 1)}
                assert max(few.values()) <= LITTLE, few
                assert await get("7/sample.png", 16) <= 16 * LITTLE / 2
