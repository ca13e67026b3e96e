"""The weights of the next task come while the present one trains: once, in time, and only where
they are of use.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.decoding import decode
from shared.protocol.versions import VersionManifest
from tests.support.local_volunteer import LONG, LocalMachine, Process, local_machine
from volunteer.control import commands, events

STEP = LONG.replace("local_steps = 400", "local_steps = 150")
OVERLAP = STEP.replace("quorum = 1", "quorum = 1\noverlap = true")
SPEED = 10.0  # of the clock: the last seconds of a task are long enough to fetch something


async def publish(machine: LocalMachine, process: Process) -> str:
    """Make version 1 of others' work while our device is paused; return the hash of its weights."""
    await process.until(events.Training, lambda event: event.step >= 5)
    await process.control.do(commands.Pause())
    bob = await machine.home.join("Bob")
    await bob.work()
    async with process.eventually():
        while (manifest := await newest(machine)).version < 1:
            await process.tick()
    return manifest.weights.sha256


async def newest(machine: LocalMachine) -> VersionManifest:
    signed = await machine.home.coordinator.runs.queries.manifest("tiny")
    return decode(signed.payload, VersionManifest)


async def second_task(process: Process) -> list[str]:
    """Return the requests until the second task trains, in order."""
    first = process.all(events.Training)[0].task
    await process.until(events.Training, lambda event: event.task != first)
    return list(process.network.seen)


def begun(seen: list[str]) -> int:
    """Return the index of the request that began the second task."""
    return [index for index, request in enumerate(seen) if request.endswith("/begin")][1]


@pytest.mark.parametrize(("run", "fetched"), [(OVERLAP, 1), (STEP, 0)], ids=["overlap", "in-step"])
async def test_the_base_of_the_next_task_is_here_when_it_begins(
    tmp_path: Path, run: str, fetched: int
) -> None:
    async with local_machine(tmp_path, run) as machine:
        machine.speed = SPEED
        async with machine.working() as process:
            weights = await publish(machine, process)
            await process.control.do(commands.Resume())
            seen = await second_task(process)
            assert len([r for r in seen[: begun(seen)] if weights in r]) == fetched
            assert not any(weights in request for request in seen[begun(seen) :])


async def test_a_claim_that_a_pause_ended_is_made_again(tmp_path: Path) -> None:
    async with local_machine(tmp_path, OVERLAP) as machine:
        machine.speed = SPEED
        async with machine.working() as process:
            await process.until(events.Claimed)
            process.network.refuse("/claims")
            await process.until(events.Connection, lambda event: not event.online)
            await process.control.do(commands.Pause())
            await process.heartbeats(2)
            process.network.heal()
            await process.control.do(commands.Resume())
            first = (await process.until(events.Trained)).task
            second = process.all(events.Claimed)[1]
            after = process.told[process.told.index(second) :]
            assert any(
                isinstance(event, events.Training) and event.task == first for event in after
            )


async def test_stop_ends_a_fetch_that_gets_no_answer(tmp_path: Path) -> None:
    async with local_machine(tmp_path, OVERLAP) as machine:
        machine.speed = SPEED
        async with machine.working(quit_s=0) as process:
            weights = await publish(machine, process)
            process.network.refuse(weights)
            await process.control.do(commands.Resume())
            await process.until(events.Trained)
            await process.until(events.Connection, lambda event: not event.online)
            await process.control.do(commands.Stop())
            assert await process.ended() == 0
            done, given_back = [event.task for event in process.all(events.Claimed)]
            assert [e.task for e in process.all(events.Submitted)] == [done]
            assert [(e.task, e.how) for e in process.all(events.TaskEnded)] == [
                (given_back, "released")
            ]


async def test_what_a_killed_process_claimed_ahead_is_given_back_if_one_task_is_wanted(
    tmp_path: Path,
) -> None:
    async with local_machine(tmp_path, STEP) as machine:
        machine.speed = SPEED
        async with machine.working() as process:
            first = (await process.until(events.Claimed)).task
            ahead = (await process.until(events.Claimed, lambda event: event.task != first)).task
        async with machine.working(max_tasks=1) as process:
            assert await process.ended() == 0
            assert {event.task for event in process.all(events.Training)} == {first}
            assert [event.task for event in process.all(events.Submitted)] == [first]
            ends = [(event.task, event.how) for event in process.all(events.TaskEnded)]
            assert ends == [(ahead, "released")]
