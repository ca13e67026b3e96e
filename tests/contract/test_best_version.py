"""The best version of a run, by what was measured of its versions."""

from __future__ import annotations

import pytest
from sqlalchemy import Connection, insert

from coordinator.database import evaluations
from coordinator.database.engine.open_database import Database
from coordinator.database.tables.versions import evaluations as evaluations_table
from tests.support.run_rows import add_run, add_version

BLANK = {"state": "done", "metrics": "{}", "sample": "", "message": "", "pruned": False}


@pytest.mark.parametrize(
    ("losses", "best"),
    [
        ([3.0, 1.0, 2.0], 1),
        ([1.0, 1.0, 1.0], 2),  # not the untrained one
        ([2.0, 1.0, 1.0, 1.5], 2),
        ([3.0, None, None], 0),
        ([None], None),
    ],
)
async def test_the_newest_of_versions_that_tie_is_the_best(
    database: Database, losses: list[float | None], best: int | None
) -> None:
    def write(conn: Connection) -> int:
        run = add_run(conn)
        for version, loss in enumerate(losses):
            if version:  # a run begins with version 0
                add_version(conn, run, version)
            row = BLANK | {"run_id": run, "version": version, "loss": loss}
            conn.execute(insert(evaluations_table).values(row))
        return run

    run = await database.write(write)
    assert await database.read(lambda conn: evaluations.best(conn, run)) == best
