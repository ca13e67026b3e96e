"""The end of a lease in parts at the volunteer: told once when it is refused, and nothing lost or
twice over a kill.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, select

from coordinator.database.tables.contributions import contributions as contributions_table
from tests.support.local_coordinator import RUN
from tests.support.local_volunteer import LocalMachine, Process, local_machine
from volunteer.control import commands, events
from volunteer.files import write_record
from volunteer.storage import outbox

PARTS = RUN.replace('preset = "fedavg"\nquorum = 2', 'preset = "async-sgd"\ngradient_every = 2')


def waiting(machine: LocalMachine) -> int:
    """Return the parts in the outbox."""
    return len(list(machine.directories.profile.glob("*/outbox/*.json")))


async def until_waiting(process: Process, machine: LocalMachine, count: int) -> None:
    async with process.eventually():
        while waiting(machine) != count:
            await process.tick()


@pytest.mark.parametrize("steps", [24, 4], ids=["in-work", "all-parts-done"])
async def test_the_end_of_a_refused_lease_is_told_once_and_none_of_it_stays(
    tmp_path: Path, steps: int
) -> None:
    run = PARTS.replace("local_steps = 2", f"local_steps = {steps}")
    async with local_machine(tmp_path, run) as machine, machine.working(max_tasks=1) as process:
        process.network.refuse("/uploads")
        process.network.refuse("/heartbeat")  # it is not to learn it there
        claimed = await process.until(events.Claimed)
        await process.until(events.Connection, lambda event: event.queued == 2)
        await machine.home.coordinator.runs.stop("tiny")
        sent = await reached_again(process)
        await until_waiting(process, machine, 0)
        await told_once(process, claimed.task)
        assert len(uploads(process, sent)) <= 1


@pytest.mark.parametrize("steps", [24, 4], ids=["in-work", "all-parts-done"])
async def test_a_part_that_is_stored_after_its_lease_was_refused_is_sent_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """Its record is on the disk, and the outbox learns of it when the first part is answered."""
    run = PARTS.replace("local_steps = 2", f"local_steps = {steps}")
    answered = threading.Event()

    def slowly(path: Path, record: Any, *, durable: bool = False) -> None:
        write_record(path, record, durable=durable)
        if path.stem.endswith("-1-0"):
            answered.wait(30)

    monkeypatch.setattr(outbox, "write_record", slowly)
    async with local_machine(tmp_path, run) as machine, machine.working(max_tasks=1) as process:
        process.network.refuse("/uploads")
        process.network.refuse("/heartbeat")
        claimed = await process.until(events.Claimed)
        await until_waiting(process, machine, 2)
        await machine.home.coordinator.runs.stop("tiny")
        sent = await reached_again(process)
        await until_waiting(process, machine, 1)
        answered.set()
        await until_waiting(process, machine, 0)
        await told_once(process, claimed.task)
        assert len(uploads(process, sent)) == 2  # one a part


async def reached_again(process: Process) -> int:
    """Let all but heartbeats through; return how many requests came before."""
    process.network.heal()
    process.network.refuse("/heartbeat")
    sent = len(process.network.seen)
    await process.control.do(commands.Retry())
    return sent


async def told_once(process: Process, task: int) -> None:
    first = await process.until(events.TaskEnded)
    await process.until(events.Idle, lambda event: event.at >= first.at)
    ended = [event for event in process.all(events.TaskEnded) if event.task == task]
    assert [event.how for event in ended] == ["cancelled"]


def uploads(process: Process, sent: int) -> list[str]:
    return [seen for seen in process.network.seen[sent:] if "/uploads" in seen]


@pytest.mark.slow
async def test_over_a_kill_no_part_is_lost_and_none_handed_in_twice(tmp_path: Path) -> None:
    run = PARTS.replace("local_steps = 2", "local_steps = 48")
    async with local_machine(tmp_path, run) as machine:
        async with machine.working() as process:
            doing = await process.until(events.Training, lambda event: event.step >= 8)
        async with machine.working(max_tasks=1) as process:
            assert (await process.until(events.Training)).task == doing.task
            assert await process.ended(60) == 0
            assert sum(event.last for event in process.all(events.Submitted)) == 1
        done = await parts_of(machine, doing.task)
        assert [row.part for row in done] == list(range(24))
        assert {row.state for row in done} <= {"accepted", "merged"}
        assert {(row.tries, row.attempt, row.steps) for row in done} == {(0, 1, 2)}
        assert await machine.home.coordinator.ledger.check() == ()


async def test_what_waits_of_a_lease_is_handed_in_before_it_is_given_back(tmp_path: Path) -> None:
    run = PARTS.replace("local_steps = 2", "local_steps = 400")
    async with local_machine(tmp_path, run) as machine:
        machine.speed = 1.0  # seconds that are waited are seconds in which something is done
        async with machine.working(quit_s=0) as process:
            process.network.refuse("/uploads")
            claimed = await process.until(events.Claimed)
            await until_waiting(process, machine, 2)
            process.network.heal()
            await process.control.do(commands.Stop())
            assert await process.ended() == 0
        ended = [event for event in process.all(events.TaskEnded) if event.task == claimed.task]
        assert [event.how for event in ended] == ["released"]
        assert not any(event.last for event in process.all(events.Submitted))
        done = await parts_of(machine, claimed.task)
        assert len(done) >= 2
        assert {row.state for row in done} <= {"accepted", "merged"}
        assert waiting(machine) == 0


async def test_giving_back_does_not_wait_for_a_coordinator_that_is_away(tmp_path: Path) -> None:
    run = PARTS.replace("local_steps = 2", "local_steps = 400")
    async with local_machine(tmp_path, run) as machine, machine.working(quit_s=0) as process:
        process.network.refuse("/uploads")
        await until_waiting(process, machine, 2)
        process.network.cut = True
        await process.control.do(commands.Stop())
        assert await process.ended() == 0


async def parts_of(machine: LocalMachine, task: int) -> list[Any]:
    c = contributions_table.c

    def read(conn: Connection) -> list[Any]:
        query = select(contributions_table).where(c.task_id == task).order_by(c.id)
        return list(conn.execute(query))

    return await machine.home.coordinator.db.read(read)
