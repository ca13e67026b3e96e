"""Files that are written, hashed and synced behind the back of whoever fills them."""

from __future__ import annotations

import errno
import hashlib
import os
import random
from pathlib import Path

import numpy as np
import pytest

from shared.errors import StorageFull
from shared.tensors.frame import FrameWriter
from shared.tensors.spec import TensorSpec
from shared.tensors.writer import PIECE_BYTES, PIECES, SMALL_BYTES, SYNC_BYTES, Sink

SIZES = (0, 1, PIECE_BYTES, (PIECES + 2) * PIECE_BYTES + 17, SMALL_BYTES, 3 * SYNC_BYTES + 5)


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_the_bytes_come_in_order_and_their_hash_is_right(
    tmp_path: Path, size: int, sync: bool
) -> None:
    data = random.Random(size).randbytes(size)
    sink, left = Sink(tmp_path / "f", size, sync=sync), bytearray(data)
    step = random.Random(1).randint(1, 3 * PIECE_BYTES)
    for start in range(0, size, step):
        room = memoryview(left)[start : start + step]
        sink.write(room)
        room[:] = bytes(len(room))  # the bytes belong to the caller again
    assert sink.close() == hashlib.sha256(data).hexdigest()
    assert (tmp_path / "f").read_bytes() == data
    assert sink.size == size


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("size", [1, PIECE_BYTES - 1, SMALL_BYTES + 3 * PIECE_BYTES + 5])
def test_what_is_filled_in_place_comes_in_order_between_what_is_copied(
    tmp_path: Path, size: int, sync: bool
) -> None:
    rng = random.Random(size)
    data = rng.randbytes(size)
    sink, at = Sink(tmp_path / "f", size, sync=sync), 0
    while at < size:
        count = min(rng.choice([1, 1000, PIECE_BYTES]), size - at)
        if rng.random() < 0.5:
            sink.room(count)[:] = data[at : at + count]
        else:
            sink.write(memoryview(data)[at : at + count])
        at += count
    assert sink.close() == hashlib.sha256(data).hexdigest()
    assert (tmp_path / "f").read_bytes() == data
    assert sink.size == size


def test_a_file_that_becomes_larger_than_was_said_is_whole(tmp_path: Path) -> None:
    data = bytes(range(256)) * 20_000
    sink = Sink(tmp_path / "f", 10, sync=True)
    sink.write(memoryview(data))
    assert sink.close() == hashlib.sha256(data).hexdigest()
    assert (tmp_path / "f").read_bytes() == data


def test_a_sync_on_the_way_that_fails_is_not_forgotten_by_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.fsync, 0

    def failing(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:  # the kernel tells of lost bytes once
            raise OSError(errno.ENOSPC, "no space")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    schema = (TensorSpec("w", (3 * SYNC_BYTES // 4,)),)
    with (
        pytest.raises(StorageFull, match="no space"),
        FrameWriter(tmp_path / "f", schema) as writer,
    ):
        writer.write("w", np.zeros(schema[0].shape, "f4"))
    assert list(tmp_path.iterdir()) == []


def test_a_sink_that_is_given_up_leaves_no_thread_and_no_open_file(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    sink = Sink(tmp_path / "f", 2 * SYNC_BYTES, sync=True)
    sink.write(memoryview(bytes(SYNC_BYTES + 1)))
    sink.abort()
    sink.abort()
    assert len(os.listdir("/proc/self/fd")) == before
