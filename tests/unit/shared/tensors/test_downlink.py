"""The way down: whoever follows links holds the same bits as who takes a snapshot, version after
version.
"""

from __future__ import annotations

import hashlib
import tracemalloc
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.errors import InvalidFrame
from shared.proofs.signing import canonical, digest
from shared.tensors.codec import Codec, codec
from shared.tensors.downlink import (
    LinkSettings,
    follow_link,
    round_weights,
    schema_of_link,
    write_link,
)
from shared.tensors.frame import NUMPY, FrameWriter, WrittenFile, frame_bytes, open_frame
from shared.tensors.quantize import SCALE, Blocks, Kernel
from shared.tensors.slices import Array, bf16_from_float, float_from_bf16, to_float32
from shared.tensors.snapshot import MAGIC, unpack_snapshot, write_snapshot
from shared.tensors.spec import WALK_ELEMENTS, Schema, TensorSpec, momenta_of
from shared.tensors.update import Delta, inspect
from tests.support.examples import examples
from tests.support.small_disk import full_beyond

INT8 = codec("int8")
PLAIN = LinkSettings(codec=INT8, rounded=False)
MODEL: Schema = (
    TensorSpec("w", (40, 30)),
    TensorSpec("mean", (6,), "F32", "buffer"),
    TensorSpec("steps", (), "I64", "counter"),
    TensorSpec("none", (0, 3)),
    TensorSpec("bias", (9,)),
    *momenta_of((TensorSpec("w", (40, 30)),)),
)
NAME = digest(canonical(MODEL))
VERSIONS = 200


class Chain:
    """A run as its server sees it: the master in memory, what is published in files."""

    def __init__(self, path: Path, chosen: Codec = INT8, seed: int = 0, every: int = 20) -> None:
        self.rng = np.random.default_rng(seed)
        self.codec, self.every, self.version = chosen, every, 0
        self.path = path
        path.mkdir(exist_ok=True)
        self.master: dict[str, Array] = {
            spec.name: self.rng.standard_normal(spec.shape).astype("f4") * np.float32(0.05)
            for spec in MODEL
        } | {"steps": np.array(0)}
        self.written = round_weights(self.master_file(), MODEL, self.file("published"))

    def file(self, what: str, version: int | None = None) -> Path:
        return self.path / f"{what}-{self.version if version is None else version}"

    def master_file(self) -> Path:
        path = self.file("master")
        path.write_bytes(frame_bytes(self.master, {"version": str(self.version)}, MODEL))
        return path

    @property
    def rounded(self) -> bool:
        return self.version % self.every == 0

    def step(self, scale: float) -> None:
        """A new version: parameters move, statistics and counters are new."""
        before = self.file("published")
        self.version += 1
        for name, array in self.master.items():
            move = self.rng.standard_normal(array.shape) * scale
            self.master[name] = array + 1 if name == "steps" else (array - move).astype("f4")
        master, link = self.master_file(), self.file("link")
        how = LinkSettings(codec=self.codec, rounded=self.rounded, sync=True)
        made = write_link(before, master, MODEL, (link, self.file("published")), how)
        assert made[0].sha256 == hashlib.sha256(link.read_bytes()).hexdigest()
        self.written = made[1]
        if self.rounded:
            with open_frame(self.file("published"), MODEL) as frame:
                write_snapshot(frame, MODEL, self.file("snapshot"))


def tensors(path: Path) -> Mapping[str, Array]:
    with open_frame(path, MODEL) as frame:
        return {name: frame.array(name).copy() for name in frame}


@pytest.mark.parametrize(
    "kernel",
    [Blocks(127, 256), Blocks(127, 32), Blocks(7, 64), Blocks(127, 4096)],
    ids=["int8", "small blocks", "int4", "large blocks"],
)
def test_the_chain_and_the_snapshots_are_the_same_bits_over_200_versions(
    tmp_path: Path, kernel: Kernel
) -> None:
    chosen = Codec("int8", kernel)
    server = Chain(tmp_path / "server", chosen)
    held = tmp_path / "held-0"
    held.write_bytes(server.file("published").read_bytes())
    for version in range(1, VERSIONS + 1):
        server.step(scale=10.0 ** server.rng.integers(-6, -1))
        before, held = held, tmp_path / f"held-{version}"
        link = server.file("link")
        schema = schema_of_link(before, link, NAME)
        how = LinkSettings(codec=chosen, rounded=server.rounded)
        made = follow_link(before, link, schema, held, how)
        assert made == server.written
        assert held.read_bytes() == server.file("published").read_bytes()
        if server.rounded:
            unpacked = unpack_snapshot(
                server.file("snapshot"), NAME, tmp_path / "unpacked", 1 << 20
            )
            assert unpacked == server.written
            assert (tmp_path / "unpacked").read_bytes() == held.read_bytes()
        before.unlink()
    found = tensors(held)
    assert int(found["steps"]) == VERSIONS
    assert found["mean"].tobytes() == server.master["mean"].tobytes()


