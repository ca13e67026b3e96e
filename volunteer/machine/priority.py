"""Priority of this program below the owner's other programs: per process, or on Linux per thread,
so that training threads yield to the screen.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import psutil

LOW = 10  # nice of all work with `priority = "low"`, the default
LOWEST = 15  # nice of background work; not 19, since other threads may wait for its locks
OF_THREADS = sys.platform == "linux"  # elsewhere only a process has a priority


def lower_process() -> None:
    """Lower the priority of this process and of threads started later."""
    process = psutil.Process()
    try:
        if sys.platform == "win32":
            process.nice(psutil.BELOW_NORMAL_PRIORITY_CLASS)
        elif process.nice() < LOW:
            process.nice(LOW)
    except (psutil.Error, OSError):
        logging.getLogger(__name__).info("the priority could not be lowered")


def lower_thread(nice: int = LOW) -> None:
    """Lower the calling thread, and threads it starts, to `nice`, unless it is lower already. Do
    nothing where threads have no priority of their own.
    """
    thread = 0  # the calling thread; the sandbox refuses the numbers of other threads
    if OF_THREADS and os.getpriority(os.PRIO_PROCESS, thread) < nice:
        os.setpriority(os.PRIO_PROCESS, thread, nice)


def lower_behind_screen() -> None:
    """Lower the threads of the event loop's pool, but not the loop's own, which draws the screen;
    without priorities of threads, lower the process. Call it on the loop at start.
    """
    if OF_THREADS:
        pool = ThreadPoolExecutor(thread_name_prefix="work", initializer=lower_thread)
        asyncio.get_running_loop().set_default_executor(pool)
    else:
        lower_process()
