"""Machines of an account, which give orders to each other."""

from __future__ import annotations

from pathlib import Path

from shared.protocol import endpoints
from tests.support.local_volunteer import LONG, local_machine
from volunteer.control import commands, events


async def test_a_machine_obeys_its_owner_from_elsewhere_once(tmp_path: Path) -> None:
    async with local_machine(tmp_path, LONG) as machine:
        async with machine.working() as process:
            await process.until(events.Training)
            me = await process.control.query(endpoints.ME)
            (own,) = me.workers
            await process.control.do(commands.OrderMachine(worker_id=own.worker_id, order="pause"))
            await machine.home.clock.advance(2.0)  # over what the server keeps of its orders
            paused = await process.until(events.Paused)
            assert paused.message == "paused from another of your machines"
            await process.control.do(
                commands.Resume()
            )  # its owner at the machine has the last word
            await process.until(events.Resumed)
            await process.heartbeats(3)
            assert len(process.all(events.Paused)) == 1
            await process.control.do(commands.OrderMachine(worker_id=own.worker_id, order="finish"))
            await machine.home.clock.advance(2.0)
            await process.until(events.Finishing)
        async with machine.working() as process:  # a new process does not obey again
            await process.heartbeats(3)
            assert not process.all(events.Finishing)
            assert not process.all(events.Paused)
