"""Limits of control groups, from trees of files as the kernel shows them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shared.programs import machine_limits
from shared.programs.machine_limits import GroupLimits, group_limits
from shared.units import GIB
from tests.support.sources import modules

RAW = re.compile(r"cpu_count|virtual_memory|disk_usage|statvfs|sched_getaffinity|/cgroup")


def tree(root: Path, groups: str, files: dict[str, str]) -> GroupLimits:
    """The limits in a made-up system."""
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return group_limits(root)


def test_a_machine_without_groups_has_no_limits(tmp_path: Path) -> None:
    assert group_limits(tmp_path) == GroupLimits()


def test_version_2_counts_every_level_and_the_tightest_holds(tmp_path: Path) -> None:
    found = tree(
        tmp_path,
        "0::/system.slice/volunteer.service\n",
        {
            "sys/fs/cgroup/system.slice/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/system.slice/memory.current": f"{3 * GIB}\n",
            "sys/fs/cgroup/system.slice/memory.stat": f"anon 5\ninactive_file {GIB}\n",
            "sys/fs/cgroup/system.slice/cpu.max": "max 100000\n",
            "sys/fs/cgroup/system.slice/volunteer.service/memory.max": "max\n",
            "sys/fs/cgroup/system.slice/volunteer.service/cpu.max": "150000 100000\n",
        },
    )
    assert found == GroupLimits(cores=1.5, memory=4 * GIB, memory_free=2 * GIB)


def test_version_1_in_a_container_whose_path_is_the_hosts(tmp_path: Path) -> None:
    found = tree(
        tmp_path,
        "4:memory:/docker/0123\n3:cpu,cpuacct:/docker/0123\n2:pids:/docker/0123\n",
        {
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB // 4}\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "200000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
    )
    assert found == GroupLimits(cores=2.0, memory=GIB, memory_free=GIB - GIB // 4)


def test_version_1_without_limits_writes_a_boundless_number(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    assert tree(tmp_path, "4:memory:/\n3:cpu:/\n", files) == GroupLimits()


@pytest.mark.parametrize("quota", ["50000 100000", "100000 100000"])
def test_what_is_told_of_the_machine_is_what_may_be_used(tmp_path: Path, quota: str) -> None:
    files = {"sys/fs/cgroup/cpu.max": quota, "sys/fs/cgroup/memory.max": str(GIB)}
    tree(tmp_path, "0::/\n", files)
    assert machine_limits.threads(tmp_path) == machine_limits.cores(tmp_path) == 1
    assert machine_limits.memory_bytes(tmp_path) == GIB
    assert 0 < machine_limits.free_memory_bytes(tmp_path) <= GIB


def test_nothing_else_asks_the_system() -> None:
    raw = {
        name
        for name, path in modules().items()
        if RAW.search(path.read_text(encoding="utf-8")) and name != "shared.programs.machine_limits"
    }
    assert not raw
