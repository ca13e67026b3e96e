"""Pauses that come and go with what happens on the machine."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime

import pytest

from tests.support.virtual_clock import VirtualClock
from volunteer.machine.policy import MachineFacts
from volunteer.machine.policy_loop import LOOK_S, PolicyGuard, PolicyInputs
from volunteer.settings.work_rules import WorkRules

NOON = datetime.fromisoformat("2026-03-02T12:00").timestamp()  # a Monday, wall clock of this place


class Machine:
    """A machine whose facts we set, and what the guard did to it."""

    def __init__(self, rules: WorkRules) -> None:
        self.facts = MachineFacts()
        self.clock = VirtualClock(NOON)
        self.done: list[str] = []
        self.said: list[str] = []
        self.shares: list[Mapping[str, float]] = []
        inputs = PolicyInputs(
            read=self._read,
            devices=lambda: ("cuda:0", "cuda:1"),
            share=self.shares.append,
            say=self.said.append,
            clock=self.clock,
        )
        self.guard = PolicyGuard(rules, inputs, self)

    def _read(self, rules: WorkRules, devices: Sequence[str]) -> MachineFacts:
        return self.facts

    def pause(self, device: str = "", *, by: str, message: str, until: str) -> None:
        self.done.append(f"pause {device or 'all'}: {message}, until {until}")

    def resume(self, device: str = "", *, by: str) -> None:
        self.done.append(f"resume {device or 'all'}: {by}")

    async def see(self, facts: MachineFacts) -> list[str]:
        """Return what the guard does about these facts."""
        self.facts, self.done = facts, []
        await self.guard.look()
        return self.done


async def test_a_pause_is_said_once_and_ends_with_its_reason() -> None:
    machine = Machine(WorkRules())
    assert await machine.see(MachineFacts(on_battery=True, battery_percent=50)) == [
        "pause all: on battery (50 %), until it is plugged in"
    ]
    assert await machine.see(MachineFacts(on_battery=True, battery_percent=40)) == []
    assert await machine.see(MachineFacts(on_battery=False)) == ["resume all: battery"]


async def test_one_reason_more_does_not_end_the_other() -> None:
    machine = Machine(WorkRules())
    await machine.see(MachineFacts(on_battery=True))
    assert await machine.see(MachineFacts(on_battery=True, metered=True)) == [
        "pause all: the network connection is metered, until the connection is not metered"
    ]
    assert await machine.see(MachineFacts(metered=True)) == ["resume all: battery"]


async def test_a_hot_device_rests_alone() -> None:
    machine = Machine(WorkRules(temperature_max=80))
    found = await machine.see(MachineFacts(temperatures={"cuda:0": 50, "cuda:1": 90}))
    assert [line.split(":")[0] for line in found] == ["pause cuda"]
    assert "cuda:1" in found[0]
    cool = MachineFacts(temperatures={"cuda:0": 50, "cuda:1": 60})
    assert await machine.see(cool) == ["resume cuda:1: temperature"]


async def test_going_on_is_obeyed_and_explained() -> None:
    machine = Machine(WorkRules(disk_free_gb=1))
    await machine.see(MachineFacts(on_battery=True, disk_free_bytes=0))
    machine.done = []
    machine.guard.lift_holds()
    assert machine.done == ["resume all: battery"]
    assert machine.said == [
        "working although on battery, until it is plugged in",
        "still paused: only 0.0 GiB of disk are free, until 1 GiB are free",
    ]
    assert await machine.see(MachineFacts(on_battery=True, disk_free_bytes=0)) == []


async def test_other_rules_hold_at_once() -> None:
    machine = Machine(WorkRules())
    await machine.see(MachineFacts(on_battery=True, unused_s=10))
    machine.done = []
    machine.guard.change(WorkRules(on_battery=True, in_use="gentle"))
    assert machine.done == ["resume all: battery"]
    assert machine.shares[-1] == {"": 0.5}


async def test_it_looks_again_and_again_until_it_is_cancelled() -> None:
    machine = Machine(WorkRules(schedule=("mon 12:00-12:01",)))
    running = asyncio.create_task(machine.guard.run())
    while not machine.done:
        assert machine.clock.now() < NOON + 120
        while machine.clock.next_at is None:  # the facts are read in a thread
            await asyncio.sleep(0)
        await machine.clock.advance(LOOK_S)
    assert machine.done == ["pause all: outside of your hours (mon 12:00-12:01), until Mon 12:00"]
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_rule_without_effect_is_told_once() -> None:
    machine = Machine(WorkRules(in_use="pause"))
    await machine.see(MachineFacts())
    await machine.see(MachineFacts())
    assert len(machine.said) == 1
    assert "has no effect" in machine.said[0]
