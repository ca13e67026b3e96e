"""A volunteer of which a part fails says so and ends: it never only looks alive."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.local_volunteer import LONG, SHORT, local_machine
from tests.support.virtual_clock import VirtualClock
from volunteer.agent.lifecycle import Lifecycle
from volunteer.agent.pause_board import PauseBoard
from volunteer.agent.supervisor import Loop, Supervisor
from volunteer.control import commands, events
from volunteer.control.events import Sensed
from volunteer.machine.policy import MachineFacts
from volunteer.settings.work_rules import WorkRules


class Failing:
    """Facts of the machine, until its sensors fail."""

    def __init__(self) -> None:
        self.broken = False

    def read(self, rules: WorkRules, devices: Sequence[str]) -> MachineFacts:
        if self.broken:
            raise RuntimeError("the bus is gone")
        return MachineFacts()


async def test_a_part_that_fails_ends_the_volunteer_and_keeps_its_task(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with local_machine(tmp_path, LONG) as machine:
        failing = Failing()
        machine.read = failing.read
        async with machine.working() as process:
            doing = await process.until(events.Training, lambda event: event.step >= 5)
            failing.broken = True
            assert await process.ended() == 1
        stopped = process.all(events.Stopped)[-1]
        assert stopped.message == "your rules failed (RuntimeError: the bus is gone)"
        assert "Traceback" in caplog.text  # for whoever has to find out why
        ended = {event.task: event.how for event in process.all(events.TaskEnded)}
        assert ended[doing.task] == "saved"
        assert set(ended.values()) == {"saved"}  # the next task may have been claimed ahead
        failing.broken = False
        async with machine.working(max_tasks=1) as process:
            assert await process.ended() == 0
        assert process.all(events.Submitted)[0].task == doing.task


@pytest.mark.parametrize("vital", [True, False])
async def test_a_part_that_ends_by_itself_is_told_and_ends_the_volunteer_if_it_is_vital(
    vital: bool,
) -> None:
    """Without heartbeats, for example, all work would be lost."""
    life, notices = Lifecycle(VirtualClock()), list[tuple[str, str]]()
    bus = SimpleNamespace(notice=lambda message, level: notices.append((str(message), level)))
    place: Any = SimpleNamespace(life=life, bus=bus, held=())
    supervisor = Supervisor(place=place, pauses=PauseBoard(life, place.bus), quit_s=0.0)
    part = Loop(name="the heartbeats", work=asyncio.sleep(0), vital=vital)
    await supervisor._run_loop(part, ends=False)
    sentence = "the heartbeats failed (it ended by itself)"
    assert notices == ([] if vital else [(sentence, "warning")])
    assert (str(life.fatal) if life.fatal else "") == (sentence if vital else "")
    device = Loop(name="cpu", work=asyncio.sleep(0))
    await supervisor._run_loop(device, ends=True)  # a device has nothing more to do
    assert len(notices) == 1 - vital


async def test_a_result_that_vanished_is_no_reason_to_fall_silent(tmp_path: Path) -> None:
    async with local_machine(tmp_path, SHORT) as machine, machine.working() as process:
        process.network.refuse("/uploads")
        await process.until(events.Connection, lambda event: not event.online)
        for update in (machine.directories.profile).rglob("outbox/*.safetensors"):
            update.unlink()
        process.network.heal()
        await process.control.do(commands.Retry())
        lost = await process.until(events.TaskEnded)
        assert lost.how == "refused"
        assert "is missing or damaged" in lost.message
        await process.until(events.Submitted, lambda event: event.task != lost.task)


async def test_sensors_that_fail_are_told_and_work_goes_on(tmp_path: Path) -> None:
    async with local_machine(tmp_path, SHORT) as machine:

        def sense(devices: Sequence[str]) -> tuple[Sensed, ...]:
            raise RuntimeError("the driver is gone")

        machine.sense = sense
        async with machine.working(max_tasks=1) as process:
            assert await process.ended() == 0
        told = [event.message for event in process.all(events.Notice)]
        assert "the sensors failed (RuntimeError: the driver is gone)" in told
