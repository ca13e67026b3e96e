"""The first steps of a run's own model are measured on each device: once, and again when the model
or the device changes.
"""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from tests.support.local_volunteer import SHORT, local_machine
from volunteer.control import events
from volunteer.control.model_step import AGE_MAX_S, KEPT_MAX, ModelStep, newest

STEP = ModelStep(
    run="tiny",
    device="cpu",
    key="a",
    step_s=0.1,
    steps=3,
    peak_bytes=1 << 20,
    micro_batch=4,
    batch_size=16,
    halved=False,
    at=1000.0,
)


async def test_the_first_task_measures_a_step_and_later_starts_know_it(tmp_path: Path) -> None:
    longer = SHORT.replace("local_steps = 2", "local_steps = 4")
    async with local_machine(tmp_path, longer) as machine:
        async with machine.working(max_tasks=2) as process:
            assert await process.ended() == 0
            (told,) = process.all(events.StepMeasured)
        assert (told.step.run, told.step.device, told.known) == ("tiny", "cpu", False)
        assert told.step.step_s > 0
        assert 1 <= told.step.steps <= 3
        assert 1 <= told.step.micro_batch <= told.step.batch_size == 2
        async with machine.working(max_tasks=1) as process:
            assert await process.ended() == 0
            (known,) = process.all(events.StepMeasured)
            assert known.known
            assert known.step == told.step
            assert process.control.status.steps == (told.step,)
        async with machine.working(max_tasks=1, memory_gb=2.0) as process:
            assert await process.ended() == 0
            *_, again = process.all(events.StepMeasured)
            assert not again.known  # memory sets the size of micro-batches
            assert again.step.key != told.step.key


def test_steps_are_kept_by_run_and_device_while_they_are_young() -> None:
    later = replace(STEP, at=2000.0, step_s=0.2)
    other = replace(STEP, device="cuda:0")
    assert newest((later, STEP, other), 3000.0) == (other, later)
    assert newest((STEP, later), 1500.0 + AGE_MAX_S) == (later,)
    assert newest((STEP, later), 2001.0 + AGE_MAX_S) == ()
    many = [replace(STEP, run=str(number)) for number in range(2 * KEPT_MAX)]
    assert len(newest(many, 1000.0)) == KEPT_MAX
