"""Headings of versions: what a merge looks at before it steps, and what people see of it."""

from __future__ import annotations

from sqlalchemy import Connection

from coordinator.database import versions
from coordinator.database.engine.open_database import Database
from coordinator.rules.steadiness import Heading
from tests.support.run_rows import add_run, add_version


def stepped(conn: Connection, run: int, version: int, heading: float | None) -> None:
    scale = 0.5 if version > 3 else 1.0
    add_version(conn, run, version, heading=heading, outer_scale=scale)


async def test_the_last_versions_of_a_run_come_newest_first(database: Database) -> None:
    def write(conn: Connection) -> int:
        run = add_run(conn)
        add_run(conn, "another")
        for version, heading in enumerate((None, 0.3, 0.2, -0.1, 0.1), start=1):
            stepped(conn, run, version, heading)
        add_version(conn, run, 6, kind="rollback")
        return run

    run = await database.write(write)

    def read(conn: Connection) -> tuple[list[Heading], list[Heading], list[float]]:
        whole = versions.recent_headings(conn, run, head=6, most=256)
        near = versions.recent_headings(conn, run, head=6, most=3)
        return whole, near, [versions.outer_scale(conn, run, at) for at in (0, 3, 5, 99)]

    whole, near, scales = await database.read(read)
    assert whole == [
        Heading(0.5, 0.1),
        Heading(0.5, -0.1),
        Heading(1.0, 0.2),
        Heading(1.0, 0.3),
        Heading(1.0, None),
    ]
    assert near == whole[:2]  # among the three newest versions
    assert scales == [1.0, 1.0, 0.5, 1.0]


async def test_falls_of_a_rate_are_counted(database: Database) -> None:
    def write(conn: Connection) -> int:
        run = add_run(conn)
        for version, scale in enumerate((1.0, 1.0, 0.5, 0.5, 1.0, 0.5, 0.25), start=1):
            add_version(conn, run, version, heading=0.1, outer_scale=scale)
        add_version(conn, run, 8, kind="rollback")
        add_version(conn, run, 9, heading=0.1, outer_scale=0.25)
        return run

    run = await database.write(write)

    def read(conn: Connection) -> list[int]:
        return [versions.falls(conn, run, scale) for scale in (1.0, 0.5, 0.25, 0.125)]

    assert await database.read(read) == [0, 2, 1, 0]  # going back to a version is no fall
