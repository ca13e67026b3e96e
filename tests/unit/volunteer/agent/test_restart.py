"""A volunteer that starts again: what lives is gone on with, what does not is dropped, and only
what was handed in counts.
"""

from __future__ import annotations

from pathlib import Path

from tests.support.local_coordinator import Worker
from tests.support.local_volunteer import LONG, SHORT, LocalMachine, local_machine
from volunteer.control import commands, events
from volunteer.storage.receipts import ReceiptBook

# Twice 1,200 s is the longest that a lease may live whose speed nobody knows, however often a
# heartbeat renews it: after less a heartbeat that comes between the advance and the expiry would
# save it.
LEASE_S = 3000.0


async def lapse(machine: LocalMachine) -> None:
    """Let time pass without heartbeats, until leases run out."""
    await machine.home.clock.advance(LEASE_S)
    await machine.home.coordinator.task_leases.expire()


async def test_a_task_whose_time_ran_out_meanwhile_is_dropped_and_trained_once(
    tmp_path: Path,
) -> None:
    async with local_machine(tmp_path, LONG) as machine:
        async with machine.working(snapshot_s=0.01) as process:
            doing = await process.until(events.Training, lambda event: event.step >= 5)
        await lapse(machine)
        async with machine.working(max_tasks=1) as process:
            assert await process.ended() == 0
        dropped = process.all(events.TaskEnded)[0]
        assert (dropped.task, dropped.how) == (doing.task, "gone")
        assert "ran out" in dropped.message
        assert [event.attempt for event in process.all(events.Claimed)] == [2]
        assert len(process.all(events.Trained)) == 1
        assert process.all(events.Stopped)[-1].tasks == 1


async def test_a_task_goes_on_from_its_base_although_its_machine_saw_a_newer_version(
    tmp_path: Path,
) -> None:
    """The version was fetched ahead for the next task; the trained steps are not thrown away."""
    async with local_machine(tmp_path, LONG) as machine:
        async with machine.working(snapshot_s=0.01) as process:
            doing = await process.until(events.Training, lambda event: event.step >= 5)
        assert (await (await machine.home.join("Eve")).work()).state == "accepted"
        (file,) = machine.directories.profile.glob("*/receipts/versions.json")
        ReceiptBook(file.parent).note_version("tiny", 1)
        async with machine.working(max_tasks=1) as process:
            assert await process.ended() == 0
        assert [event.task for event in process.all(events.Submitted)] == [doing.task]
        assert process.all(events.TaskEnded) == []
        assert {event.version for event in process.all(events.Training)} == {doing.version}


async def steal(thief: Worker, task: int) -> None:
    """Take over a task whose time ran out."""
    lease = await thief.claim()
    assert lease.task == task


async def test_a_result_that_came_too_late_is_not_counted(tmp_path: Path) -> None:
    async with local_machine(tmp_path, SHORT) as machine, machine.working(max_tasks=1) as process:
        process.network.refuse("/uploads")
        trained = await process.until(events.Trained)
        await process.until(events.Connection, lambda event: not event.online)
        await lapse(machine)
        await steal(await machine.home.join("Eve"), trained.task)
        process.network.heal()
        await process.control.do(commands.Retry())
        assert await process.ended() == 0
        ended = process.all(events.TaskEnded)
        assert [(event.task, event.how) for event in ended] == [(trained.task, "gone")]
        assert len(process.all(events.Submitted)) == 1
        assert process.all(events.Stopped)[-1].tasks == 1


async def test_what_is_late_is_handed_in_before_more_is_claimed(tmp_path: Path) -> None:
    async with local_machine(tmp_path, LONG) as machine, machine.working(max_tasks=2) as process:
        doing = await process.until(events.Training, lambda event: event.step >= 5)
        await process.control.do(commands.Pause())
        process.network.refuse("/heartbeat")
        await process.until(events.Connection, lambda event: not event.online)
        await lapse(machine)
        process.network.heal()
        await process.control.do(commands.Retry())
        await process.heartbeats(2)  # of the first it has heard the answer by then
        await process.control.do(commands.Resume())
        assert await process.ended(timeout_s=120) == 0  # two tasks of 400 steps
        assert process.all(events.Submitted)[0].task == doing.task
        claimed = process.all(events.Claimed)
        assert [event.attempt for event in claimed if event.task == doing.task] == [1]
        assert process.all(events.TaskEnded) == []


async def test_a_late_result_of_an_earlier_process_is_handed_in_first(tmp_path: Path) -> None:
    async with local_machine(tmp_path, SHORT) as machine:
        async with machine.working() as process:
            process.network.refuse("/uploads")
            trained = await process.until(events.Trained)
            process.network.cut = True  # nothing else is claimed
            await process.until(events.Connection, lambda event: not event.online)
        await lapse(machine)
        async with machine.working(max_tasks=1) as process:
            assert await process.ended() == 0
        assert process.all(events.Submitted)[0].task == trained.task
        assert all(event.task != trained.task for event in process.all(events.Claimed))


async def test_no_work_waits_for_a_late_result_that_is_wanted_no_more(tmp_path: Path) -> None:
    """Somebody else has its task: the device would stand still until it is refused."""
    async with local_machine(tmp_path, SHORT) as machine:
        async with machine.working() as process:
            process.network.refuse("/uploads")
            trained = await process.until(events.Trained)
            process.network.cut = True  # nothing else is claimed
            await process.until(events.Connection, lambda event: not event.online)
        await lapse(machine)
        await steal(await machine.home.join("Eve"), trained.task)
        async with machine.working() as process:
            process.network.refuse("/uploads")
            claimed = await process.until(events.Claimed, timeout_s=20)
        assert claimed.task != trained.task
