"""A blob has a serial once it is written, and not for ever."""

from __future__ import annotations

import pytest

from coordinator.storage import announced_blobs
from coordinator.storage.announced_blobs import AnnouncedBlobs

A, B = "a" * 64, "b" * 64


async def announcer(sha256: str) -> str:
    return f"serial of {sha256[0]}"


async def put_on_a_full_disk(blobs: AnnouncedBlobs) -> None:
    async with blobs.writing(A):
        assert dict(blobs.serials) == {}
        raise OSError("full")


async def test_a_blob_that_was_not_written_has_no_serial() -> None:
    blobs = AnnouncedBlobs(announcer)
    with pytest.raises(OSError, match="full"):
        await put_on_a_full_disk(blobs)
    assert dict(blobs.serials) == {}
    async with blobs.writing(A):
        pass
    assert dict(blobs.serials) == {A: "serial of a"}


async def test_serials_are_forgotten_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = AnnouncedBlobs(announcer)
    async with blobs.writing(A):
        pass
    monkeypatch.setattr(announced_blobs, "SERIALS_S", -1.0)
    async with blobs.writing(B):
        pass
    assert dict(blobs.serials) == {}
