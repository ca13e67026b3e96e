"""Two transactions of one account at one moment on PostgreSQL: one waits, none is a victim."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Engine, event
from sqlalchemy.util import await_only

from coordinator.database.tables.trust import recomputes
from tests.e2e.server.test_late_decisions import WAITING
from tests.support.databases import Postgres, deadlocks
from tests.support.local_coordinator import RUN, LocalCoordinator, local_coordinator


class Pause:
    """A transaction stops behind its first statement with this text, until `go` is set."""

    def __init__(self, text: str) -> None:
        self.text, self.reached, self.go = text, asyncio.Event(), asyncio.Event()

    @contextmanager
    def installed(self) -> Iterator[None]:
        event.listen(Engine, "after_cursor_execute", self._stop)
        try:
            yield
        finally:
            event.remove(Engine, "after_cursor_execute", self._stop)

    def _stop(self, conn: object, cursor: object, statement: str, *more: Any) -> None:
        if self.text in statement and not self.reached.is_set():
            self.reached.set()
            await_only(self.go.wait())


async def waits_for_a_lock(home: LocalCoordinator) -> None:
    async with asyncio.timeout(30):
        while not await home.coordinator.db.read(
            lambda conn: conn.execute(sa.text(WAITING)).scalar_one()
        ):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("action", ["suspend", "ban and suspend"])
async def test_a_recompute_that_ends_while_its_account_is_shut_out_is_no_deadlock(
    postgres: Postgres, tmp_path: Path, action: str
) -> None:
    url = await postgres.fresh()
    before = await deadlocks(url)
    async with local_coordinator(tmp_path, database=url) as home:
        await home.start_run(RUN.replace("quorum = 2", "quorum = 9") + "[trust]\nrecompute = 1.0\n")
        ann, people = await home.stranger("Ann"), home.coordinator.volunteers
        assert (await ann.work(1)).state == "accepted"
        pause = Pause(" measured=")
        with pause.installed():
            end = asyncio.create_task(home.coordinator.recomputes.next())
            async with asyncio.timeout(30):
                await pause.reached.wait()
            change = people.suspend if action == "suspend" else people.ban_and_suspend
            shut_out = asyncio.create_task(change(ann.volunteer_id, "copies"))
            await waits_for_a_lock(home)
            pause.go.set()
            assert await end
            await shut_out
        result = await home.coordinator.db.read(
            lambda conn: conn.execute(sa.select(recomputes.c.result)).scalar_one()
        )
        assert result == "failed"  # the update of this test is made up
        assert await home.coordinator.ledger.check() == ()
    assert await deadlocks(url) == before
    await postgres.recycle(url)
