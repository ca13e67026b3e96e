"""A limit for the memory of the whole program, by the kernel: RLIMIT_DATA, Linux 4.7 and later.

This process parses and computes with a coordinator's data. Sizes are checked before memory is
taken; if a check had a hole, the allocation fails here, as one that does not fit does on any
machine: the step is tried in smaller parts, or its task given back with a sentence. An unlimited
process could make the system swap, and kill other programs.

Not limited: a computer with a graphics card whose driver maps memory of its own into the program,
many times what is used; files that are mapped, which the system takes back when it needs them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from shared.machine_limits import memory_bytes
from shared.units import GIB

OWN_BYTES = 2 * GIB  # interpreter, PyTorch, the screen, downloads under way
DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def limit_bytes(memory_gb: float, total: int) -> int:
    """Return the program's memory limit, from the setting of a task's; 0: half the computer's."""
    task = min(int(memory_gb * GIB), total) if memory_gb else total // 2
    return task + OWN_BYTES


def limit(memory_gb: float) -> bool:
    """Limit this process and its children; False where the system has no limit."""
    if refusal():
        return False
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = limit_bytes(memory_gb, memory_bytes())
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
        return True
    return False


def follow(memory_gb: float) -> None:
    """Move the limit of a process that has one, after its owner changed the setting."""
    if not refusal() and _now() is not None:
        limit(memory_gb)


def refusal(system: str = sys.platform, drivers: Sequence[str] = DRIVERS) -> str:
    """Return the reason why the program's memory cannot be limited here; "" where it can."""
    if system != "linux":
        return "nothing on this system limits the memory of the program"
    if any(Path(driver).exists() for driver in drivers):
        return "nothing limits the memory of the program beside a graphics card's driver"
    return ""


def in_force() -> str:
    """Return the sentence about the memory limit of this process."""
    if why := refusal():
        return why
    most = _now()
    if most is None:
        return "nothing limits the memory of the program: the setting `sandbox` is off"
    return f"the program may take {most / GIB:.1f} GiB of memory"


def _now() -> int | None:
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return None if soft == resource.RLIM_INFINITY else soft
