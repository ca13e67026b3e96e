"""Sentences that a newcomer reads on a busy server, until its first pay is free."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from sqlalchemy import update

from coordinator.checking.recompute_queue import Recomputes
from coordinator.database import standings
from coordinator.database.tables.trust import recomputes
from coordinator.top.tables import facts
from tests.e2e.server.test_open_run import LEARNING
from tests.e2e.server.test_recomputes import settled
from tests.support.local_coordinator import LocalCoordinator, local_coordinator
from tests.support.local_volunteer import LocalMachine, Process
from volunteer.control import events
from volunteer.headless import Headless, status_lines

OPEN = {"open": True, "proof_of_work_bits": 1}
SHORTER = "h of work: `coordinator checker work` on another machine takes its part"
AT_WORK = asyncio.Event()  # set while the server does tasks again


@asynccontextmanager
async def busy() -> AsyncIterator[None]:
    """Let the server do tasks again only while `AT_WORK` is set."""
    make = Recomputes.next

    async def later(self: Recomputes) -> bool:
        return AT_WORK.is_set() and await make(self)

    with pytest.MonkeyPatch.context() as patched:
        AT_WORK.set()
        patched.setattr(Recomputes, "next", later)
        yield


def proceed(home: LocalCoordinator) -> None:
    AT_WORK.set()
    home.coordinator.signals.notify("recomputes")


async def read_until(process: Process, words: str) -> list[str]:
    """Return the lines of `volunteer status`, once one of them begins with these words."""
    async with asyncio.timeout(120):
        while True:
            lines = status_lines(process.control.status)
            if any(line.startswith(words) for line in lines):
                return lines
            await asyncio.sleep(0.05)


async def organiser(home: LocalCoordinator) -> str:
    """Return what `coordinator trust` says is to be done again."""
    now = home.clock.now()
    backlog = await home.coordinator.db.read(lambda conn: standings.backlog(conn, now))
    return backlog.words


async def test_a_newcomer_is_told_how_long_its_proof_takes_until_its_pay_is_free(
    tmp_path: Path,
) -> None:
    async with busy(), local_coordinator(tmp_path / "coordinator", **OPEN) as home:
        await home.start_run(LEARNING)
        async with home.coordinator.working():
            ann, bob = LocalMachine(tmp_path / "ann", home), LocalMachine(tmp_path / "bob", home)
            await ann.join("Ann")
            async with ann.working(max_tasks=1) as process:
                assert await process.ended(120) == 0
            await settled(home)
            assert await organiser(home) == "nothing"
            AT_WORK.clear()
            async with ann.working(max_tasks=4) as process:
                assert await process.ended(120) == 0
            hours = update(recomputes).where(recomputes.c.state != "done").values(flops=3.6e13)
            await home.coordinator.db.write(lambda conn: conn.execute(hours))

            await bob.join("Bob")
            async with bob.working() as process:
                out = io.StringIO()
                reading = asyncio.ensure_future(Headless(process.control, out, json=False).run())
                lines = await read_until(process, "being proved, about ")
                assert any(line.startswith("credits: 0.00 earned, ") for line in lines), lines
                told = await organiser(home)
                assert told.endswith(SHORTER)
                seen = dict(facts(await home.coordinator.overviews.get()))
                assert seen["to be done again"].endswith(SHORTER)
                proceed(home)
                free = await process.until(events.Credits, lambda e: e.me.earned_micro > 0, 120)
                assert free.me.standing == "probation"
                reading.cancel()
            said = out.getvalue()
            assert " accepted" in said
            assert "not paid" not in said
        assert await home.coordinator.ledger.check() == ()
