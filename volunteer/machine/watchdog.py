"""Watchdog thread for the event loop: a blocked loop would silently stop the heartbeats."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable

LOOK_S = 5.0
TOLD_S = 45.0  # a longer stall is reported with the stack of every thread
ENDED_S = 180.0  # twice the renewal time of a lease: every lease is lost by then
ASLEEP_S = 4 * LOOK_S  # a check this late means that the whole process slept, not only the loop


def complain(silent_s: float) -> None:
    """Print the stack of every thread after a stall."""
    print(
        f"volunteer: no progress for {silent_s:.0f} s; stacks of all threads:",
        file=sys.stderr,
        flush=True,
    )
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)


def end(silent_s: float) -> None:
    """Exit immediately; finished work is on disk and a new process resumes it."""
    print(f"volunteer: no progress for {silent_s:.0f} s: exiting", file=sys.stderr, flush=True)
    os._exit(1)


class Stall:
    """Compares the loop's last turn with the time; `turned` and `look` take monotonic seconds."""

    def __init__(
        self,
        report: Callable[[float], None] = complain,
        ended: Callable[[float], None] = end,
    ) -> None:
        self._told = report
        self._ended = ended
        self._turned_at: float | None = None
        self._looked_at: float | None = None
        self._silent = False

    def turned(self, now: float) -> None:
        """Record that the loop has turned."""
        self._turned_at = now
        self._silent = False

    def look(self, now: float) -> None:
        """Check the loop's progress; called regularly, on another thread."""
        before, self._looked_at = self._looked_at, now
        if self._turned_at is None or before is None or now - before > ASLEEP_S:
            self._turned_at = now  # the machine slept, or the process was stopped
            return
        silent_s = now - self._turned_at
        if silent_s >= ENDED_S:
            self._ended(silent_s)
        elif silent_s >= TOLD_S and not self._silent:
            self._silent = True
            self._told(silent_s)


def watch(loop: asyncio.AbstractEventLoop, stall: Stall | None = None) -> None:
    """Watch a loop until the process ends."""
    monitor = stall or Stall()

    def run() -> None:
        while not loop.is_closed():
            monitor.look(time.monotonic())
            try:
                loop.call_soon_threadsafe(lambda: monitor.turned(time.monotonic()))
            except RuntimeError:
                return  # the loop was closed just now
            time.sleep(LOOK_S)

    threading.Thread(target=run, name="stall", daemon=True).start()
