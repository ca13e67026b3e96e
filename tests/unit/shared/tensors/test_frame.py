"""Tensor files: what is written is what any reader of the format reads, and nothing else is
accepted.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import InvalidFrame, StorageFull
from shared.files import disk_writes
from shared.tensors import frame as frames
from shared.tensors.frame import (
    NUMPY,
    FrameWriter,
    frame_bytes,
    open_frame,
    read_header,
)
from shared.tensors.header import HEADER_BYTES_MAX
from shared.tensors.spec import Schema, TensorSpec, by_name, grid, nbytes
from tests.support.examples import examples
from tests.support.parsed_frames import parse_frame
from tests.support.tensor_samples import count

SMALL: Schema = (
    TensorSpec("a", (2, 3)),
    TensorSpec("b", (), "I64", "counter"),
    TensorSpec("c", (4,), "U8"),
)


def fill(schema: Schema, seed: int = 0) -> dict[str, np.ndarray]:
    """Arrays of any bytes at all (NaN too: a frame carries bytes, it does not judge them)."""
    rng = np.random.default_rng(seed)
    found = {}
    for spec in schema:
        raw = rng.integers(0, 2 if spec.dtype == "BOOL" else 256, spec.nbytes, np.uint8)
        found[spec.name] = raw.view(NUMPY[spec.dtype]).reshape(spec.shape)
    return found


def file_of(header: Any, body: bytes = b"", text: bytes | None = None) -> bytes:
    found = json.dumps(header).encode() if text is None else text
    return len(found).to_bytes(8, "little") + found + body


specs = st.builds(
    TensorSpec,
    name=st.text("abcdefgh._0", min_size=1, max_size=12),
    shape=st.lists(st.integers(0, 5), max_size=4).map(tuple),
    dtype=st.sampled_from(sorted(NUMPY)),
)
schemas = st.lists(specs, max_size=6, unique_by=lambda spec: spec.name).map(tuple)
metadata = st.dictionaries(st.text(max_size=8), st.text(max_size=20), max_size=3).filter(
    lambda found: all(text.isprintable() for pair in found.items() for text in pair)
)


@settings(deadline=None, max_examples=examples(150))
@given(schemas, metadata, st.integers(0, 9))
def test_every_reader_of_the_format_reads_what_we_write(
    schema: Schema, notes: dict[str, str], seed: int
) -> None:
    tensors = fill(schema, seed)
    data = frame_bytes(tensors, notes, schema)
    ours, theirs = parse_frame(data, schema), dict(safetensors.deserialize(data))  # type: ignore[no-untyped-call]
    assert ours.metadata == notes
    assert list(ours) == [spec.name for spec in schema]
    for spec in schema:
        other = theirs.pop(spec.name)
        assert (tuple(other["shape"]), other["dtype"]) == (spec.shape, spec.dtype)
        assert bytes(other["data"]) == tensors[spec.name].tobytes() == ours[spec.name].tobytes()
        assert ours[spec.name].shape == spec.shape
    assert theirs == {}


@settings(deadline=None, max_examples=examples(100))
@given(schemas.filter(lambda schema: all(spec.dtype != "BF16" for spec in schema)))
def test_files_of_the_usual_writer_are_read_whatever_their_order(schema: Schema) -> None:
    tensors = fill(schema)
    found = parse_frame(safetensors.numpy.save(tensors, {"format": "pt"}), schema)
    assert all(found[name].tobytes() == tensors[name].tobytes() for name in tensors)
    assert found.metadata == {"format": "pt"}


@settings(deadline=None, max_examples=examples(60))
@given(schemas, st.integers(1, 7))
def test_chunks_make_the_same_file_as_a_whole(
    tmp_path_factory: pytest.TempPathFactory, schema: Schema, step: int
) -> None:
    path = tmp_path_factory.mktemp("frame") / "f.safetensors"
    tensors = fill(schema)
    with FrameWriter(path, schema, {"k": "v"}, sync=False) as writer:
        for spec in schema:
            for start, stop in grid(spec.count, step):
                writer.write(spec.name, tensors[spec.name].reshape(-1)[start:stop])
    data = path.read_bytes()
    assert data == frame_bytes(tensors, {"k": "v"}, schema)
    assert writer.written is not None
    assert (writer.written.sha256, writer.written.size) == (
        hashlib.sha256(data).hexdigest(),
        len(data),
    )
    assert [found.name for found in path.parent.iterdir()] == [path.name]


def test_a_mapped_frame_gives_views_that_cannot_hurt_the_file(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    path.write_bytes(frame_bytes(fill(SMALL), None, SMALL))
    before = path.read_bytes()
    with open_frame(path, SMALL) as frame:
        kept = frame["a"]
        assert np.shares_memory(kept, frame.array("a"))
        with pytest.raises(ValueError, match="read-only"):
            kept[0, 0] = 1.0
        assert frame.array("a").ctypes.data % 64 == 0
    assert kept.tobytes() == fill(SMALL)["a"].tobytes()  # an array outlives its frame
    writable = open_frame(path, SMALL, copy_on_write=True)["a"]
    writable += 1
    assert path.read_bytes() == before


def test_a_file_cut_anywhere_or_longer_is_refused(tmp_path: Path) -> None:
    data = frame_bytes(fill(SMALL), {"codec": "none"}, SMALL)
    path = tmp_path / "f.safetensors"
    for length in range(len(data)):
        with pytest.raises(InvalidFrame):
            parse_frame(data[:length], SMALL)
    for wrong in (data[:-1], data + b"\0", b""):
        path.write_bytes(wrong)
        with pytest.raises(InvalidFrame, match=r"cut off|too long"):
            open_frame(path, SMALL)


GOOD: dict[str, Any] = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "I64", "shape": [], "data_offsets": [24, 32]},
    "c": {"dtype": "U8", "shape": [4], "data_offsets": [32, 36]},
}


def changed(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(GOOD))
    change(found)
    return found


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda h: h["b"].update(data_offsets=[16, 24]), "overlaps"),
        (lambda h: h["c"].update(data_offsets=[0, 4]), "overlaps"),
        (lambda h: h["c"].update(data_offsets=[33, 37]), "hole"),
        (lambda h: h["a"].update(data_offsets=[0, 20]), "covers 20 bytes"),
        (lambda h: h["a"].update(data_offsets=[24, 0]), "covers -24 bytes"),
        (lambda h: h["a"].update(data_offsets=[-24, 0]), "cannot be read"),
        (lambda h: h["a"].update(data_offsets=[0, 24, 24]), "cannot be read"),
        (lambda h: h["a"].update(data_offsets=[0, 10**400]), "cannot be read"),
        (lambda h: h["a"].update(shape=[3, 2]), "shape"),
        (lambda h: h["a"].update(shape=[2, 3.0]), "whole number"),
        (lambda h: h["a"].update(shape=[True, 6]), "cannot be read"),
        (lambda h: h["a"].update(shape=[1] * 99), "cannot be read"),
        (lambda h: h["a"].update(shape="23"), "cannot be read"),
        (lambda h: h["a"].update(dtype="I32"), "schema says F32"),
        (lambda h: h["a"].update(dtype=None), "cannot be read"),
        (lambda h: h["a"].update(more=1), "cannot be read"),
        (lambda h: h["a"].pop("shape"), "cannot be read"),
        (lambda h: h.update(a=[]), "cannot be read"),
        (lambda h: h.pop("b"), "'b' is missing"),
        (lambda h: h.update(d=h["c"]), "'d', which the schema does not know"),
        (lambda h: h.update({"\ud800": h["c"]}), "does not know"),
        (lambda h: h.update(__metadata__={"k": 1}), "cannot be read"),
        (lambda h: h.update(__metadata__=[]), "cannot be read"),
        (lambda h: h.update(__metadata__={"k": "\ud800"}), "cannot be read"),
        (lambda h: h.update(__metadata__={str(i): "" for i in range(65)}), "metadata"),
        (lambda h: h.update(__metadata__={"k": "x" * 70_000}), "metadata"),
    ],
)
def test_a_header_that_differs_from_the_schema_is_refused_with_the_reason(
    change: Callable[[dict[str, Any]], object], reason: str
) -> None:
    with pytest.raises(InvalidFrame, match=reason):
        parse_frame(file_of(changed(change), bytes(36)), SMALL)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}x",
        b"[]",
        b"\xef\xbb\xbf{}",
        b"{} \n",
        b'{"\xff": 1}',
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": 1e999}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
        b'{"a": {"dtype":"F32","dtype":"F32","shape":[],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},'
        b'"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
        b'{"__metadata__":{"k":"v","k":"w"}}',
    ],
)
def test_a_header_that_is_no_strict_json_is_refused(text: bytes) -> None:
    for read in (read_header, lambda data: parse_frame(data, SMALL)):
        with pytest.raises(InvalidFrame):
            read(file_of(None, b"", text))


def test_a_huge_header_is_refused_before_it_is_read() -> None:
    claim = (1 << 62).to_bytes(8, "little") + b"{}"
    with pytest.raises(InvalidFrame, match=f"at most {HEADER_BYTES_MAX}"):
        read_header(claim)
    with pytest.raises(InvalidFrame, match="claims"):
        parse_frame(claim, SMALL)
    padded = json.dumps(GOOD).encode() + b" " * 500_000  # more than three tensors can honestly need
    with pytest.raises(InvalidFrame, match="claims"):
        parse_frame(file_of(None, bytes(36), padded), SMALL)


@settings(deadline=None, max_examples=examples(400))
@given(st.data())
def test_no_damage_does_more_than_be_refused(data: st.DataObject) -> None:
    whole = bytearray(frame_bytes(fill(SMALL), {"k": "v"}, SMALL))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = parse_frame(bytes(whole), SMALL)
    except InvalidFrame:
        return
    assert [found[spec.name].shape for spec in SMALL] == [spec.shape for spec in SMALL]


@settings(deadline=None, max_examples=examples(200))
@given(st.binary(max_size=200), st.booleans())
def test_noise_is_refused(noise: bytes, framed: bool) -> None:
    with pytest.raises(InvalidFrame):
        parse_frame(file_of(None, b"", noise) if framed else noise, SMALL)


def test_a_header_can_be_read_before_the_rest_has_arrived(tmp_path: Path) -> None:
    data = frame_bytes(fill(SMALL), {"k": "v"}, SMALL)
    (tmp_path / "part").write_bytes(data[:-30])
    for header in (read_header(data[:-30]), read_header(tmp_path / "part")):
        assert list(header.entries) == ["a", "b", "c"]
        assert header.metadata == {"k": "v"}


def one(value: float = 1.0, dtype: str = "f4") -> np.ndarray:
    return np.full(1, value, dtype)


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        (lambda w: w.write("b", one(dtype="i8")), "where 'a' was due"),
        (lambda w: w.write("a", one(dtype="f8")), "was given float64"),
        (lambda w: w.write("a", np.zeros(7, "f4")), "more than its 6"),
        (lambda w: w.write("a", np.zeros(5, "f4")), "5 of its 6 elements"),
        (lambda w: w.write("z", one()), "where 'a' was due"),
        (lambda w: w.room("b", 1), "where 'a' was due"),
        (lambda w: w.room("a", 7), "more than its 6"),
        (lambda w: None, "0 of its 6 elements"),
    ],
)
def test_a_writer_that_is_misused_leaves_nothing_behind(
    tmp_path: Path, use: Callable[[FrameWriter], None], reason: str
) -> None:
    with pytest.raises(InvalidFrame, match=reason), FrameWriter(tmp_path / "f", SMALL) as writer:
        use(writer)
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_can_be_filled_in_place(tmp_path: Path) -> None:
    tensors = fill(SMALL)
    with FrameWriter(tmp_path / "f", SMALL, {"k": "v"}, sync=False) as writer:
        for spec in SMALL:
            flat = tensors[spec.name].reshape(-1)
            writer.write(spec.name, flat[:1])
            for start in range(1, flat.size, 2):
                part = flat[start : start + 2]
                room = writer.room(spec.name, part.size)
                assert room.shape == part.shape
                room[:] = part
    assert (tmp_path / "f").read_bytes() == frame_bytes(tensors, {"k": "v"}, SMALL)


def test_an_interrupted_write_keeps_the_file_that_was_there(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old")

    def interrupted() -> None:
        with FrameWriter(path, SMALL) as writer:
            writer.write("a", np.zeros(6, "f4"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_synced_does_not_take_the_name_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut it might be empty, and the one before would be gone."""

    def failing(descriptor: int) -> None:
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(os, "fsync", failing)
    path = tmp_path / "f"
    path.write_bytes(b"old")
    writer = FrameWriter(path, SMALL)
    for name, values in fill(SMALL).items():
        writer.write(name, values)
    with pytest.raises(OSError, match="input/output"):
        writer.close()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_said_so_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        disk_writes, "_NO_SPACE", {errno.EFBIG}
    )  # a size limit stands in for a small disk
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    schema = (TensorSpec("w", (1 << 22,)),)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 23, limits[1]))
        with (
            pytest.raises(StorageFull, match="no space"),
            FrameWriter(tmp_path / "f", schema) as writer,
        ):
            writer.write("w", np.zeros(1 << 22, "f4"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", "__metadata__", "x" * 257, "a\nb", "\ud800"])
def test_a_name_that_no_tensor_may_have_is_refused(name: str) -> None:
    with pytest.raises(InvalidFrame, match="cannot be the name"):
        TensorSpec(name, (1,))


def test_what_no_schema_may_say_is_refused() -> None:
    with pytest.raises(InvalidFrame, match="known are BOOL"):
        TensorSpec("w", (1,), "F8")
    for shape in ((-1,), (1,) * 9, (1 << 40, 1 << 40)):
        with pytest.raises(InvalidFrame):
            TensorSpec("w", shape)
    with pytest.raises(InvalidFrame, match="'a' twice"):
        by_name((TensorSpec("a", ()), TensorSpec("b", ()), TensorSpec("a", ())))


def test_a_schema_counts_what_it_holds() -> None:
    assert (count(SMALL), count(SMALL, "parameter"), nbytes(SMALL)) == (11, 10, 36)
    assert list(grid(10, 4)) == [(0, 4), (4, 8), (8, 10)]
    assert list(grid(0)) == []


def test_arrays_that_fit_no_file_are_refused() -> None:
    with pytest.raises(InvalidFrame, match="complex64"):
        frame_bytes({"z": np.zeros(1, np.complex64)})
    with pytest.raises(InvalidFrame, match="'a' is not F32"):
        frame_bytes({"a": np.zeros(6, "f4")}, None, SMALL)


def test_the_schema_of_our_own_file_can_be_read_back(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(frame_bytes(fill(SMALL), None, SMALL))
    found = frames.schema_of_file(tmp_path / "f")
    assert [(s.name, s.shape, s.dtype) for s in found] == [
        (s.name, s.shape, s.dtype) for s in SMALL
    ]
    assert open_frame(tmp_path / "f", found)["a"].tobytes() == fill(SMALL)["a"].tobytes()


def test_a_schema_costs_no_numpy() -> None:
    code = (
        "import sys, shared.tensors.spec, shared.tensors.header; sys.exit('numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
