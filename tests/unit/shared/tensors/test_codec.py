"""Codecs: how far a number may move, what is refused, and that nothing is lost over time."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import BadRequest, InvalidFrame
from shared.tensors.codec import CODECS, Codec, codec
from shared.tensors.frame import frame_bytes, open_frame
from shared.tensors.quantize import SPAN, Dither
from shared.tensors.slices import bf16_from_float, float_from_bf16
from shared.tensors.spec import CHUNK_ELEMENTS, TensorSpec
from tests.support.examples import examples
from tests.support.sources import ROOT
from tests.support.tensor_samples import EACH, MODEL, model, numbers, vector

GOLDEN = ROOT / "tests" / "golden"


def bound(name: str, x: np.ndarray) -> np.ndarray:
    """How far each element may be off."""
    if name == "float32":
        return np.zeros_like(x)
    if name == "bf16":  # half a unit in the last of 8 digits
        half: np.ndarray = np.maximum(np.abs(x) * 2.0**-8, 2.0**-134)
        return half
    block, limit = {"int8": (256, 127), "int4": (64, 7)}[name]
    peaks = np.maximum.reduceat(np.abs(x.astype("f8")), np.arange(0, x.size, block))
    # half a step, the scale rounded up by 2^-7; below the smallest normal scale a block is zero
    steps = np.maximum(peaks / limit * (0.5 + 2**-8), np.where(peaks / limit < 1.2e-38, peaks, 0))
    edge: np.ndarray = np.repeat(steps * (1 + 1e-5), block)[: x.size]
    return edge


@pytest.mark.parametrize("name", ["float32", "bf16", "int8", "int4"])
@settings(deadline=None, max_examples=examples(120))
@given(x=numbers(), cut=st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_no_number_moves_further_than_half_a_step(
    tmp_path_factory: pytest.TempPathFactory, name: str, x: np.ndarray, cut: tuple[float, float]
) -> None:
    path = tmp_path_factory.mktemp("u") / "u"
    codec(name).encode({"w": x}, vector(x.size), path)
    with codec(name).decode(path, vector(x.size)) as update:
        back = update["w"].copy()
        start, stop = sorted(int(edge * x.size) for edge in cut)
        assert update.read("w", start, stop).tobytes() == back[start:stop].tobytes()
    assert back.dtype == np.float32
    assert (np.abs(back.astype("f8") - x) <= bound(name, x)).all()


@EACH
@pytest.mark.parametrize("seed", [None, 7])
def test_the_largest_numbers_stay_finite(tmp_path: Path, name: str, seed: int | None) -> None:
    most = np.finfo(np.float32).max
    x = np.array([most, -most, 3.4e38, -3.397e38], "f4")
    codec(name).encode({"w": x}, vector(x.size), tmp_path / "u", seed=seed)
    with codec(name).decode(tmp_path / "u", vector(x.size)) as update:
        assert np.isfinite(update["w"]).all()
        assert (np.sign(update["w"]) == np.sign(x)).all()


@EACH
def test_slices_across_chunks_and_spans_agree_with_the_whole(tmp_path: Path, name: str) -> None:
    size = CHUNK_ELEMENTS + 4096 * 3 + 777
    x = (np.random.default_rng(1).standard_normal(size) * 1e-4).astype("f4")
    codec(name).encode({"w": x}, vector(size), tmp_path / "u")
    with codec(name).decode(tmp_path / "u", vector(size)) as update:
        back = update["w"]
        for start, stop in [
            (0, 1),
            (CHUNK_ELEMENTS - 5, CHUNK_ELEMENTS + 9),
            (65_535, 140_001),
            (size - 3, size),
        ]:
            assert update.read("w", start, stop).tobytes() == back[start:stop].tobytes()
        assert (np.abs(back - x) <= bound(name, x)).all()
        del back


@EACH
def test_buffers_and_counters_travel_exactly_with_every_codec(tmp_path: Path, name: str) -> None:
    tensors = model()
    codec(name).encode(tensors, MODEL, tmp_path / "u")
    with codec(name).decode(tmp_path / "u", MODEL) as update:
        assert list(update) == [spec.name for spec in MODEL]
        assert update["bn.mean"].tobytes() == tensors["bn.mean"].tobytes()
        assert update["bn.steps"].dtype == np.int64
        assert int(update["bn.steps"]) == 1 << 60
        assert [update[spec.name].shape for spec in MODEL] == [spec.shape for spec in MODEL]


@EACH
def test_a_block_of_zeros_comes_back_as_zeros(tmp_path: Path, name: str) -> None:
    x = np.zeros(5000, "f4")
    x[300] = 1.0
    codec(name).encode({"w": x}, vector(5000), tmp_path / "u")
    back = codec(name).decode(tmp_path / "u", vector(5000))["w"]
    assert back[300] == pytest.approx(1.0, rel=2**-7)
    assert np.count_nonzero(back) == 1


@pytest.mark.parametrize(("name", "limit"), [("int8", 127), ("int4", 7)])
def test_the_largest_number_of_a_block_never_wraps_round(
    tmp_path: Path, name: str, limit: int
) -> None:
    """The worst scales are those next to a tie of bfloat16."""
    ties = (1 + (np.arange(128) * 2 + 1) * 2.0**-8) * limit
    peaks = np.concatenate([ties * (1 + near * 2.0**-23) for near in range(-3, 4)]).astype("f4")
    x = np.repeat(peaks, 256) * np.tile([1, -1], 128 * peaks.size).astype("f4")
    codec(name).encode({"w": x}, vector(x.size), tmp_path / "u")
    back = codec(name).decode(tmp_path / "u", vector(x.size))["w"]
    assert (np.sign(back) == np.sign(x)).all()
    assert (np.abs(back - x) <= np.abs(x) * (1 + 2.0**-7) / limit / 2 * (1 + 1e-5)).all()


def test_bytes_a_parameter(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal(1_000_000).astype("f4")
    spent = {
        name: found.encode({"w": x}, vector(x.size), tmp_path / name).size / x.size
        for name, found in CODECS.items()
    }
    reach = {"float32": 4.001, "bf16": 2.001, "int8": 1.02, "int4": 0.55}
    assert all(spent[name] <= reach[name] for name in reach), spent


@pytest.mark.parametrize("magnitude", [1e-30, 1e-9, 1e-5, 1.0, 1e30])
def test_small_updates_keep_their_digits(tmp_path: Path, magnitude: float) -> None:
    """float16 scales would lose everything below 1e-5."""
    x = (np.random.default_rng(0).standard_normal(100_000) * magnitude).astype("f4")
    for name, error in [("int8", 0.01), ("int4", 0.12)]:
        codec(name).encode({"w": x}, vector(x.size), tmp_path / "u")
        back = codec(name).decode(tmp_path / "u", vector(x.size))["w"]
        assert np.linalg.norm((back - x) / magnitude) / np.linalg.norm(x / magnitude) < error


@EACH
@pytest.mark.parametrize("tensor", ["w", "bn.mean"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_diverged_update_is_not_even_written(
    tmp_path: Path, name: str, tensor: str, value: float
) -> None:
    tensors = model()
    tensors[tensor].reshape(-1)[-1] = value
    with pytest.raises(InvalidFrame, match=f"'{tensor}': it holds NaN or infinite"):
        codec(name).encode(tensors, MODEL, tmp_path / "u")
    assert list(tmp_path.iterdir()) == []


@EACH
def test_tensors_that_do_not_fit_the_schema_are_refused(tmp_path: Path, name: str) -> None:
    for wrong, reason in (
        ({"w": np.zeros((300, 7), "f4")}, "'w' has the shape"),
        ({"w": np.zeros((7, 300), "i8")}, "'w' is int64"),
        ({"bn.steps": np.array(1.0)}, "'bn.steps' is float64"),
    ):
        with pytest.raises(InvalidFrame, match=reason):
            codec(name).encode(model() | wrong, MODEL, tmp_path / "u")
    missing = model()
    del missing["w"]
    with pytest.raises(InvalidFrame, match="'w' is missing"):
        codec(name).encode(missing, MODEL, tmp_path / "u")


def hostile(path: Path, name: str, change: dict[str, np.ndarray], size: int = 5000) -> Path:
    """An update file with some of its tensors replaced by a hostile volunteer."""
    schema = vector(size)
    codec(name).encode({"w": np.linspace(-1, 1, size, dtype="f4")}, schema, path)
    wire = codec(name).wire_schema(schema)
    with open_frame(path, wire) as frame:
        tensors = {found: array.copy() for found, array in frame.items()}
    path.write_bytes(frame_bytes(tensors | change, None, wire))
    return path


def bf16(values: list[float]) -> np.ndarray:
    return bf16_from_float(np.array(values, "f4"))


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0, -0.0])
@pytest.mark.parametrize(("name", "blocks"), [("int8", 20), ("int4", 79)])
def test_a_scale_that_is_no_positive_number_is_refused(
    tmp_path: Path, name: str, blocks: int, value: float
) -> None:
    scales = bf16([1.0] * (blocks - 1) + [value])
    with codec(name).decode(
        hostile(tmp_path / "u", name, {"w#scale": scales}), vector(5000)
    ) as update:
        update.read("w", 0, 64)  # the first block is sound
        with pytest.raises(InvalidFrame, match=r"'w': .*scale"):
            update.read("w", 0, 5000)


@pytest.mark.parametrize("name", ["int8", "int4"])
@settings(deadline=None, max_examples=examples(60))
@given(noise=st.binary(min_size=1, max_size=40), at=st.floats(0, 1))
def test_noise_in_an_update_is_refused_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, name: str, noise: bytes, at: float
) -> None:
    path = hostile(tmp_path_factory.mktemp("u") / "u", name, {})
    data = bytearray(path.read_bytes())
    place = int(at * (len(data) - len(noise)))
    data[place : place + len(noise)] = noise
    path.write_bytes(data)
    try:
        with codec(name).decode(path, vector(5000)) as update:
            assert update["w"].shape == (5000,)
    except InvalidFrame:
        pass


def test_a_file_of_another_codec_is_refused(tmp_path: Path) -> None:
    codec("int8").encode(model(), MODEL, tmp_path / "u")
    for name in set(CODECS) - {"int8"}:
        with pytest.raises(InvalidFrame):
            codec(name).decode(tmp_path / "u", MODEL)


def test_an_unknown_codec_is_answered_with_the_nearest() -> None:
    with pytest.raises(BadRequest, match='did you mean "int8"'):
        codec("int-8")
    with pytest.raises(BadRequest, match="known: float32, bf16, int8"):
        codec("qqqqqq")


def test_names_that_would_collide_on_the_wire_are_refused() -> None:
    clash = (TensorSpec("w", (1,)), TensorSpec("w#scale", (1,), "BF16", "buffer"))
    with pytest.raises(InvalidFrame, match="twice"):
        codec("int8").wire_schema(clash)


@EACH
def test_the_bytes_of_a_codec_do_not_change(tmp_path: Path, name: str) -> None:
    """Old files must stay readable: rewrite with GOLDEN=write only together with a new codec
    name.
    """
    schema = (
        *vector(150),
        TensorSpec("m", (2,), "F32", "buffer"),
        TensorSpec("n", (), "I64", "counter"),
    )
    wave = (np.sin(np.arange(150) * 0.7) * np.arange(150) * 1e-4).astype("f4")
    tensors = {"w": wave, "m": np.array([0.5, 2], "f4"), "n": np.array(3)}
    found: Codec = codec(name)
    found.encode(tensors, schema, tmp_path / "u")
    data = (tmp_path / "u").read_bytes()
    golden = GOLDEN / f"codec-{name}.hex"
    if os.environ.get("GOLDEN") == "write":
        golden.write_text(data.hex("\n", 32) + "\n")
    assert data == bytes.fromhex(golden.read_text())


def test_bfloat16_rounds_as_the_definition_says() -> None:
    cases = {
        0x3F800000: 0x3F80, 0x3F808000: 0x3F80, 0x3F818000: 0x3F82, 0x3F808001: 0x3F81, 0x80000001: 0x8000,
        0x7F7FFFFF: 0x7F7F, 0xFF7FFFFF: 0xFF7F, 0x7F800000: 0x7F80, 0xFF800000: 0xFF80, 0x7F800001: 0x7FC0,
    }  # fmt: skip
    bits = np.array(list(cases), np.uint32)
    assert bf16_from_float(bits.view("f4")).tolist() == list(cases.values())
    assert float_from_bf16(np.array([0x3F82], np.uint16)).tolist() == [1.015625]


def test_bfloat16_agrees_with_torch() -> None:
    import torch

    x = np.random.default_rng(0).integers(0, 0x7F7F8000, 200_000, np.uint32).view("f4")
    theirs = torch.from_numpy(x).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert bf16_from_float(x).tolist() == theirs.tolist()


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_rounding_by_a_seed_is_unbiased_and_the_same_each_time(tmp_path: Path, name: str) -> None:
    x = np.random.default_rng(0).standard_normal(4096).astype("f4")
    schema, total, rounds = vector(x.size), np.zeros(x.size), 400

    def coded(seed: int) -> np.ndarray:
        codec(name).encode({"w": x}, schema, tmp_path / "u", seed)
        with codec(name).decode(tmp_path / "u", schema) as update:
            return update["w"].copy()

    for seed in range(rounds):
        total += coded(seed)
    assert coded(5).tobytes() == coded(5).tobytes()
    assert coded(5).tobytes() != coded(6).tobytes()
    off = np.abs(coded(5) - x)
    step = {"int8": 127, "int4": 7}[name]
    assert off.max() < np.abs(x).max() / step * (1 + 2**-7)
    # the mean of many seeds lies within five deviations of the number, of which a step is two
    assert np.abs(total / rounds - x).max() < 5 * 0.5 / rounds**0.5 * np.abs(x).max() / step * 1.01


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_any_slice_is_rounded_alone(name: str) -> None:
    x, kernel = np.linspace(-1, 1, 3 * SPAN, dtype="f4"), codec(name).kernel
    whole = kernel.encode(x, Dither(7, "w"))
    start, stop = SPAN + 4096, 2 * SPAN + 512
    part = kernel.encode(x[start:stop], Dither(7, "w", start))
    each = 2 if name == "int4" else 1
    assert part[0].tobytes() == whole[0][start // each : stop // each].tobytes()
    other = kernel.encode(x[start:stop], Dither(7, "v", start))
    assert part[0].tobytes() != other[0].tobytes()
