"""Open tasks of runs, the pace of a run and work of volunteers, on every database."""

from __future__ import annotations

from sqlalchemy import Connection, select

from coordinator.database import statistics, versions
from coordinator.database.engine.open_database import Database
from coordinator.database.monitoring.overview_rows import listing
from coordinator.database.tables.runs import runs
from tests.benchmarks.bench_metrics import fill
from tests.support.run_rows import add_run, add_version


async def test_runs_have_their_open_tasks_and_the_machines_at_them(database: Database) -> None:
    await database.write(lambda conn: fill(conn, 2, 9))  # run-0: todo, run-1: doing
    read, _ = await database.read(lambda conn: listing(conn, 0.0))
    found = {each.line.name: each.line for each in read}
    assert (found["run-0"].todo, found["run-0"].doing, found["run-0"].workers) == (5, 0, 0)
    assert (found["run-1"].todo, found["run-1"].doing, found["run-1"].workers) == (0, 4, 4)
    assert (found["run-0"].version, found["run-0"].checking) == (0, 0)


async def test_the_pace_of_a_run(database: Database) -> None:
    def make(conn: Connection) -> int:
        run = add_run(conn)
        for number in range(1, 31):
            add_version(conn, run, number)
        return run

    run = await database.write(make)

    def read(conn: Connection) -> tuple[object, ...]:
        assert conn.execute(select(runs.c.head).where(runs.c.id == run)).scalar() == 30
        return (
            versions.pace(conn, run, 30),
            versions.pace(conn, run, 0),
            statistics.work_over_time(conn, "nobody", [run], 0.0),
        )

    pace, alone, work = await database.read(read)
    assert pace == alone == (0.0, 0.0)  # these rows have no times
    assert work == []
