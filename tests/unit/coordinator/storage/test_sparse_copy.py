"""Updates of every codec, decoded from those bytes alone that a few pieces need."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from coordinator.aggregation.cohort import pieces
from coordinator.storage.sparse_copy import SparseCopy
from shared.tensors.codec import CODECS, Cut, codec
from shared.tensors.spec import CHUNK_ELEMENTS, Schema, TensorSpec

SCHEMA: Schema = (
    TensorSpec("first", (70, 100)),
    TensorSpec("mean", (300,), "F32", "buffer"),
    TensorSpec("seen", (1,), "I64", "counter"),
    TensorSpec("big", (CHUNK_ELEMENTS + 5001,)),
    TensorSpec("last", (1000, 300)),
)


@pytest.mark.parametrize("name", sorted(CODECS))
@pytest.mark.parametrize("chosen", [(0, 4), (3,), (1, 2, 5)])
def test_a_piece_is_decoded_from_its_own_bytes(
    tmp_path: Path, name: str, chosen: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(7)
    tensors = {
        spec.name: np.array([5], np.int64)
        if spec.role == "counter"
        else rng.standard_normal(spec.shape).astype(np.float32)
        for spec in SCHEMA
    }
    path, copy = tmp_path / "update", tmp_path / "copy"
    codec(name).encode(tensors, SCHEMA, path)
    data, fetched = path.read_bytes(), 0

    def get(start: int, stop: int) -> bytes:
        nonlocal fetched
        fetched += stop - start
        return data[start:stop]

    wanted = [pieces(SCHEMA)[index] for index in chosen]
    cuts = [Cut(piece.spec, piece.start, piece.stop) for piece in wanted]
    with SparseCopy(copy, len(data), get) as file:
        for start, stop in codec(name).spans(file, SCHEMA, cuts):
            file.fetch(start, stop)
    share = sum(piece.size for piece in wanted) / sum(spec.count for spec in SCHEMA)
    assert fetched < 1.05 * share * len(data) + (1 << 19)
    with codec(name).decode(path, SCHEMA) as whole, codec(name).decode(copy, SCHEMA) as part:
        for piece in wanted:
            ends = piece.spec.name, piece.start, piece.stop
            assert _hash(part.read(*ends)) == _hash(whole.read(*ends))


def _hash(values: np.ndarray) -> str:
    return hashlib.sha256(values.tobytes()).hexdigest()