@settings(
    deadline=None,
    max_examples=examples(25),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    seed=st.integers(0, 2**32),
    scales=st.lists(st.floats(-7, 1), min_size=1, max_size=6),
    every=st.integers(1, 4),
)
def test_what_is_published_stays_as_near_to_the_master_as_one_link_can_say(
    tmp_path_factory: pytest.TempPathFactory, seed: int, scales: list[float], every: int
) -> None:
    server = Chain(tmp_path_factory.mktemp("chain"), seed=seed, every=every)
    for scale in scales:
        before = tensors(server.file("published"))
        server.step(10.0**scale)
        found = tensors(server.file("published"))
        for name in ("w", "bias"):
            said = server.master[name].astype("f8") - before[name]
            coarse = np.abs(said).max() / 127 * 0.51  # half a step of the largest block
            coarse += np.abs(found[name]).max() * 2.0 ** (-8 if server.rounded else -22)
            assert np.abs(found[name] - server.master[name].astype("f8")).max() <= coarse


def test_a_version_without_a_base_is_the_master_rounded(tmp_path: Path) -> None:
    server = Chain(tmp_path)
    found = tensors(server.file("published"))
    assert found["w"].tobytes() == float_from_bf16(bf16_from_float(server.master["w"])).tobytes()
    assert found["mean"].tobytes() == server.master["mean"].tobytes()


MIXED: Schema = (
    TensorSpec("first", (3,), "F64", "buffer"),
    TensorSpec("half", (700,), "BF16"),
    TensorSpec("var", (5,), "BF16", "buffer"),
    TensorSpec("seen", (2,), "U8", "counter"),
    TensorSpec("w", (WALK_ELEMENTS + 77,)),
    TensorSpec("none", (0,)),
    TensorSpec("old", (8,), "F16"),
    TensorSpec("last", (), "I64", "counter"),
)


def weights(path: Path, seed: int) -> Path:
    rng = np.random.default_rng(seed)
    with FrameWriter(path, MIXED, sync=False) as writer:
        for spec in MIXED:
            numbers = rng.standard_normal(spec.count)
            floats = bf16_from_float(numbers.astype("f4")) if spec.dtype == "BF16" else numbers
            whole = np.abs(numbers * 50) if spec.role == "counter" else floats
            writer.write(spec.name, whole.astype(NUMPY[spec.dtype]))
    return path


@pytest.mark.parametrize("rounded", [False, True])
def test_the_server_publishes_what_its_link_leads_to_whatever_a_model_is_made_of(
    tmp_path: Path, rounded: bool
) -> None:
    base, master = weights(tmp_path / "base", 1), weights(tmp_path / "master", 2)
    link, published = tmp_path / "link", tmp_path / "published"
    how = LinkSettings(codec=INT8, rounded=rounded)
    encoded, written = write_link(base, master, MIXED, (link, published), how)
    assert follow_link(base, link, MIXED, tmp_path / "held", how) == written
    with (
        open_frame(base, MIXED) as old,
        open_frame(master, MIXED) as new,
        open_frame(published, MIXED) as found,
        INT8.decode(link, MIXED) as step,
    ):
        alone = INT8.encode(Delta(old, new, MIXED), MIXED, tmp_path / "alone")
        assert alone.sha256 == encoded.sha256
        for spec in MIXED:
            before, after = (to_float32(each[spec.name], spec.dtype) for each in (old, new))
            if spec.role == "parameter":
                after = before - step[spec.name]
                if rounded and spec.dtype == "F32":
                    after = float_from_bf16(bf16_from_float(after))
            stored = bf16_from_float(after) if spec.dtype == "BF16" else after
            assert found[spec.name].tobytes() == stored.astype(NUMPY[spec.dtype]).tobytes()


def test_equal_weights_have_equal_hashes_whatever_version_they_are_of(tmp_path: Path) -> None:
    server = Chain(tmp_path, every=1)
    first = server.written
    server.master = {k: v.copy() for k, v in tensors(server.file("published")).items()}
    server.rng = np.random.default_rng(0)
    server.step(scale=0.0)
    server.master["steps"] = server.master["steps"] - 1
    assert server.written != first  # its counter
    link = server.file("link")
    how = LinkSettings(codec=INT8, rounded=True)
    base, files = server.file("published", 0), (link, tmp_path / "same")
    _, again = write_link(base, server.master_file(), MODEL, files, how)
    assert again == first


def test_a_link_between_other_models_is_refused(tmp_path: Path) -> None:
    server = Chain(tmp_path)
    server.step(1e-3)
    base, link = server.file("published", 0), server.file("link")
    with pytest.raises(InvalidFrame, match="another model"):
        schema_of_link(base, link, "0" * 64)
    with pytest.raises(InvalidFrame):
        follow_link(base, link, MODEL[:-1], tmp_path / "x", PLAIN)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("scale", [0x7FC0, 0x7F80, 0xBF80], ids=["NaN", "infinite", "negative"])
