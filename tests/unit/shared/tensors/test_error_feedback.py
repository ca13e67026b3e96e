"""Error feedback: what a codec could not say is not lost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import InvalidFrame
from shared.tensors.frame import open_frame
from shared.tensors.quantize import codec, residual_schema
from shared.tensors.update import CodecInput
from tests.support.examples import examples
from tests.support.tensor_samples import EACH, MODEL, model, vector

LEFT = residual_schema(MODEL)


@EACH
@settings(deadline=None, max_examples=examples(15))
@given(seeds=st.lists(st.integers(0, 99), min_size=1, max_size=6))
def test_with_error_feedback_what_was_sent_and_what_is_left_are_what_was_learned(
    tmp_path_factory: pytest.TempPathFactory, name: str, seeds: list[int]
) -> None:
    folder, chosen = tmp_path_factory.mktemp("ef"), codec(name)
    due = np.zeros((7, 300))  # what decays is lost
    residual: dict[str, np.ndarray] = {}
    for seed in seeds:
        tensors = model(seed)
        encoded = chosen.encode(tensors, MODEL, folder / "u", residual)
        due = chosen.decay * due + tensors["w"]
        sent = chosen.decode(folder / "u", MODEL)
        assert encoded.residual is not None
        given_in = CodecInput(sent, encoded.residual, residual, LEFT, chosen.decay)
        assert np.allclose(given_in.read("w", 0, 2100), tensors["w"].reshape(-1), atol=1e-8)
        due -= sent["w"]
        residual = dict(encoded.residual)
        assert set(residual) == {"w", "bn.weight", "head", "none"}
    rounding = 1e-9  # of one sum in float32
    assert np.allclose(residual["w"], due, rtol=0, atol=rounding * len(seeds))


def test_error_feedback_sends_small_coordinates_in_the_end(tmp_path: Path) -> None:
    x = np.full(4096, 1e-3, "f4")
    x[::64] = 1.0  # the peaks hide everything else from four bits
    residual: dict[str, np.ndarray] = {}
    sent, plain = np.zeros(4096), np.zeros(4096)
    for _ in range(100):
        encoded = codec("int4").encode({"w": x}, vector(4096), tmp_path / "u", residual)
        sent += codec("int4").decode(tmp_path / "u", vector(4096))["w"]
        residual = dict(encoded.residual or {})
        codec("int4").encode({"w": x}, vector(4096), tmp_path / "u")
        plain += codec("int4").decode(tmp_path / "u", vector(4096))["w"]
    assert plain[1] == 0
    assert sent[1:64] == pytest.approx(0.1, abs=0.08)


@EACH
def test_a_residual_on_disk_goes_on_as_the_one_in_memory(tmp_path: Path, name: str) -> None:
    first = codec(name).encode(model(1), MODEL, tmp_path / "u", {}, tmp_path / "left")
    memory = codec(name).encode(model(1), MODEL, tmp_path / "u", {})
    assert first.residual is not None
    assert memory.residual is not None
    again = open_frame(tmp_path / "left", residual_schema(MODEL))  # as after a restart
    for spec in residual_schema(MODEL):
        assert again[spec.name].tobytes() == memory.residual[spec.name].tobytes()
    on_disk = codec(name).encode(model(2), MODEL, tmp_path / "u", again, tmp_path / "left")
    in_memory = codec(name).encode(model(2), MODEL, tmp_path / "u", memory.residual)
    assert on_disk.sha256 == in_memory.sha256


def test_without_a_residual_none_comes_back(tmp_path: Path) -> None:
    assert codec("int8").encode(model(), MODEL, tmp_path / "u").residual is None


def test_a_residual_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidFrame, match="'w' has the shape"):
        codec("int8").encode(
            model(), MODEL, tmp_path / "u", {"w": np.zeros(3, "f4")}, tmp_path / "left"
        )
    assert list(tmp_path.iterdir()) == []
