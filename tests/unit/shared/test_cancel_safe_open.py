"""What is opened in a thread is closed again when nobody waits for it any more."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import pytest

from shared.files.cancel_safe_open import open_in_thread


class Door:
    """A file that opens when it is allowed to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reached, self.allowed, self.closed = [threading.Event() for _ in range(3)]

    def open(self) -> Door:
        self.reached.set()
        assert self.allowed.wait(30)
        self.file: BinaryIO = self.path.open("wb")
        return self

    def close(self) -> None:
        self.file.close()
        self.closed.set()


@pytest.fixture
def door(tmp_path: Path) -> Door:
    return Door(tmp_path / "file")


async def test_what_is_opened_is_given(door: Door) -> None:
    door.allowed.set()
    with ThreadPoolExecutor(1) as pool:
        assert await open_in_thread(door.open, pool=pool) is door
    assert not door.file.closed
    door.close()


async def test_whoever_is_cancelled_while_the_thread_opens_leaves_nothing_open(door: Door) -> None:
    with ThreadPoolExecutor(1) as pool:
        opening = asyncio.create_task(open_in_thread(door.open, pool=pool))
        assert await asyncio.to_thread(door.reached.wait, 30)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        door.allowed.set()
        assert await asyncio.to_thread(door.closed.wait, 30)


async def test_whoever_is_cancelled_as_it_opens_leaves_nothing_open(door: Door) -> None:
    door.allowed.set()
    with ThreadPoolExecutor(1) as pool:
        opening = asyncio.create_task(open_in_thread(door.open, pool=pool))
        await asyncio.sleep(0)  # it has asked the thread
        pool.shutdown()  # which is done: only the loop does not know yet
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert door.file.closed


async def test_an_error_of_the_thread_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await open_in_thread((tmp_path / "nothing").open)
