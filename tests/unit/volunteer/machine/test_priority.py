"""Priority of the threads that work, beside the one that draws."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading

import pytest

from volunteer.machine import priority
from volunteer.training.trainer import Trainer

linux = pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux's")


def nice() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@linux
def test_a_training_thread_gives_way_and_the_thread_that_draws_does_not() -> None:
    before = nice()
    trainer = Trainer("cpu", threads=1, low=True)
    trainer.start()
    assert trainer.call(nice).result(120) == max(priority.LOW, before)
    assert nice() == before


@linux
def test_blocking_calls_behind_a_screen_give_way() -> None:
    async def both() -> tuple[int, int]:
        priority.lower_behind_screen()
        return await asyncio.to_thread(nice), nice()

    before = nice()
    assert asyncio.run(both()) == (max(priority.LOW, before), before)


@linux
def test_a_process_without_a_screen_gives_way_as_a_whole_and_never_comes_nearer() -> None:
    told = "import os; from volunteer.machine.priority import lower_process, lower_thread\n"
    told += "os.nice({}); lower_process(); lower_thread(5); print(os.nice(0))"
    for given, found in ((0, priority.LOW), (priority.LOW + 5, priority.LOW + 5)):
        out = subprocess.check_output([sys.executable, "-c", told.format(given)], text=True)
        assert int(out) >= found
