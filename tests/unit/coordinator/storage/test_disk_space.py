"""Disks of data and blobs: the fuller one decides."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.storage.disk_space import Space
from shared.errors import StorageFull
from tests.support.virtual_clock import VirtualClock


@pytest.mark.parametrize("full", ["data", "blobs"])
def test_a_full_disk_of_either_closes_the_coordinator(full: str, tmp_path: Path) -> None:
    free = {"data": 900, "blobs": 900}
    for name in free:
        (tmp_path / name).mkdir()
    space = Space(
        tmp_path / "data", 500, VirtualClock(), tmp_path / "blobs", free=lambda p: free[p.name]
    )
    assert not space.read_only
    free[full] = 100
    assert not space.look()
    assert space.free_bytes() == 100
    assert space.why == f"100 B are free for {tmp_path / full}"
    with pytest.raises(StorageFull, match="nearly full"):
        space.check()
    free[full] = 900
    assert space.look()
    assert space.why == ""
    space.check(400)
    with pytest.raises(StorageFull):
        space.check(401)


def test_a_disk_that_is_away_is_named(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    space = Space(tmp_path / "data", 0, VirtualClock(), tmp_path / "blobs")
    assert space.read_only
    assert space.why.startswith(f"{tmp_path / 'blobs'} cannot be written")
    assert space.free_bytes() == 0
