"""Tasks that enough volunteers failed are given up: whose word counts, and how many it takes."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import insert

from coordinator.database import tasks
from coordinator.database.engine.open_database import Database
from coordinator.database.tables.accounts import volunteers as volunteers_table
from coordinator.database.tables.tasks import failures as failures_table
from coordinator.database.tasks import TaskRow
from coordinator.rules.run_file import TaskSettings
from tests.contract.test_task_rows import HELD, NOW, Rows, changed
from tests.support.run_rows import add_worker


@pytest.fixture
async def rows(database: Database) -> Rows:
    made = Rows(database)
    await made.prepare()
    return made


class Jury:
    """Volunteers with and without a standing, and what they failed."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    async def volunteer(self, standing: str, account: str = "active", **worked: Any) -> str:
        """Add a volunteer, and a task that it did or holds; return its machine."""
        who = await self.rows.write(add_worker)
        people = volunteers_table
        told = people.update().where(people.c.id == who.volunteer_id)
        told = told.values(standing=standing, state=account)
        await self.rows.write(lambda c: c.execute(told))
        if worked:
            await self.rows.put(worker_id=who.worker_id, volunteer_id=who.volunteer_id, **worked)
        return who.worker_id

    async def fails(self, task: TaskRow, worker: str, kind: str = "failure") -> None:
        note = {"task_id": task.id, "attempt": 2, "worker_id": worker, "kind": kind}
        await self.rows.write(
            lambda c: c.execute(insert(failures_table).values(**note, message="", at=NOW))
        )

    async def hopeless(self, task: TaskRow, failures: int, timeouts: int = 0) -> bool:
        counted = changed(task, failures=failures, timeouts=timeouts)
        settings = TaskSettings(max_failures=2, max_timeouts=4)
        return await self.rows.db.read(lambda c: tasks.is_hopeless(c, counted, settings, NOW))


@pytest.fixture
async def jury(rows: Rows) -> Jury:
    return Jury(rows)


async def test_strangers_discard_a_task_by_their_number_where_nobody_vetted_works(
    rows: Rows, jury: Jury
) -> None:
    task, other = await rows.put(), await rows.put()
    one, two = [await jury.volunteer("probation") for _ in range(2)]
    await jury.fails(task, one)
    await jury.fails(task, one)
    await jury.fails(task, two, "timeout")
    await jury.fails(other, two)
    assert not await jury.hopeless(task, failures=9)  # one voice alone, however often
    await jury.fails(task, two)
    assert await jury.hopeless(task, failures=2)
    assert not await jury.hopeless(task, failures=1)


async def test_strangers_discard_nothing_where_a_vetted_volunteer_works(
    rows: Rows, jury: Jury
) -> None:
    task = await rows.put()
    for _ in range(3):
        await jury.fails(task, await jury.volunteer("probation"))
    await jury.volunteer("vetted", **HELD)
    assert not await jury.hopeless(task, failures=9)


async def test_vetted_volunteers_discard_a_task_by_their_number(rows: Rows, jury: Jury) -> None:
    task = await rows.put()
    await jury.volunteer("vetted", **HELD)
    await jury.fails(task, await jury.volunteer("vetted"))
    await jury.fails(task, await jury.volunteer("probation"))
    assert not await jury.hopeless(task, failures=9)
    await jury.fails(task, await jury.volunteer("vetted"))
    assert await jury.hopeless(task, failures=2)


DONE: dict[str, Any] = {"state": "done", "claimed_at": NOW - 1}


@pytest.mark.parametrize(
    ("worked", "account", "decides"),
    [
        (HELD, "active", False),
        (DONE, "active", False),
        (HELD, "banned", True),
        (DONE | {"claimed_at": NOW - tasks.LATELY_S}, "active", True),
        (DONE | {"claimed_at": NOW - tasks.LATELY_S + 1}, "active", False),
        (DONE | {"claimed_at": None}, "active", True),
        (DONE | {"state": "todo"}, "active", True),
    ],
)
async def test_a_vetted_volunteer_decides_alone_where_no_other_is_at_work(
    rows: Rows, jury: Jury, worked: dict[str, Any], account: str, decides: bool
) -> None:
    task = await rows.put()
    await jury.volunteer("vetted", account, **worked)
    await jury.volunteer("vetted", **HELD, run_id=rows.other)  # works for another run
    await jury.fails(task, await jury.volunteer("vetted", **HELD))
    assert await jury.hopeless(task, failures=4) == decides
    assert not await jury.hopeless(task, failures=3)  # alone it takes twice as many


async def test_only_the_newest_work_says_who_is_at_work(
    rows: Rows, jury: Jury, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "LATELY", 1)
    task = await rows.put()
    await jury.volunteer("vetted", **DONE)
    alone = await jury.volunteer("vetted", **DONE)
    await jury.fails(task, alone)
    assert await jury.hopeless(task, failures=4)


async def test_timeouts_discard_a_task_after_two_volunteers_or_all_at_work(
    rows: Rows, jury: Jury
) -> None:
    task = await rows.put()
    await jury.volunteer("vetted", **HELD)
    await jury.fails(task, await jury.volunteer("vetted", **HELD), "timeout")
    assert not await jury.hopeless(task, failures=0, timeouts=9)
    await jury.fails(task, await jury.volunteer("vetted"), "timeout")
    assert not await jury.hopeless(task, failures=0, timeouts=3)
    assert await jury.hopeless(task, failures=0, timeouts=4)
