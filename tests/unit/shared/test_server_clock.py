"""The coordinator's clock on a volunteer's machine, whose own clock may be set meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from shared.clock import ServerClock


class SetClock:
    """A clock that a person sets; its monotonic time goes on."""

    def __init__(self) -> None:
        self.wall, self.passed = 1000.0, 50.0

    def now(self) -> float:
        return self.wall

    def monotonic(self) -> float:
        return self.passed

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)


@pytest.mark.parametrize("jump_s", [-(10.0**9), 0.0, 10.0**9])
def test_a_set_clock_moves_no_time_of_the_coordinator(jump_s: float) -> None:
    local = SetClock()
    clock = ServerClock(local)
    clock.learn(5000.0)
    local.wall += jump_s + 7
    local.passed += 7
    assert clock.now() == 5007.0
    assert clock.local(5010.0) == local.wall + 3
