"""Scores of versions on task suites: the first and the newest of each, up to a version."""

from __future__ import annotations

from sqlalchemy import Connection

from coordinator.database import evaluations
from coordinator.database.engine.open_database import Database
from coordinator.database.evaluations import SuiteScoreRow
from tests.support.run_rows import add_run


async def test_the_first_and_the_newest_score_of_each_suite_are_found(database: Database) -> None:
    def write(conn: Connection) -> int:
        run, other = add_run(conn), add_run(conn, "another")
        evaluations.put_scores(conn, other, [SuiteScoreRow("a", 99, 1, 2, 0)], 1.0)
        for version in (0, 10, 20):
            rows = [SuiteScoreRow("a", version, version // 5, 8, 1)]
            if version:  # one that could not be measured at first
                rows.append(SuiteScoreRow("b", version, 1, 4, 0))
            evaluations.put_scores(conn, run, rows, 2.0)
        evaluations.put_scores(conn, run, [SuiteScoreRow("b", 20, 3, 4, 0)], 3.0)  # measured again
        return run

    run = await database.write(write)
    whole = await database.read(lambda conn: evaluations.course(conn, run))
    assert whole == {
        "a": (SuiteScoreRow("a", 0, 0, 8, 1), SuiteScoreRow("a", 20, 4, 8, 1)),
        "b": (SuiteScoreRow("b", 10, 1, 4, 0), SuiteScoreRow("b", 20, 3, 4, 0)),
    }
    early = await database.read(lambda conn: evaluations.course(conn, run, 15))
    assert [rows[1].version for rows in early.values()] == [10, 10]
    assert await database.read(lambda conn: evaluations.course(conn, run + 99)) == {}
    assert await database.read(lambda conn: evaluations.last_version(conn, run)) == 20
    assert await database.read(lambda conn: evaluations.last_version(conn, run + 99)) is None
