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
REPORT_S = 45.0  # a longer stall is reported with the stack of every thread
EXIT_S = 180.0  # a longer stall ends the process: its leases, renewed for 90 s, have expired
ASLEEP_S = 4 * LOOK_S  # a check this late means that the whole process slept, not only the loop


def print_stacks(silent_s: float) -> None:
    """Print the stack of every thread after a stall."""
    print(
        f"volunteer: no progress for {silent_s:.0f} s; stacks of all threads:",
        file=sys.stderr,
        flush=True,
    )
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)


def exit_process(silent_s: float) -> None:
    """Exit immediately; finished work is on disk and a new process resumes it."""
    print(f"volunteer: no progress for {silent_s:.0f} s: exiting", file=sys.stderr, flush=True)
    os._exit(1)


class StallDetector:
    """Detects that the event loop does not turn; its times are monotonic seconds."""

    def __init__(
        self,
        report: Callable[[float], None] = print_stacks,
        exit_process: Callable[[float], None] = exit_process,
    ) -> None:
        self._report = report
        self._exit = exit_process
        self._turned_at: float | None = None
        self._looked_at: float | None = None
        self._silent = False

    def record_turn(self, now: float) -> None:
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
        if silent_s >= EXIT_S:
            self._exit(silent_s)
        elif silent_s >= REPORT_S and not self._silent:
            self._silent = True
            self._report(silent_s)


def watch(loop: asyncio.AbstractEventLoop, stall: StallDetector | None = None) -> None:
    """Watch a loop until the process ends."""
    monitor = stall or StallDetector()

    def run() -> None:
        while not loop.is_closed():
            monitor.look(time.monotonic())
            try:
                loop.call_soon_threadsafe(lambda: monitor.record_turn(time.monotonic()))
            except RuntimeError:
                return  # the loop was closed just now
            time.sleep(LOOK_S)

    threading.Thread(target=run, name="stall", daemon=True).start()