def test_a_link_with_an_impossible_scale_is_refused(tmp_path: Path, scale: int) -> None:
    server = Chain(tmp_path)
    server.step(1e-3)
    wire = INT8.wire_schema(MODEL)
    with open_frame(server.file("link"), wire) as frame:
        parts = {name: frame.array(name).copy() for name in frame}
    parts["bias" + SCALE][0] = scale
    bad = tmp_path / "bad"
    bad.write_bytes(frame_bytes(parts, None, wire))
    with pytest.raises(InvalidFrame, match=r"'bias'.*negative, infinite or not a number"):
        follow_link(server.file("published", 0), bad, MODEL, tmp_path / "x", PLAIN)
    assert sorted(path.name for path in tmp_path.glob("*x*")) == []


def test_weights_that_are_not_finite_are_not_published(tmp_path: Path) -> None:
    server = Chain(tmp_path)
    server.master["w"][3, 4] = np.nan
    with pytest.raises(InvalidFrame, match="NaN or infinite"):
        server.step(1e-3)
    with pytest.raises(InvalidFrame, match="NaN or infinite"):
        round_weights(server.file("master"), MODEL, tmp_path / "x")


# --- snapshots ---


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    server = Chain(tmp_path, every=1)
    server.step(1e-2)
    return server.file("snapshot")


def test_a_snapshot_packs_only_what_it_can_give_back(tmp_path: Path) -> None:
    server = Chain(tmp_path)
    server.step(1e-3)
    weights = tensors(server.file("published"))
    with pytest.raises(InvalidFrame, match="not bfloat16"):
        write_snapshot(weights, MODEL, tmp_path / "x")


def test_a_snapshot_keeps_zeros_and_signs(tmp_path: Path) -> None:
    weights: dict[str, Array] = {spec.name: np.zeros(spec.shape, "f4") for spec in MODEL}
    weights["steps"] = np.array(7)
    weights["mean"] = np.array([1e-30, -0.0, 3.3, np.inf, 0, 1], "f4")
    weights["w"][0] = -0.0
    assert isinstance(write_snapshot(weights, MODEL, tmp_path / "packed"), WrittenFile)
    unpack_snapshot(tmp_path / "packed", NAME, tmp_path / "back", 1 << 20)
    found = tensors(tmp_path / "back")
    assert all(found[name].tobytes() == weights[name].tobytes() for name in weights)


def damaged(data: bytes) -> Iterator[tuple[str, bytes]]:
    yield "another magic", b"X" + data[1:]
    yield "cut off", data[:-3]
    yield "cut off in its first length", data[: len(MAGIC) + 2]
    yield "longer", data + b"\0"
    yield "a longer piece", data[: len(MAGIC)] + b"\xff\xff\xff\x7f" + data[len(MAGIC) + 4 :]
    yield "a flipped bit", data[:40] + bytes([data[40] ^ 1]) + data[41:]
    yield "nothing", b""


def test_a_damaged_snapshot_is_refused_and_leaves_nothing(packed: Path, tmp_path: Path) -> None:
    data = packed.read_bytes()
    for what, bytes_ in damaged(data):
        (tmp_path / "damaged").write_bytes(bytes_)
        with pytest.raises(InvalidFrame):
            unpack_snapshot(tmp_path / "damaged", NAME, tmp_path / "out", 1 << 20)
        assert not list(tmp_path.glob("*out*")), what


def test_a_snapshot_of_another_model_is_refused(packed: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidFrame, match="another model"):
        unpack_snapshot(packed, "0" * 64, tmp_path / "out", 1 << 20)


def test_a_snapshot_of_more_bytes_than_its_weights_is_refused_unwritten(tmp_path: Path) -> None:
    schema = (TensorSpec("w", (1 << 24,)),)
    packed = tmp_path / "packed"
    write_snapshot({"w": np.zeros(1 << 24, "f4")}, schema, packed)
    assert packed.stat().st_size < 1 << 18
    name = digest(canonical(schema))
    with full_beyond(1 << 16), pytest.raises(InvalidFrame, match="more than the 1,000 bytes"):
        unpack_snapshot(packed, name, tmp_path / "out", 1000)
    assert list(tmp_path.iterdir()) == [packed]


def test_writing_and_following_a_link_hold_no_large_part_of_a_tensor(tmp_path: Path) -> None:
    schema = (TensorSpec("w", (1 << 22,)),)
    numbers = np.linspace(-1, 1, 1 << 22, dtype="f4")
    for name, factor in (("base", 1.0), ("master", 1.01)):
        with FrameWriter(tmp_path / name, schema, sync=False) as writer:
            writer.write("w", numbers * np.float32(factor))
    base, link = tmp_path / "base", tmp_path / "link"
    tracemalloc.start()
    try:
        write_link(base, tmp_path / "master", schema, (link, tmp_path / "published"), PLAIN)
        follow_link(base, link, schema, tmp_path / "next", PLAIN)
        inspect(link, schema, INT8)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 4 << 20  # the tensor has 16 MiB
