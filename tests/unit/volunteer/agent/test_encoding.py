"""The work of a device while the result of its last task is encoded: the next task, in order, and
nothing twice.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shared.errors import StorageFull
from tests.support.local_volunteer import SHORT, Process, local_machine
from volunteer.control import events
from volunteer.storage.outbox import QueuedResult
from volunteer.training.local_task import LocalTask, PartResult

STEPS = SHORT.replace("local_steps = 2", "local_steps = 60").replace("float32", "int8")
OVERLAP = STEPS.replace("quorum = 1", "quorum = 1\noverlap = true")


@contextmanager
def held_up() -> Iterator[threading.Event]:
    """Encoding waits until the end of the block, or ends with an error if the event is set before.

    A thread cannot be killed: the error stands for the death of its process.
    """
    gate, killed, submit = threading.Event(), threading.Event(), LocalTask.submit

    def later(task: LocalTask, made: PartResult) -> QueuedResult:
        gate.wait()
        if killed.is_set():
            raise StorageFull("killed")
        return submit(task, made)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LocalTask, "submit", later)
        try:
            yield killed
        finally:
            gate.set()


async def two_tasks(process: Process) -> tuple[int, int]:
    """The tasks that were trained on first and second."""
    first = await process.until(events.Training)
    second = await process.until(events.Training, lambda event: event.task != first.task)
    return first.task, second.task


async def test_the_device_trains_while_the_last_result_is_encoded(tmp_path: Path) -> None:
    async with local_machine(tmp_path, OVERLAP) as machine, machine.working(max_tasks=2) as process:
        with held_up():
            first, second = await two_tasks(process)
            assert process.all(events.Trained) == []
        assert await process.ended() == 0
        assert [event.task for event in process.all(events.Trained)] == [first, second]
        assert [event.task for event in process.all(events.Submitted)] == [first, second]
        assert await machine.home.coordinator.ledger.check() == ()


async def test_in_step_the_next_task_waits_until_the_last_result_is_handed_in(
    tmp_path: Path,
) -> None:
    async with local_machine(tmp_path, STEPS) as machine, machine.working(max_tasks=2) as process:
        with held_up():
            await process.until(events.Idle, lambda event: event.reason == "merging")
            assert len([seen for seen in process.network.seen if seen.endswith("/begin")]) == 1
        assert await process.ended() == 0
        assert [event.version for event in process.all(events.Training) if event.step == 60] == [
            0,
            1,
        ]


async def test_where_memory_is_short_the_device_waits_for_the_encoding(tmp_path: Path) -> None:
    async with local_machine(tmp_path, OVERLAP) as machine:
        async with machine.working(max_tasks=2, memory_gb=9.4e-5) as process:
            with held_up():
                trained = await process.until(events.Training, lambda event: event.step == 60)
                await process.until(events.Claimed, lambda event: event.task != trained.task)
            assert await process.ended() == 0
        ended = [e.at for e in process.all(events.Trained)]
        began = [e.at for e in process.all(events.Training) if e.task != trained.task]
        assert ended[0] <= min(began)


async def test_a_result_whose_encoding_was_cut_short_is_made_again_and_handed_in_once(
    tmp_path: Path,
) -> None:
    async with local_machine(tmp_path, OVERLAP) as machine:
        with held_up() as killed:
            async with machine.working() as process:
                both = await two_tasks(process)
            killed.set()
        async with machine.working(max_tasks=2) as process:
            assert await process.ended() == 0
        assert sorted(event.task for event in process.all(events.Submitted)) == sorted(both)
        assert await machine.home.coordinator.ledger.check() == ()
