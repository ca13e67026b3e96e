"""Computing beside the server: real child processes, killed and restarted."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator.compute import Compute
from shared.errors import Internal, NotFound, Unavailable

Stop = Callable[[], bool]
LIMIT_S = 60.0


def where(stop: Stop, factor: int) -> tuple[int, int]:
    return os.getpid(), 2 * factor


def threads(stop: Stop) -> int:
    import torch

    return torch.get_num_threads()


def refuse(stop: Stop) -> None:
    raise NotFound("there is no such version")


def unpicklable(stop: Stop) -> None:
    raise type("Local", (Exception,), {})("only here")


def die(stop: Stop) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_stop(stop: Stop) -> str:
    while not stop():
        time.sleep(0.01)
    return "stopped"


async def test_work_is_done_in_one_process_that_stays() -> None:
    compute = Compute("test", separate=True, torch_threads=1)
    try:
        first, second = await asyncio.gather(compute.run(where, 3), compute.run(where, 4))
        assert first[0] == second[0] != os.getpid()
        assert (first[1], second[1]) == (6, 8)
        assert await compute.run(threads) == 1
    finally:
        compute.close()


async def test_errors_come_back_as_what_they_are() -> None:
    compute = Compute("test", separate=True)
    try:
        with pytest.raises(NotFound, match="no such version"):
            await compute.run(refuse)
        with pytest.raises(Internal, match="only here"):
            await compute.run(unpicklable)
        assert (await compute.run(where, 1))[1] == 2  # and it goes on
    finally:
        compute.close()


async def test_a_process_that_dies_costs_one_computation() -> None:
    compute = Compute("test", separate=True)
    try:
        before = await compute.run(where, 1)
        with pytest.raises(Unavailable, match="ended in the middle"):
            await compute.run(die)
        after = await compute.run(where, 1)
        assert after[0] != before[0]
    finally:
        compute.close()


@pytest.mark.parametrize("separate", [True, False])
async def test_closing_ends_what_is_under_way(separate: bool) -> None:
    compute = Compute("test", separate=separate)
    if separate:
        await compute.run(where, 1)
    waiting = [asyncio.ensure_future(compute.run(wait_for_stop)) for _ in range(2)]
    await asyncio.sleep(0.2)  # the first has begun, or ends like the second
    compute.close()
    first, second = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(first, Unavailable) if separate else first == "stopped", first
    assert isinstance(second, Unavailable)
    with pytest.raises(Unavailable, match="stopping"):
        await compute.run(where, 1)


def write_while_it_lasts(stop: Stop, path: str) -> None:
    while not stop():
        with open(path, "a") as file:
            file.write(".")


@pytest.mark.parametrize("separate", [True, False])
async def test_what_is_under_way_waits_through_a_pause(separate: bool, tmp_path: Path) -> None:
    compute, seen = Compute("test", separate=separate), tmp_path / "seen"

    async def grows() -> bool:
        before = seen.stat().st_size if seen.exists() else 0
        await asyncio.sleep(0.2)
        return seen.exists() and seen.stat().st_size > before

    working = asyncio.ensure_future(compute.run(write_while_it_lasts, str(seen)))
    try:
        async with asyncio.timeout(LIMIT_S):
            while not await grows():
                pass
            with compute.paused():
                while await grows():
                    pass
            while not await grows():
                pass
    finally:
        compute.close()
        await asyncio.gather(working, return_exceptions=True)


ORPHAN = """
import asyncio, os, sys
from coordinator.compute import Compute
from tests.unit.coordinator.test_compute import where, wait_for_stop

async def main():
    compute = Compute("test", separate=True)
    print((await compute.run(where, 1))[0], flush=True)
    await compute.run(wait_for_stop)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_it_ends_with_a_server_that_is_killed(tmp_path: object) -> None:
    script = f"{tmp_path}/server.py"
    with open(script, "w") as file:
        file.write(ORPHAN)
    server = subprocess.Popen(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )
    assert server.stdout is not None
    child = int(server.stdout.readline())
    server.kill()
    server.communicate()
    ends = time.monotonic() + LIMIT_S
    while _lives(child):
        assert time.monotonic() < ends, "the process outlived its server"
        time.sleep(0.05)


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
