"""One agent with two devices: both train, each is paused alone, and the work of both is paid."""

from __future__ import annotations

from pathlib import Path

from shared.protocol.accounts import Device
from tests.support.local_volunteer import CPU, LONG, SHORT, Process, local_machine
from volunteer.control import commands, events

# torch takes any index of its CPU: the second device is this processor once more
SECOND = Device(id="cpu:1", kind="cpu", name="another processor", memory_bytes=8 << 30)
BOTH = {CPU.id, SECOND.id}


async def train(process: Process, device: str, steps: int = 0) -> events.Training:
    """Wait for progress on a device after `steps` of its newest task."""
    return await process.until(
        events.Training, lambda event: event.device == device and event.step > steps
    )


async def test_each_device_does_tasks_of_its_own_and_all_of_it_is_paid(tmp_path: Path) -> None:
    async with local_machine(tmp_path, SHORT) as machine:
        machine.devices = (CPU, SECOND)
        async with machine.working(device="cpu, cpu:1", max_tasks=6) as process:
            found = await process.until(events.DevicesFound)
            assert {device.id for device in found.devices} == BOTH
            assert await process.ended() == 0
        device_of = {event.task: event.device for event in process.all(events.Claimed)}
        assert set(device_of.values()) == BOTH
        judged = {event.verdict.task: event.verdict for event in process.all(events.Judged)}
        paid = {device_of[task] for task, verdict in judged.items() if verdict.credits_micro > 0}
        assert paid == BOTH
        assert {verdict.state for verdict in judged.values()} <= {"accepted", "merged"}
        home = machine.home
        assert (await home.coordinator.checks.run()).breaches == ()


async def test_one_device_rests_while_the_other_trains(tmp_path: Path) -> None:
    async with local_machine(tmp_path, LONG) as machine:
        machine.devices = (CPU, SECOND)
        async with machine.working(device="cpu, cpu:1") as process:
            await train(process, CPU.id)
            await train(process, SECOND.id)
            await process.control.do(commands.Pause(device=SECOND.id))
            paused = await process.until(events.Paused)
            assert paused.device == SECOND.id
            # The micro-batch under way ends first, and on a busy machine that takes a while.
            more = [await progress_beside(process) for _ in range(3)]
            assert 0 in more, more
            tasks = {task.device: task for task in process.control.status.tasks}
            assert set(tasks) == BOTH
            await process.control.do(commands.Resume(device=SECOND.id))
            stood = max(e.step for e in events_of(process.told, SECOND.id))
            goes_on = await train(process, SECOND.id, stood)
            assert goes_on.task == tasks[SECOND.id].task


async def progress_beside(process: Process) -> int:
    """Return how often the second device reported while the first did five steps."""
    before = process.told.copy()
    reached = max(e.step for e in events_of(before, CPU.id))
    await train(process, CPU.id, reached + 5)
    return len(events_of(process.told[len(before) :], SECOND.id))


def events_of(told: list[events.AnyEvent], device: str) -> list[events.Training]:
    """Return the progress that a device reported."""
    return [e for e in told if isinstance(e, events.Training) and e.device == device]
