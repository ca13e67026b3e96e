"""Memory, cores and disk that this process may use: limits of the machine, of its control groups
(version 1 and 2, every level) and of its CPU affinity. No other module asks the system for them.
"""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path

import msgspec
import psutil

ROOT = Path("/")
_UNLIMITED_BYTES = 1 << 60  # control groups of version 1 write a larger number for no limit


class GroupLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the control groups that a process is in; None = no limit."""

    cores: float | None = None
    memory: int | None = None
    # free memory of the group with the least; its inactive cached files count as free
    memory_free: int | None = None


def group_limits(root: Path = ROOT) -> GroupLimits:
    """Return the limits of this process's groups, the tightest of all levels."""
    cores: list[float] = []
    memory: list[tuple[int, int]] = []
    for folder in _folders(root, "cpu"):
        values = _numbers(folder / "cpu.max", 2) or [
            *_numbers(folder / "cpu.cfs_quota_us"),
            *_numbers(folder / "cpu.cfs_period_us"),
        ]
        quota, period = values if len(values) == 2 else (0, 0)
        if quota > 0 and period > 0:
            cores.append(quota / period)
    for folder in _folders(root, "memory"):
        most = _numbers(folder / "memory.max") or _numbers(folder / "memory.limit_in_bytes")
        if most and most[0] < _UNLIMITED_BYTES:
            used = _numbers(folder / "memory.current") or _numbers(folder / "memory.usage_in_bytes")
            used_bytes = max(0, (used or [0])[0] - _cached(folder))
            memory.append((max(0, most[0] - used_bytes), most[0]))
    return GroupLimits(
        cores=min(cores, default=None),
        memory=min((most for _, most in memory), default=None),
        memory_free=min(memory)[0] if memory else None,
    )


def _folders(root: Path, controller: str) -> list[Path]:
    """Return the folders of a controller ("cpu", "memory") for the process's own group and every
    group above it.

    In a container the path of the group may exist only on the host; the top folder is then that of
    the group.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    folders = []
    base = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers and controller not in controllers.split(","):
            continue
        tops = [base / controllers, base / controller] if controllers else [base, base / "unified"]
        for top in dict.fromkeys(tops):
            inside = [part for part in path.split("/") if part not in ("", "..")]
            levels = [top.joinpath(*inside[:depth]) for depth in range(len(inside) + 1)]
            folders += [level for level in levels if level.is_dir()]
    return folders


def _numbers(file: Path, count: int = 1) -> list[int]:
    """Return the first `count` numbers of a file; [] for "max" and for a missing file."""
    try:
        return [int(word) for word in file.read_text(encoding="ascii").split()[:count]]
    except (OSError, ValueError):
        return []


def _cached(folder: Path) -> int:
    """Return the bytes of a group's inactive cached files; 0 if unknown."""
    try:
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
        stats = dict(line.split(maxsplit=1) for line in lines if " " in line)
        return int(stats.get("total_inactive_file", stats.get("inactive_file", "0")))
    except (OSError, ValueError):
        return 0


def threads(root: Path = ROOT) -> int:
    """Return the number of threads that can run at once, at least one: logical CPUs within the
    affinity and the CPU quota of this process.
    """
    count: float = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        count = min(count, len(os.sched_getaffinity(0)))
    quota = group_limits(root).cores
    return max(1, math.ceil(min(count, quota or count)))


def cores(root: Path = ROOT) -> int:
    """Return the number of physical cores that this process may use."""
    of_machine = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    return min(of_machine, threads(root))


def memory_bytes(root: Path = ROOT) -> int:
    """Return the memory that this process may take at most."""
    total = int(psutil.virtual_memory().total)
    return min(total, group_limits(root).memory or total)


def free_memory_bytes(root: Path = ROOT) -> int:
    """Return the memory that this process could still take."""
    free = group_limits(root).memory_free
    available = int(psutil.virtual_memory().available)
    return available if free is None else min(available, free)


def disk_bytes(path: Path) -> tuple[int, int]:
    """Return the free and the total bytes of a path's disk. Raises OSError."""
    usage = shutil.disk_usage(path)
    return usage.free, usage.total
