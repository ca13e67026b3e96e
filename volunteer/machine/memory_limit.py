"""Memory limit of the whole program, enforced by the kernel: RLIMIT_DATA, Linux 4.7 and later.

This process parses data of a coordinator. Every size is checked before memory is allocated; if a
check is faulty, the limit makes the allocation fail like any out-of-memory: the step is retried in
smaller parts, or the task is released with an error. The system could otherwise swap or kill other
programs.

No limit is set where a graphics card's driver is present, which maps many times the memory in use.
Mapped files do not count: the system reclaims their memory when needed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from shared.programs.machine_limits import memory_bytes
from shared.units import GIB

OWN_BYTES = 2 * GIB  # interpreter, PyTorch, screen, running downloads
DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def limit_bytes(memory_gb: float, total: int) -> int:
    """Return the program's memory limit in bytes, from the setting `memory_gb` (0: half of `total`)
    and the program's own needs.
    """
    task = min(int(memory_gb * GIB), total) if memory_gb else total // 2
    return task + OWN_BYTES


def limit(memory_gb: float) -> bool:
    """Limit the memory of this process and its children. Return False if the system cannot limit
    it.
    """
    if unsupported_reason():
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


def adjust(memory_gb: float) -> None:
    """Adjust the limit of a limited process after its owner changed the setting."""
    if not unsupported_reason() and _current_limit() is not None:
        limit(memory_gb)


def unsupported_reason(system: str = sys.platform, drivers: Sequence[str] = DRIVERS) -> str:
    """Return why the program's memory cannot be limited here; "" if it can."""
    if system != "linux":
        return "nothing on this system limits the memory of the program"
    if any(Path(driver).exists() for driver in drivers):
        return "nothing limits the memory of the program on a machine with a graphics driver"
    return ""


def limit_sentence() -> str:
    """Return a sentence about the memory limit of this process."""
    if why := unsupported_reason():
        return why
    most = _current_limit()
    if most is None:
        return "nothing limits the memory of the program: the setting `sandbox` is off"
    return f"the program may take {most / GIB:.1f} GiB of memory"


def _current_limit() -> int | None:
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return None if soft == resource.RLIM_INFINITY else soft
