"""Release of a device's cached memory: at a pause, at the end of a task, and after the memory ran
out.

This module imports no torch: a program that never loaded it has nothing to release.
"""

from __future__ import annotations

import contextlib
import sys


def release_memory(device: str) -> None:
    """Return the memory that torch caches on a device, such as "cuda:0", to other programs.

    The processor has no such cache. A device that was lost releases nothing.
    """
    torch, kind = sys.modules.get("torch"), device.partition(":")[0]
    if torch is not None and kind != "cpu":
        with contextlib.suppress(RuntimeError):
            getattr(torch, kind).empty_cache()
