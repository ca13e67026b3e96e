"""Memory of a device that a task may use."""

from __future__ import annotations

from typing import Literal

import pytest

from shared.protocol.accounts import Device
from shared.units import GIB
from volunteer.agent.collaborators import usable_bytes


@pytest.mark.parametrize(
    ("kind", "memory_gb", "usable"),
    [("cpu", 0, 5), ("mps", 0, 5), ("cuda", 0, 9), ("cpu", 8, 8), ("cuda", 64, 10)],
)
def test_without_a_setting_never_all_of_it(
    kind: Literal["cpu", "cuda", "mps"], memory_gb: float, usable: int
) -> None:
    device = Device(id=kind, kind=kind, name="", memory_bytes=10 * GIB)
    assert usable_bytes(device, memory_gb) == usable * GIB
