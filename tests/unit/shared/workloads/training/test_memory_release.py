"""Release of a device's cached memory."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from shared.workloads.training.memory_release import release_memory

CODE = """
import sys
from shared.workloads.training.memory_release import release_memory
release_memory("cuda:0")
print("torch" in sys.modules)
"""


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "xpu:0", "mps"])
def test_the_cache_of_the_devices_own_backend_is_emptied_and_no_other(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied: list[str] = []
    for kind in ("cuda", "xpu", "mps"):
        backend = getattr(torch, kind)
        monkeypatch.setattr(backend, "empty_cache", lambda kind=kind: emptied.append(kind))
    release_memory(device)
    assert emptied == [device.partition(":")[0]]
    release_memory("cpu")
    assert len(emptied) == 1


@pytest.mark.parametrize("device", ["cpu", "cuda:0", "xpu:0", "mps"])
def test_a_device_that_is_not_there_is_no_error(device: str) -> None:
    release_memory(device)


def test_a_program_without_torch_does_not_load_it() -> None:
    result = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.strip() == "False"
