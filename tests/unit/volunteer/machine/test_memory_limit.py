"""Try what a program may still take under a limit, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from shared.units import GIB
from volunteer.machine import memory_limit
from volunteer.machine.memory_limit import OWN_BYTES, limit_bytes

CODE = """
import numpy as np
from volunteer.machine import memory_limit
from volunteer.machine.device_memory import out_of_memory

print("before:", memory_limit.limit_sentence())
print("limited:", memory_limit.limit(0.5))
print("now:", memory_limit.limit_sentence())
import torch
for name, take in (
    ("bytes", lambda: bytearray(3 << 30)),
    ("array", lambda: np.ones(3 << 30, np.uint8)),
    ("tensor", lambda: torch.ones(3 << 30, dtype=torch.uint8)),
    ("model", lambda: (torch.ones(1 << 26) @ torch.ones(1 << 26)).item()),
):
    try:
        take()
        print(f"{name}: taken")
    except (MemoryError, RuntimeError) as error:
        print(f"{name}: refused {out_of_memory(error)}")
memory_limit.adjust(4.0)
print("array again:", len(np.empty(3 << 30, np.uint8)) >> 30)
"""


def outcome() -> dict[str, str]:
    process = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=True, timeout=300
    )
    return dict(line.split(": ", 1) for line in process.stdout.splitlines())


def test_what_is_too_large_is_refused_as_memory_that_ran_out_and_the_rest_works() -> None:
    found = outcome()
    if memory_limit.unsupported_reason():
        assert found["limited"] == "False"
        assert found["bytes"] == "taken"
        return
    assert found["limited"] == "True"
    assert "off" in found["before"]
    assert found["now"] == "the program may take 2.5 GiB of memory"
    for name in ("bytes", "array", "tensor"):
        assert found[name] == "refused True"
    assert found["model"] == "taken"
    assert found["array again"] == "3"


def test_the_limit_leaves_room_for_the_program_and_follows_the_setting() -> None:
    assert limit_bytes(0.0, 16 * GIB) == 8 * GIB + OWN_BYTES
    assert limit_bytes(2.0, 16 * GIB) == 2 * GIB + OWN_BYTES
    assert limit_bytes(64.0, 16 * GIB) == 16 * GIB + OWN_BYTES


def test_where_nothing_can_be_limited_a_sentence_says_why(tmp_path: Path) -> None:
    assert "this system" in memory_limit.unsupported_reason("win32")
    assert "graphics driver" in memory_limit.unsupported_reason("linux", [str(tmp_path)])
    assert not memory_limit.unsupported_reason("linux", [str(tmp_path / "not there")])
