"""Small models and vectors that codecs are tried with."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st

from shared.tensors.codec import CODECS
from shared.tensors.spec import Role, Schema, TensorSpec

EACH = pytest.mark.parametrize("name", list(CODECS))

MODEL: Schema = (
    TensorSpec("w", (7, 300)),
    TensorSpec("bn.weight", (5,)),
    TensorSpec("bn.mean", (5,), "F32", "buffer"),
    TensorSpec("bn.steps", (), "I64", "counter"),
    TensorSpec("head", (4, 1), "BF16"),
    TensorSpec("none", (0, 3)),
)


def model(seed: int = 0, scale: float = 1e-3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    found = {s.name: (rng.standard_normal(s.shape) * scale).astype("f4") for s in MODEL}
    return found | {"bn.steps": np.array((1 << 60) + seed)}


def count(schema: Schema, role: Role | None = None) -> int:
    """Return the number of elements of all tensors, or of the tensors with one role."""
    return sum(spec.count for spec in schema if role in (None, spec.role))


def vector(count: int) -> Schema:
    return (TensorSpec("w", (count,)),)


@st.composite
def numbers(draw: st.DrawFn) -> np.ndarray:
    """Updates of any size and magnitude: blocks of zeros, outliers, odd ends."""
    count = draw(st.one_of(st.integers(1, 700), st.sampled_from([4096, 4097, 8191, 70_001])))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    x = rng.standard_normal(count) * 10.0 ** draw(st.integers(-44, 36))
    x[rng.random(count) < draw(st.sampled_from([0.0, 0.5, 0.999]))] = 0
    x[rng.integers(count)] *= draw(st.sampled_from([0, 1, 1000]))
    return np.clip(x, -3.4e38, 3.4e38).astype("f4")
