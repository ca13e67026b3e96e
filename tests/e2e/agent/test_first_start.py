"""A first start: nobody's device is touched before its owner has said what may be used."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shared.errors import Conflict
from tests.support.local_volunteer import LocalMachine, Network, Process, local_machine
from volunteer.control import commands, events

GIB = 1 << 30


@asynccontextmanager
async def first_start(machine: LocalMachine) -> AsyncIterator[Process]:
    """A process at the first start of a machine that has joined on the command line."""
    network = Network(machine.home.transport)
    process = Process(machine.engine(network, ask_first=True), network, machine.path)
    try:
        yield process
    finally:
        await process.kill()


async def test_devices_are_left_alone_until_the_limits_are_answered(tmp_path: Path) -> None:
    async with local_machine(tmp_path) as machine, first_start(machine) as process:
        await process.control.do(commands.GetSettings())
        assert process.network.seen == []
        with pytest.raises(Conflict, match="waits for your answers"):
            await process.control.do(commands.Measure(device="cpu"))
        await process.control.do(commands.SetSettings(changes={"memory_gb": 1.0}))
        await process.control.do(commands.Begin())
        found = await process.until(events.DevicesFound)
        assert found.lent_bytes == {"cpu": GIB}  # the answer of a moment ago


async def test_the_owners_word_from_elsewhere_is_answer_enough(tmp_path: Path) -> None:
    async with local_machine(tmp_path) as machine, first_start(machine) as process:
        await process.control.do(commands.Resume())
        await process.until(events.Training)


async def test_it_can_be_left_before_it_is_answered(tmp_path: Path) -> None:
    async with local_machine(tmp_path) as machine, first_start(machine) as process:
        await process.control.do(commands.Stop())
        assert await process.ended() == 0
        assert process.all(events.DevicesFound) == []
