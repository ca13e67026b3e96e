"""Scores of versions on task suites: the first and the newest of each, up to a version."""

from __future__ import annotations

import pytest
from sqlalchemy import Connection

from coordinator.database import datasets, evaluations, runs
from coordinator.database.engine.open_database import Database
from coordinator.database.evaluations import SuiteScoreRow
from coordinator.merging import suites
from shared.workloads.base import ChunkRef, DatasetManifest
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


@pytest.mark.parametrize(("last", "version", "is_due"), [(10, 19, False), (10, 20, True)])
async def test_suites_are_due_so_many_versions_after_the_last_ones(
    database: Database, last: int, version: int, is_due: bool
) -> None:
    def write(conn: Connection) -> list[str]:
        evaluation = {"suites": ["sums"], "suites_every": 10}
        row = runs.by_id(conn, add_run(conn, evaluation=evaluation))
        chunk = ChunkRef(sha256="ab" * 32, size=1, items=1)
        manifest = DatasetManifest(
            name="sums", kind="suite", licence="", source="", chunks=(), heldout=(chunk,)
        )
        datasets.add(conn, manifest, "cd" * 32)
        evaluations.put_scores(conn, row.id, [SuiteScoreRow("sums", last, 1, 2, 0)], 1.0)
        return [suite.name for suite in suites.due(conn, row, version)]

    assert await database.write(write) == ["sums"] * is_due
