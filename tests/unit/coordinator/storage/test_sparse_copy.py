"""Updates of every codec, decoded from those bytes alone that a few pieces need."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from coordinator.aggregation.cohort import pieces
from coordinator.storage.sparse_copy import SparseCopy
from shared.tensors.codec import CODECS, Cut, codec
from shared.tensors.spec import CHUNK_ELEMENTS, Schema, TensorSpec

ROOT = Path(__file__).parents[4]
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


def test_a_copy_that_finds_no_room_has_no_zeros_in_place_of_bytes(tmp_path: Path) -> None:
    """The system writes what fits, and says so only by the count."""
    data, room = b"x" * (4 << 20), 1 << 20
    script = f"""
import resource, signal, sys
from pathlib import Path
from coordinator.storage.blobs import storage_errors
from coordinator.storage.sparse_copy import SparseCopy
from shared.errors import StorageFull
path, data = Path(sys.argv[1]), b"x" * {len(data)}
with SparseCopy(path, {len(data)}, lambda start, stop: data[start:stop]) as file:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, ({room}, {room}))
    try:
        with storage_errors():
            file.fetch({room >> 1}, {len(data)})
    except StorageFull:
        sys.exit(75)
"""
    command = [sys.executable, "-c", script, str(tmp_path / "copy")]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 75


def _hash(values: np.ndarray) -> str:
    return hashlib.sha256(values.tobytes()).hexdigest()
