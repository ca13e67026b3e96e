"""Sketches by fixed examples: every machine draws the same places and adds up the same sums."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from shared.tensors.sketch import NUMBERS, STRETCH, audit_sums, draw_places, sketch
from shared.tensors.spec import Schema, TensorSpec

SCHEMA: Schema = (
    TensorSpec("a", (300,)),
    TensorSpec("mean", (900,), "F32", "buffer"),
    TensorSpec("b", (20, 30)),
    TensorSpec("nothing", (0,)),
)
EVERY = (
    ("a", 0, 128),
    ("a", 128, 256),
    ("a", 256, 300),
    ("b", 0, 128),
    ("b", 128, 256),
    ("b", 256, 384),
    ("b", 384, 512),
    ("b", 512, 600),
)


class Counting:
    """An update whose elements are their places, a thousand more in `b`."""

    def read(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        return np.arange(start, stop, dtype=np.float32) + (1000 if name == "b" else 0)


def test_a_secret_draws_the_same_places_and_signs_on_every_machine() -> None:
    found = draw_places(SCHEMA, b"secret", 4)
    assert found.stretches == (EVERY[0], EVERY[1], EVERY[2], EVERY[6])
    assert found.signs.dtype == np.float32
    assert found.signs.shape == (NUMBERS, 3 * STRETCH + 44)
    assert found.signs[0, :12].tolist() == [-1, 1, 1, -1, -1, 1, 1, -1, 1, 1, -1, 1]
    assert float(found.signs.sum()) == -936
    assert draw_places(SCHEMA, b"another", 4).stretches != found.stretches


def test_no_place_is_drawn_twice_and_none_of_a_buffer() -> None:
    assert draw_places(SCHEMA, b"secret", 100).stretches == EVERY
    assert len(draw_places(SCHEMA, b"secret", 1).stretches) == 1
    assert draw_places(SCHEMA[1:2], b"secret", 4).stretches == ()


def test_a_sketch_is_sums_of_elements_with_their_signs() -> None:
    where = draw_places(SCHEMA, b"secret", 4)
    found = sketch(Counting(), where)
    assert found.dtype == np.float32
    assert found.shape == (NUMBERS,)
    assert found[:4].tolist() == [-3128, 3686, -21792, 25712]
    nothing = sketch(Counting(), draw_places((), b"secret", 4))
    assert nothing.dtype == np.float32
    assert nothing.tolist() == [0.0] * NUMBERS


def test_the_sums_of_an_audit_are_those_of_its_seed() -> None:
    assert audit_sums(Counting(), SCHEMA, 7)[:3].tolist() == [41454, 24924, 22272]
    assert audit_sums(Counting(), SCHEMA, 8)[:3].tolist() != [41454, 24924, 22272]


def test_numbers_too_large_to_add_are_no_warning() -> None:
    class Huge:
        def read(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
            return np.full(stop - start, 3e38, np.float32)

    assert not np.isfinite(sketch(Huge(), draw_places(SCHEMA, b"secret", 4))).all()


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_the_angle_between_two_updates_is_kept(share: float) -> None:
    rng = np.random.default_rng(0)
    one = {spec.name: rng.standard_normal(spec.count).astype("f4") for spec in SCHEMA}
    noise = {spec.name: rng.standard_normal(spec.count).astype("f4") for spec in SCHEMA}
    mixed = {name: share * one[name] + (1 - share) * noise[name] for name in one}
    other = {name: values.astype("f4") for name, values in mixed.items()}

    class Update:
        def __init__(self, tensors: dict[str, NDArray[Any]]) -> None:
            self._tensors = tensors

        def read(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
            return self._tensors[name][start:stop]

    def angle(u: NDArray[np.float32], v: NDArray[np.float32]) -> float:
        return float(u @ v / np.linalg.norm(u) / np.linalg.norm(v))

    where = draw_places(SCHEMA, b"secret", 8)
    whole = [np.concatenate([each["a"], each["b"]]) for each in (one, other)]
    kept = angle(sketch(Update(one), where), sketch(Update(other), where))
    assert kept == pytest.approx(angle(*whole), abs=0.1)
