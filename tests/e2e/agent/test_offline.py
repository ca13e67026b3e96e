"""The coordinator is away: the task in hand is completed, what was claimed ahead waits, and both
are handed in.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from coordinator.database import verdicts
from tests.support.local_coordinator import LocalCoordinator, local_coordinator
from tests.support.local_volunteer import LONG, LocalMachine, Process
from volunteer.control import commands, events

STEP = LONG.replace("local_steps = 400", "local_steps = 60")
OVERLAP = STEP.replace("quorum = 1", "quorum = 1\noverlap = true")
SPEED = 10.0  # of the clock: the last seconds of a task are long enough to claim another


class Away:
    """A machine that is lent, and a coordinator that can be ended and started again on its
    database.
    """

    def __init__(self, path: Path, database_url: str) -> None:
        self._path = path
        self._url = database_url
        self._stack = AsyncExitStack()
        self.machine: LocalMachine

    async def start(self) -> LocalCoordinator:
        home = await self._stack.enter_async_context(
            local_coordinator(self._path / "coordinator", database=self._url)
        )
        await self._stack.enter_async_context(home.coordinator.working())
        return home

    async def stop(self, *processes: Process) -> None:
        """End the coordinator, as these volunteers see it too."""
        for process in processes:
            process.network.cut = True
        await self._stack.aclose()

    async def back(self, *processes: Process) -> None:
        """Start it again, and let these volunteers reach it."""
        self.machine.home = await self.start()
        for process in processes:
            process.network.inner = self.machine.home.transport
            process.network.heal()
            await process.control.do(commands.Retry())


@asynccontextmanager
async def away(path: Path, database_url: str, run: str) -> AsyncIterator[Away]:
    made = Away(path, database_url)
    try:
        home = await made.start()
        await home.start_run(run)
        made.machine = LocalMachine(path / "machine", home)
        made.machine.speed = SPEED
        await made.machine.join()
        yield made
    finally:
        await made.stop()


async def second(process: Process) -> int:
    """Return the task that was claimed while the first one trained."""
    first = await process.until(events.Claimed)
    return (await process.until(events.Claimed, lambda event: event.task != first.task)).task


@asynccontextmanager
async def left_alone(
    path: Path, database_url: str, run: str
) -> AsyncIterator[tuple[Away, Process, int]]:
    """A volunteer that does two tasks; the coordinator has gone away when the second one, which is
    named, was claimed.
    """
    async with (
        away(path, database_url, run) as there,
        there.machine.working(max_tasks=2) as process,
    ):
        ahead = await second(process)
        await there.stop(process)
        yield there, process, ahead


async def test_both_results_are_credited_when_it_answers_again(
    tmp_path: Path, database_url: str
) -> None:
    async with left_alone(tmp_path, database_url, OVERLAP) as (there, process, ahead):
        await process.until(  # between two tries there is none to count down to
            events.Connection,
            lambda event: event.queued == 1 and not event.online and event.retry_at is not None,
        )
        assert not [event for event in process.all(events.Training) if event.task == ahead]
        await there.back(process)
        assert await process.ended() == 0
        assert process.all(events.TaskEnded) == []
        assert len(process.all(events.Submitted)) == 2
        rows = await there.machine.home.coordinator.db.read(
            lambda conn: verdicts.history(conn, volunteer(process), None, 10)
        )
        assert len({verdict.contribution for _, verdict in rows}) == 2
        assert {verdict.state for _, verdict in rows} <= {"accepted", "merged"}
        assert all(verdict.credits_micro > 0 for _, verdict in rows)
        assert await there.machine.home.coordinator.ledger.check() == ()


def volunteer(process: Process) -> str:
    return process.all(events.Started)[0].volunteer_id


@pytest.mark.parametrize("database_url", [""])
async def test_a_run_in_step_waits_and_says_so(tmp_path: Path, database_url: str) -> None:
    async with left_alone(tmp_path, database_url, STEP) as (there, process, ahead):
        idle = await process.until(events.Idle, lambda event: event.reason == "merging")
        assert "submitting the last result" in idle.message
        assert not [event for event in process.all(events.Training) if event.task == ahead]
        await there.back(process)
        assert await process.ended() == 0
        assert len(process.all(events.Submitted)) == 2
