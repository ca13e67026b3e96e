"""Updates: what a worker hands in, and what is measured of it."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import InvalidFrame
from shared.tensors.codec import CODECS, codec
from shared.tensors.frame import frame_bytes, open_frame
from shared.tensors.quantize import sum_squares
from shared.tensors.slices import bf16_from_float, float_from_bf16
from shared.tensors.spec import CHUNK_ELEMENTS, Schema, TensorSpec
from shared.tensors.update import Delta, inspect
from tests.support.examples import examples

MODEL: Schema = (
    TensorSpec("w", (40, 30)),
    TensorSpec("mean", (6,), "F32", "buffer"),
    TensorSpec("steps", (), "I64", "counter"),
    TensorSpec("bias", (9,)),
)
MEAN = TensorSpec("mean", (2,), "F32", "buffer")
EACH = pytest.mark.parametrize("name", list(CODECS))


def weights(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    found = {s.name: rng.standard_normal(s.shape).astype("f4") for s in MODEL}
    return found | {"steps": np.array(seed)}


def write(path: Path, tensors: dict[str, np.ndarray], schema: Schema = MODEL) -> Path:
    """A float32 update as a hostile volunteer could write it: nothing is checked."""
    wire = codec("float32").wire_schema(schema)
    path.write_bytes(frame_bytes(tensors, None, wire))
    return path


def test_a_delta_is_base_minus_local_and_carries_the_rest(tmp_path: Path) -> None:
    base, local = weights(1), weights(2)
    found = Delta(base, local, MODEL)
    assert list(found) == ["w", "mean", "steps", "bias"]
    assert found["w"].tobytes() == (base["w"] - local["w"]).tobytes()
    assert found["mean"].tobytes() == local["mean"].tobytes()
    assert int(found["steps"]) == 2
    assert found.read("w", 7, 11).tolist() == (base["w"] - local["w"]).reshape(-1)[7:11].tolist()
    (tmp_path / "base").write_bytes(frame_bytes(base, None, MODEL))
    with open_frame(tmp_path / "base", MODEL) as frame:
        mapped = codec("int8").encode(Delta(frame, local, MODEL), MODEL, tmp_path / "u")
    assert mapped.sha256 == codec("int8").encode(dict(found), MODEL, tmp_path / "v").sha256


def test_a_delta_takes_torch_tensors_and_bfloat16_bases() -> None:
    import torch

    schema = (TensorSpec("w", (2, 2), "BF16"),)
    base = np.array([[1.5, 2.0], [3.0, -4.0]], "f4")
    local = torch.tensor([[1.0, 1.0], [1.0, 1.0]]).t()
    found = Delta({"w": bf16_from_float(base)}, {"w": local}, schema)
    assert found["w"].tolist() == [[0.5, 1.0], [2.0, -5.0]]
    assert float_from_bf16(bf16_from_float(base)).tolist() == base.tolist()


def test_a_delta_between_different_models_is_refused() -> None:
    other = weights(2) | {"w": np.zeros((30, 40), "f4")}
    with pytest.raises(InvalidFrame, match="'w' has the shape"):
        Delta(weights(1), other, MODEL)["w"]


@EACH
@settings(deadline=None, max_examples=examples(15))
@given(seed=st.integers(0, 2**32), scale=st.sampled_from([1e-30, 1e-6, 1.0, 1e18, 1e30]))
def test_encoding_finds_the_hash_and_one_pass_the_norms(
    tmp_path_factory: pytest.TempPathFactory, name: str, seed: int, scale: float
) -> None:
    path = tmp_path_factory.mktemp("u") / "u"
    tensors = weights(seed)
    for found in ("w", "bias", "mean"):
        tensors[found] = (tensors[found] * scale).astype("f4")
    encoded = codec(name).encode(tensors, MODEL, path)
    stats = inspect(path, MODEL, codec(name))
    assert encoded.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert encoded.size == path.stat().st_size
    assert stats.finite
    with codec(name).decode(path, MODEL) as update:
        expected = {
            key: math.sqrt((update[key].astype("f8") ** 2).sum()) for key in ("w", "mean", "bias")
        }
    assert stats.norms == pytest.approx(expected, rel=1e-12)
    assert stats.norm == pytest.approx(math.hypot(expected["w"], expected["bias"]), rel=1e-12)
    assert stats.norm > 0


def test_buffers_do_not_count_into_the_norm(tmp_path: Path) -> None:
    tensors = {s.name: np.zeros(s.shape, "f4") for s in MODEL} | {"steps": np.array(5)}
    tensors["mean"] += 3
    stats = inspect(write(tmp_path / "u", tensors), MODEL, codec("float32"))
    assert (stats.norm, stats.finite) == (0.0, True)
    assert stats.norms["mean"] == pytest.approx(3 * math.sqrt(6))


@EACH
def test_an_unchanged_base_is_an_empty_update(tmp_path: Path, name: str) -> None:
    codec(name).encode(Delta(weights(1), weights(1), MODEL), MODEL, tmp_path / "u")
    assert inspect(tmp_path / "u", MODEL, codec(name)).norm == 0


@pytest.mark.parametrize("tensor", ["w", "bias", "mean"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_tensor_that_is_not_finite_is_found(tmp_path: Path, tensor: str, value: float) -> None:
    tensors = weights(0)
    tensors[tensor].reshape(-1)[[3, 5]] = value
    stats = inspect(write(tmp_path / "u", tensors), MODEL, codec("float32"))
    assert not stats.finite
    assert math.isfinite(stats.norm) == (tensor == "mean")


def test_the_largest_numbers_are_finite(tmp_path: Path) -> None:
    schema = (TensorSpec("w", (200_000,)),)
    big = np.full(200_000, -3.4028235e38, "f4")
    stats = inspect(write(tmp_path / "u", {"w": big}, schema), schema, codec("float32"))
    assert stats.finite
    assert stats.norm == pytest.approx(3.4028235e38 * math.sqrt(200_000))


def test_a_scale_that_makes_infinities_is_found(tmp_path: Path) -> None:
    schema = (TensorSpec("w", (300,)),)
    wire = codec("int8").wire_schema(schema)
    hostile = {"w": np.full(300, 100, "i1"), "w#scale": np.array([0x7F7F, 0], np.uint16)}
    (tmp_path / "u").write_bytes(frame_bytes(hostile, None, wire))
    assert not inspect(tmp_path / "u", schema, codec("int8")).finite


def test_any_order_of_the_file_gives_the_same_numbers(tmp_path: Path) -> None:
    tensors = weights(4)
    ours = inspect(write(tmp_path / "ours", tensors), MODEL, codec("float32"))
    (tmp_path / "theirs").write_bytes(safetensors.numpy.save(tensors))
    theirs = inspect(tmp_path / "theirs", MODEL, codec("float32"))
    assert (theirs.norm, theirs.norms) == (ours.norm, ours.norms)


def test_a_tensor_longer_than_the_grid_is_measured_whole(tmp_path: Path) -> None:
    schema = (TensorSpec("w", (CHUNK_ELEMENTS + 100_001,)),)
    x = np.random.default_rng(0).standard_normal(CHUNK_ELEMENTS + 100_001, "f4")
    codec("float32").encode({"w": x}, schema, tmp_path / "u")
    stats = inspect(tmp_path / "u", schema, codec("float32"))
    assert stats.norm == pytest.approx(np.linalg.norm(x.astype("f8")), rel=1e-13)
    data = np.memmap(tmp_path / "u", np.uint8, "r+")
    data[-1:], data[-2:-1] = 0x7F, 0xC0
    data.flush()
    assert not inspect(tmp_path / "u", schema, codec("float32")).finite


def test_the_sum_of_squares_is_pinned() -> None:
    """The same bits on every machine: merges and checks depend on it."""
    x = (np.arange(150_000, dtype="f4") % 1009 - 504) / np.float32(7)
    assert sum_squares(x).hex() == "0x1.eee1e835da130p+27"
    assert sum_squares(x) == pytest.approx(math.fsum(float(v) ** 2 for v in x), rel=1e-15)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_the_norm_of_blocks_is_exact(tmp_path: Path, name: str) -> None:
    """Codes are whole numbers and scales have eight digits: nothing is rounded before the sum of
    the blocks.
    """
    schema = (TensorSpec("w", (3 * 65_536 + 777,)),)
    x = np.random.default_rng(5).standard_normal(schema[0].count, "f4") * np.float32(1e-5)
    x[:3000] = 0
    codec(name).encode({"w": x}, schema, tmp_path / "u")
    with codec(name).decode(tmp_path / "u", schema) as update:
        exact = math.fsum(float(v) ** 2 for v in update["w"])  # each product rounded to float32
    found = inspect(tmp_path / "u", schema, codec(name)).norm
    assert found**2 == pytest.approx(exact, rel=1e-7)


@EACH
def test_a_cut_update_is_refused(tmp_path: Path, name: str) -> None:
    codec(name).encode(weights(0), MODEL, tmp_path / "u")
    data = (tmp_path / "u").read_bytes()
    for length in (0, 7, 100, len(data) - 1):
        (tmp_path / "u").write_bytes(data[:length])
        with pytest.raises(InvalidFrame):
            inspect(tmp_path / "u", MODEL, codec(name))


def variances(**values: list[float]) -> tuple[Schema, dict[str, np.ndarray]]:
    """Buffers with these values, all of a model."""
    schema = tuple(TensorSpec(name, (len(each),), "F32", "buffer") for name, each in values.items())
    return schema, {name: np.array(each, "f4") for name, each in values.items()}


@pytest.mark.parametrize(
    ("values", "negative"),
    [
        ({"a_running_var": [1.0, 0.0], "b_running_var": [2.0, 3.0]}, ""),
        ({"a_running_var": [1.0, 0.0], "b_running_var": [2.0, -1e-9]}, "b_running_var"),
        ({"a_running_var": [-1.0, 5.0], "b_running_var": [2.0, -3.0]}, "a_running_var"),
        ({"a_running_mean": [-1.0, -5.0], "b_running_var": [2.0, 0.5]}, ""),
        ({"a_running_var": [], "b_running_var": [2.0, -3.0]}, "b_running_var"),
    ],
)
def test_the_first_variance_below_zero_is_named(
    tmp_path: Path, values: dict[str, list[float]], negative: str
) -> None:
    schema, tensors = variances(**values)
    path = write(tmp_path / "update", tensors, schema)
    assert inspect(path, schema, codec("float32")).negative == negative


def test_a_parameter_that_is_called_a_variance_may_be_negative(tmp_path: Path) -> None:
    schema = (TensorSpec("running_var", (2,)),)
    path = write(tmp_path / "update", {"running_var": np.array([-1.0, -2.0], "f4")}, schema)
    assert inspect(path, schema, codec("float32")).negative == ""


def test_a_variance_beyond_the_grid_is_looked_at(tmp_path: Path) -> None:
    values = [1.0] * CHUNK_ELEMENTS + [-1.0]
    schema, tensors = variances(running_var=values)
    path = write(tmp_path / "update", tensors, schema)
    assert inspect(path, schema, codec("float32")).negative == "running_var"
