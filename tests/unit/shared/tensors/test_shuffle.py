"""Packed pieces by fixed examples: what comes back, and the sentence for each way to be wrong."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

from shared.errors import InvalidFrame
from shared.tensors.frame import schema_of
from shared.tensors.header import header_limit
from shared.tensors.shuffle import (
    LENGTH,
    SLACK_BYTES,
    byte_planes,
    from_planes,
    pack_bytes,
    read_array,
    read_piece,
    unpack_bytes,
)
from shared.tensors.spec import NAME_CHARS_MAX, RANK_MAX, TensorSpec

DATA = bytes(range(200)) * 40


def piece(data: bytes, length: int | None = None) -> bytes:
    """One piece of a packed file, which says that it has this length."""
    packed = pack_bytes(data)
    return LENGTH.pack(len(packed) if length is None else length) + packed


def test_planes_are_the_bytes_of_each_rank_the_lowest_first() -> None:
    array = np.array([[1, 0x0203], [0xFFFE, 4]], np.uint16)
    planes = byte_planes(array)
    assert planes == [bytes([1, 3, 0xFE, 4]), bytes([0, 2, 0xFF, 0])]
    assert from_planes(planes, np.uint16, 4).tolist() == [1, 0x0203, 0xFFFE, 4]
    assert from_planes([], np.uint16, 0).tolist() == []
    for wrong in (planes[:1], [planes[0], planes[1][:3]], [*planes, planes[0]]):
        with pytest.raises(InvalidFrame, match="does not hold exactly 4 elements"):
            from_planes(wrong, np.uint16, 4)


@pytest.mark.parametrize("size_max", [len(DATA), len(DATA) + 1, 10 * len(DATA)])
def test_what_was_packed_is_unpacked_up_to_its_bound(size_max: int) -> None:
    assert len(pack_bytes(DATA)) < len(DATA) / 10
    assert unpack_bytes(pack_bytes(DATA), size_max) == DATA


@pytest.mark.parametrize(
    ("data", "size_max"),
    [
        (pack_bytes(DATA), len(DATA) - 1),
        (pack_bytes(DATA), 0),
        (pack_bytes(DATA)[:-1], len(DATA)),
        (pack_bytes(DATA) + b"x", len(DATA)),
        (pack_bytes(DATA) * 2, len(DATA)),
    ],
    ids=["one too long", "nothing allowed", "cut off", "a byte behind", "twice"],
)
def test_what_does_not_end_at_its_bound_is_refused(data: bytes, size_max: int) -> None:
    says = f"compressed tensor data does not end after {size_max} bytes"
    with pytest.raises(InvalidFrame, match=says):
        unpack_bytes(data, size_max)


def test_noise_is_refused() -> None:
    with pytest.raises(InvalidFrame, match="compressed tensor data cannot be read: "):
        unpack_bytes(b"noise and more noise", 100)


def test_pieces_are_read_one_by_one() -> None:
    file = io.BytesIO(piece(b"first") + piece(b"third"))
    assert unpack_bytes(read_piece(file, 5, "it"), 5) == b"first"
    assert unpack_bytes(read_piece(file, 5, "it"), 5) == b"third"
    with pytest.raises(InvalidFrame, match=r"^it ends too early$"):
        read_piece(file, 5, "it")


def test_numbers_are_read_rank_by_rank() -> None:
    array = np.array([1.5, -2.0, 3e9], np.float32)
    file = io.BytesIO(b"".join(map(piece, byte_planes(array))))
    assert read_array(file, np.dtype("f4"), 3, "it").tolist() == array.tolist()


@pytest.mark.parametrize("above", [0, 1])
def test_a_piece_may_exceed_what_it_unpacks_to_by_the_slack(above: int) -> None:
    length = 10 + SLACK_BYTES + above
    file = io.BytesIO(LENGTH.pack(length) + bytes(length))
    if not above:
        read_piece(file, 10, "it")
        assert file.tell() == LENGTH.size + length
        return
    with pytest.raises(InvalidFrame, match=r"^it holds a piece that is longer than its tensor$"):
        read_piece(file, 10, "it")


@pytest.mark.parametrize("file", [b"", b"\0\0\0", piece(b"first")[:-1]])
def test_a_piece_that_is_cut_off_is_refused(file: bytes) -> None:
    with pytest.raises(InvalidFrame, match=r"^it ends too early$"):
        read_piece(io.BytesIO(file), 5, "it")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"name": ""}, "'' cannot be the name of a tensor"),
        ({"name": "a" * (NAME_CHARS_MAX + 1)}, "cannot be the name of a tensor"),
        ({"name": "a\nb"}, "cannot be the name of a tensor"),
        ({"name": "__metadata__"}, "'__metadata__' cannot be the name of a tensor"),
        ({"dtype": "F31"}, "'w' has the dtype 'F31'; known are BOOL, U8, "),
        ({"shape": (1,) * (RANK_MAX + 1)}, "'w' has an impossible shape"),
        ({"shape": (2, -1)}, "'w' has an impossible shape"),
        ({"shape": (1 << 40, 1 << 20)}, "'w' is larger than any tensor may be"),
    ],
)
def test_a_tensor_that_cannot_be_is_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidFrame, match=says):
        TensorSpec(**({"name": "w", "shape": (2,)} | values))


def test_a_tensor_on_every_bound_is_one() -> None:
    spec = TensorSpec("a" * NAME_CHARS_MAX, (1,) * (RANK_MAX - 1) + (3,), "F64")
    assert (spec.count, spec.nbytes) == (3, 24)
    assert TensorSpec("w", (0, 5)).count == 0
    assert TensorSpec("w", ()).nbytes == 4


def test_arrays_become_parameters_of_their_shape_and_dtype() -> None:
    arrays = {"a": np.zeros((2, 3), "f4"), "b": np.zeros((), "i8"), "c": np.zeros(4, "f2")}
    assert schema_of(arrays) == (
        TensorSpec("a", (2, 3), "F32", "parameter"),
        TensorSpec("b", (), "I64", "parameter"),
        TensorSpec("c", (4,), "F16", "parameter"),
    )
    with pytest.raises(InvalidFrame, match="'z' is complex64, which a tensor file cannot hold"):
        schema_of({"z": np.zeros(1, "c8")})


def test_a_header_has_room_for_escaped_names_and_metadata() -> None:
    nothing = header_limit(())
    one = header_limit((TensorSpec("ab", (2,)),))
    assert one - nothing == 6 * 2 + 256
    assert header_limit((TensorSpec("ab", (2,)), TensorSpec("c", (2,)))) - one == 6 + 256
