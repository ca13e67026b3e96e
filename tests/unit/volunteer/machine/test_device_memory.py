"""Memory of a device that a task may use."""

from __future__ import annotations

from typing import Literal

import pytest

from shared.protocol.accounts import Device
from shared.units import GIB
from volunteer.machine.device_memory import usable_bytes, usable_host_bytes


@pytest.mark.parametrize(
    ("kind", "memory_gb", "usable"),
    [("cpu", 0, 5), ("mps", 0, 5), ("cuda", 0, 9), ("cpu", 8, 8), ("cuda", 64, 10)],
)
def test_without_a_setting_never_all_of_it(
    kind: Literal["cpu", "cuda", "mps"], memory_gb: float, usable: int
) -> None:
    device = Device(id=kind, kind=kind, name="", memory_bytes=10 * GIB)
    assert usable_bytes(device, memory_gb) == usable * GIB


@pytest.mark.parametrize(
    ("lent", "memory_gb", "usable"), [(1, 0, 5.0), (2, 0, 2.5), (1, 8, 8.0), (4, 64, 2.5)]
)
def test_the_memory_of_the_host_is_shared_by_all_devices_at_work(
    lent: int, memory_gb: float, usable: float
) -> None:
    host = Device(id="cpu", kind="cpu", name="", memory_bytes=10 * GIB)
    card = Device(id="cuda:0", kind="cuda", name="", memory_bytes=80 * GIB)
    assert usable_host_bytes((host, card), lent, memory_gb) == usable * GIB
    assert usable_host_bytes((card,), lent, memory_gb) == 0
