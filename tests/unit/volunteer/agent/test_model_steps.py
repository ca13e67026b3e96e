"""The first steps of a run's own model are measured on each device: once, and again when the model
or the device changes.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from shared.errors import BadRequest, Configuration
from shared.protocol.limits import API
from tests.support.local_coordinator import RUN, local_coordinator
from tests.support.local_volunteer import SHORT, LocalMachine, local_machine
from tests.support.served import served
from volunteer.cli.run_benchmark import measure_run
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


async def test_a_trial_is_a_lease_that_nothing_can_be_handed_in_for(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home:
        await home.start_run(RUN)
        worker = await home.join("Ann")
        reply = await worker.get("/runs/tiny/trial")
        assert reply.status_code == 200
        lease = reply.json()
        assert (lease["task"], lease["attempt"], lease["price_micro"]) == (0, 0, 0)
        assert lease["job"]["steps"] == 3
        assert lease["job"]["stop"] == 3 * lease["job"]["batch_size"]
        assert (await worker.post("/tasks/0/begin", {"attempt": 0})).status_code == 404
        assert (await worker.get("/runs/other/trial")).status_code == 404
        assert (await home.client().get(f"{API}/runs/tiny/trial")).status_code == 401
        await home.coordinator.runs.create(RUN.replace('"tiny"', '"later"'))
        draft = await worker.get("/runs/later/trial")
        assert (draft.status_code, "not started yet" in draft.text) == (409, True)


async def test_a_run_is_measured_before_any_task_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with local_coordinator(tmp_path / "coordinator") as home:
        await home.start_run(RUN)
        async with served(home) as url:
            machine = LocalMachine(tmp_path / "machine", home)
            with pytest.raises(Configuration, match="joined no coordinator yet"):
                measure_run(machine.directories, "tiny", "cpu", json=False)
            link = f"{url}/join#key={home.coordinator.server.link().fingerprint}"
            await machine.engine().control.join(link, "Ann")
            profile = machine.engine().profile
            identity = profile.current()
            assert identity is not None
            profile.use(replace(identity, url=url))
            with pytest.raises(BadRequest, match='did you mean "tiny"'):
                await asyncio.to_thread(
                    measure_run, machine.directories, "tinny", "cpu", json=False
                )
            code = await asyncio.to_thread(
                measure_run, machine.directories, "tiny", "cpu", json=False
            )
        assert code == 0
        assert "tiny" in capsys.readouterr().out
        (step,) = profile.home(identity).memory.steps
        assert (step.run, step.steps, step.batch_size) == ("tiny", 3, 2)
