"""Files of a shard that come from a store elsewhere: what the merge of the shard reads of them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from coordinator.aggregation.cohort import TensorPiece
from coordinator.merging.shard_files import ShardFiles
from coordinator.storage import sparse_copy
from coordinator.storage.s3 import S3Blobs
from shared.tensors.frame import FrameWriter, open_frame
from shared.tensors.spec import Schema, TensorSpec

WEIGHT, MEAN = TensorSpec("weight", (64,)), TensorSpec("mean", (64,), "F32", "buffer")
SCHEMA: Schema = (WEIGHT, MEAN, TensorSpec("empty", (0, 3), "F32", "buffer"))


class Broken(Exception):
    """An error of the merge of a shard."""


@pytest.mark.parametrize("start", [0, 48])
async def test_a_shard_reads_all_of_a_buffer_and_of_a_parameter_its_piece(
    tmp_path: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch, start: int
) -> None:
    """The largest value of a buffer bounds its change: a version would depend on the shards."""
    monkeypatch.setattr(sparse_copy, "AHEAD_BYTES", 8)
    blobs = S3Blobs(s3_url, tmp_path / "cache")
    values = np.arange(1, 65, dtype=np.float32)
    file = blobs.scratch() / "base"
    with FrameWriter(file, SCHEMA) as writer:
        for spec in SCHEMA:
            writer.write(spec.name, values[: spec.count])
    assert writer.written is not None
    base = writer.written.sha256
    await blobs.put_file(base, file)
    for cached in (tmp_path / "cache").glob(f"**/{base}"):
        cached.unlink()
    own = slice(start, start + 16)
    shard = tuple(
        TensorPiece(spec=spec, start=min(own.start, spec.count), stop=min(own.stop, spec.count))
        for spec in SCHEMA
    )
    recipe: Any = SimpleNamespace(rows=(), state=(), base=SimpleNamespace(master_sha256=base))
    with suppress(Broken), ShardFiles(blobs, recipe, shard, tmp_path / "result") as files:
        path = await files.local(base)
        with open_frame(path, SCHEMA) as frame:
            assert frame.array("mean").tolist() == values.tolist()
            assert frame.array("weight")[own].tolist() == values[own].tolist()
            assert np.count_nonzero(frame.array("weight")) < len(values)  # the rest is not fetched
        raise Broken  # a merge that fails leaves no copy
    assert not path.exists()
