"""Random numbers fixed by a seed and a name: the same on every machine and for any threads."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray


def normal(name: str, seed: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Return standard normal float32, from a stream of its own for each name (Philox 4x64-10)."""
    stream = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    key = np.array([seed & ((1 << 64) - 1), stream], np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).standard_normal(shape, np.float32)
