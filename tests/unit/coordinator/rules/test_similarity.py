"""Near copies: found whatever was changed a little, and never where honest updates are alike."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from coordinator.rules.similarity import Known, Suspect, copied
from shared.tensors import quantize, sketch
from shared.tensors.spec import Schema, TensorSpec

SECRET = b"of the server"
SCHEMA: Schema = (
    TensorSpec(name="bias", shape=(70,), dtype="F32", role="parameter"),
    TensorSpec(name="weight", shape=(300, 200), dtype="F32", role="parameter"),
    TensorSpec(name="seen", shape=(), dtype="I64", role="counter"),
)
SIZE = 70 + 300 * 200
Update = NDArray[np.float32]


def update(seed: int, shared: float = 0.7) -> Update:
    """An honest update: a direction that all have in common, and one of its own."""
    common = np.random.default_rng(0).normal(size=SIZE)
    own = np.random.default_rng(1 + seed).normal(size=SIZE)
    mixed = np.sqrt(shared) * common + np.sqrt(1 - shared) * own
    found: Update = mixed.astype(np.float32)
    return found


def file_of(tmp_path: Path, values: Update, codec: str) -> Path:
    path = tmp_path / "update"
    tensors = {"bias": values[:70], "weight": values[70:].reshape(300, 200), "seen": np.array(1)}
    quantize.codec(codec).encode(tensors, SCHEMA, path)
    return path


def sketch_of(tmp_path: Path, values: Update, codec: str = "float32") -> bytes:
    return sketch.of_update(file_of(tmp_path, values, codec), SCHEMA, codec, SECRET).tobytes()


def known(tmp_path: Path, count: int, shared: float = 0.7, base: int = 3) -> list[Known]:
    return [
        Known(
            volunteer=f"v{seed}",
            task=seed,
            base_version=base,
            sketch=sketch_of(tmp_path, update(seed, shared)),
        )
        for seed in range(count)
    ]


def suspect(tmp_path: Path, values: Update, codec: str = "float32", **other: int | str) -> Suspect:
    about = {"volunteer": "me", "task": 100, "base_version": 3} | other
    return Suspect(**about, sketch=sketch_of(tmp_path, values, codec))  # type: ignore[arg-type]


@pytest.mark.parametrize("codec", ["float32", "bf16", "int8", "int4"])
def test_a_copy_is_found_in_another_codec_scaled_and_with_noise(tmp_path: Path, codec: str) -> None:
    others = known(tmp_path, 5)
    noise = np.random.default_rng(9).normal(size=SIZE).astype(np.float32)
    changed = 1.3 * update(2) + np.float32(0.05) * noise
    found = copied(suspect(tmp_path, changed, codec), others, [])
    assert found == "another update of the same version"


@pytest.mark.parametrize("shared", [0.0, 0.5, 0.9, 0.99])
def test_honest_updates_are_no_copies_however_alike_they_are(tmp_path: Path, shared: float) -> None:
    others = known(tmp_path, 30, shared)
    for seed in range(100, 120):
        assert copied(suspect(tmp_path, update(seed, shared)), others, []) == ""


def test_ones_own_last_update_and_a_merge_are_found_again(tmp_path: Path) -> None:
    others = known(tmp_path, 5)
    mine = Known(volunteer="me", task=7, base_version=2, sketch=sketch_of(tmp_path, update(50)))
    again = suspect(tmp_path, update(50))
    assert copied(again, [*others, mine], []) == "one of your own updates before"
    assert copied(again, others, []) == ""
    merge = sketch_of(tmp_path, update(50))
    assert copied(again, others, [merge]) == "what a merge did to the model"


def test_the_same_task_may_come_out_the_same(tmp_path: Path) -> None:
    others = known(tmp_path, 5)
    assert copied(suspect(tmp_path, update(2), task=2), others, []) == ""


def test_alone_only_the_very_same_is_a_copy(tmp_path: Path) -> None:
    others = known(tmp_path, 3)
    near = update(1) + np.float32(0.1) * update(99)
    assert copied(suspect(tmp_path, near), others, []) == ""
    assert copied(suspect(tmp_path, update(1) * np.float32(2)), others, []) != ""


def test_a_sketch_is_linear_and_of_zeros_near_nothing(tmp_path: Path) -> None:
    one, two = update(1), update(2)
    made = [
        np.frombuffer(sketch_of(tmp_path, values), np.float32) for values in (one, two, one - two)
    ]
    np.testing.assert_allclose(made[0] - made[1], made[2], rtol=1e-3, atol=1e-2)
    others = known(tmp_path, 5)
    nothing = Suspect(
        volunteer="me", task=9, base_version=3, sketch=np.zeros(256, np.float32).tobytes()
    )
    assert copied(nothing, others, []) == ""


def test_places_are_a_secret_and_the_same_every_time() -> None:
    assert sketch.places(SCHEMA, b"a").stretches == sketch.places(SCHEMA, b"a").stretches
    assert sketch.places(SCHEMA, b"a").stretches != sketch.places(SCHEMA, b"b").stretches
    small = (TensorSpec(name="x", shape=(3,), dtype="F32", role="parameter"),)
    assert sketch.places(small, b"a").stretches == (("x", 0, 3),)


@pytest.mark.parametrize("codec", ["float32", "int8"])
def test_noise_by_two_of_five_makes_no_honest_update_a_copy(tmp_path: Path, codec: str) -> None:
    """The usual distance was once the median to those that happened to come first."""
    noise = [
        Known(
            volunteer=f"n{seed}",
            task=500 + seed,
            base_version=3,
            sketch=sketch_of(tmp_path, update(900 + seed, 0.0), codec),
        )
        for seed in range(8)
    ]
    others = [*noise, *known(tmp_path, 12, 0.97)]
    for seed in range(100, 110):
        assert copied(suspect(tmp_path, update(seed, 0.97), codec), others, []) == ""
    assert copied(suspect(tmp_path, update(3, 0.97) * np.float32(1.2), codec), others, []) != ""
