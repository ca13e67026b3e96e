"""Packed updates and weights: the same numbers in fewer bytes, and damage refused."""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from shared.errors import InvalidFrame
from shared.tensors.quantize import codec
from shared.tensors.shuffle import byte_planes, from_planes, pack_bytes, unpack_bytes
from shared.tensors.slices import bf16_from_float
from shared.tensors.spec import CHUNK_ELEMENTS, grid

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

from tests.support.examples import examples
from tests.support.tensor_samples import MODEL, PACKED, model, vector


@pytest.mark.parametrize("name", PACKED)
def test_a_packed_update_holds_the_same_numbers_in_fewer_bytes_and_leaves_no_other_file(
    tmp_path: Path, name: str
) -> None:
    tensors, plain = model(), name.removesuffix("-zstd")
    raw = codec(plain).encode(tensors, MODEL, tmp_path / "raw")
    made = codec(name).encode(tensors, MODEL, tmp_path / "u")
    assert made.size < raw.size
    assert made.sha256 == hashlib.sha256((tmp_path / "u").read_bytes()).hexdigest()
    with (
        codec(plain).decode(tmp_path / "raw", MODEL) as one,
        codec(name).decode(tmp_path / "u", MODEL) as two,
    ):
        assert all(one[spec.name].tobytes() == two[spec.name].tobytes() for spec in MODEL)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["raw", "u"]


def bomb(count: int) -> bytes:
    """A packed vector whose first plane unpacks to a hundred times what it may."""
    planes = [zstd.compress(bytes(size)) for size in (count * 100, count, count, count)]
    pieces = (len(plane).to_bytes(4, "little") + plane for plane in planes)
    return b"VPACK\x00\x00\x01" + b"".join(pieces)


def whole(tmp_path: Path) -> bytes:
    codec("float32-zstd").encode({"w": np.ones(5000, "f4")}, vector(5000), tmp_path / "honest")
    return (tmp_path / "honest").read_bytes()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda data: bomb(5000), "does not end after 5000 bytes"),
        (lambda data: data[:-1], "ends too early"),
        (lambda data: data[:9], "ends too early"),
        (lambda data: data + b"x", "goes on behind"),
        (lambda data: b"X" + data[1:], "is not a packed update"),
        (lambda data: data[:8] + b"\xff\xff\xff\xff" + data[12:], "longer than its tensor"),
        (lambda data: data[:12] + b"\x00" * 9 + data[21:], "cannot be read"),
    ],
    ids=["bomb", "cut", "cut-in-a-length", "longer", "no-magic", "long-piece", "noise"],
)
def test_a_damaged_packed_update_is_refused_with_a_sentence_and_leaves_nothing(
    tmp_path: Path, damage: Callable[[bytes], bytes], says: str
) -> None:
    path = tmp_path / "u"
    path.write_bytes(damage(whole(tmp_path)))
    with (
        pytest.raises(InvalidFrame, match=says),
        codec("float32-zstd").decode(path, vector(5000)) as update,
    ):
        update.read("w", 0, 5000)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["honest", "u"]


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may grow beyond a chunk of float32."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (CHUNK_ELEMENTS * 4, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def large(tmp_path: Path) -> np.ndarray:
    """A packed update of two chunks and a bit, written as "u"."""
    numbers = np.arange(2 * CHUNK_ELEMENTS + 5, dtype="f4")
    codec("float32-zstd").encode({"w": numbers}, vector(numbers.size), tmp_path / "u")
    return numbers


def test_what_is_unpacked_at_once_is_a_chunk_whatever_the_size(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    numbers = large(tmp_path)
    request.getfixturevalue("small_files")
    with codec("float32-zstd").decode(tmp_path / "u", vector(numbers.size)) as update:
        for start, stop in grid(numbers.size):
            assert np.array_equal(update.read("w", start, stop), numbers[start:stop])
        assert update.square("w", 0, CHUNK_ELEMENTS) > 0


def test_slices_across_chunks_are_whole(tmp_path: Path) -> None:
    numbers = large(tmp_path)
    with codec("float32-zstd").decode(tmp_path / "u", vector(numbers.size)) as update:
        assert np.array_equal(update["w"], numbers)
        across = update.read("w", CHUNK_ELEMENTS - 3, 2 * CHUNK_ELEMENTS + 2)
        assert np.array_equal(across, numbers[CHUNK_ELEMENTS - 3 : 2 * CHUNK_ELEMENTS + 2])


def test_threads_read_different_chunks_at_once(tmp_path: Path) -> None:
    numbers = large(tmp_path)
    together = threading.Barrier(2)
    with codec("float32-zstd").decode(tmp_path / "u", vector(numbers.size)) as update:

        def look(start: int) -> bool:
            found = update.read("w", start, start + 100)
            together.wait()
            return np.array_equal(found, numbers[start : start + 100])

        with ThreadPoolExecutor(2) as pool:
            assert all(pool.map(look, [0, CHUNK_ELEMENTS]))


def packed(array: NDArray[Any]) -> bytes:
    return pack_bytes(b"".join(byte_planes(array)))


def unpacked(data: bytes, dtype: str, count: int) -> NDArray[Any]:
    kind = np.dtype(dtype)
    planes = unpack_bytes(data, count * kind.itemsize)
    cuts = range(0, count * kind.itemsize, max(1, count))
    return from_planes([planes[at : at + count] for at in cuts], kind, count)


@settings(deadline=None, max_examples=examples(100))
@given(st.sampled_from(["f4", "u2", "i8", "u1"]), st.binary(max_size=800))
@example("f4", b"")
@example("f4", b"\x00" * 8)
@example("u2", b"\xff" * 16)
@example("u1", bytes(range(256)))
def test_packed_floats_come_back_bit_by_bit(dtype: str, raw: bytes) -> None:
    array = np.frombuffer(raw[: len(raw) // 8 * 8], dtype)
    back = unpacked(packed(array), dtype, array.size)
    assert (back.dtype, back.tobytes()) == (array.dtype, array.tobytes())


def test_packing_makes_weights_smaller() -> None:
    weights = (np.random.default_rng(0).standard_normal(200_000) * 0.02).astype("f4")
    assert len(packed(weights)) < 0.88 * weights.nbytes
    assert len(packed(bf16_from_float(weights))) < 0.72 * weights.nbytes / 2


def test_packed_data_that_is_not_what_was_announced_is_refused() -> None:
    good = packed(np.arange(100, dtype="f4"))
    bomb = zstd.compress(bytes(1 << 28))
    for bad in (good[:-1], good + b"x", good + good, b"", b"noise", bomb):
        with pytest.raises(InvalidFrame):
            unpacked(bad, "f4", 100)
    for size in (99, 101):
        with pytest.raises(InvalidFrame):
            unpacked(good, "f4", size)
