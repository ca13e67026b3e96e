"""What a step frees stays for the next one, and goes back to the system at the end of a task."""

from __future__ import annotations

import json
import platform
import subprocess
import sys

import pytest

STEP_MIB, PIECE_MIB = 120, 3
CODE = f"""
import json, resource, threading
import psutil
from volunteer.machine.device_memory import keep_freed_memory, release_device

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step():
    before = faults()
    pieces = [bytearray(b"1") * ({PIECE_MIB} << 20) for _ in range({STEP_MIB // PIECE_MIB})]
    return faults() - before

def resident():
    return psutil.Process().memory_info().rss >> 20

def task():
    steps = [step() for _ in range(5)]
    at_work = resident()
    release_device()
    print(json.dumps({{"faults": steps, "at_work": at_work, "released": resident()}}))

keep_freed_memory()
thread = threading.Thread(target=task)
thread.start()
thread.join()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps nothing")
def test_no_step_but_the_first_waits_for_cleared_pages_and_a_task_leaves_none_behind() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    outcome = json.loads(done.stdout)
    first, *later = outcome["faults"]
    assert first > 1000
    assert max(later) < first / 10
    assert outcome["at_work"] - outcome["released"] > 0.9 * STEP_MIB
