"""Datasets of an author's samples: records of one size, sample after sample, in chunks.

A sample is an array or number, or a tuple or dict of them; its fields have the same shapes in every
sample. Two builds of the same samples give the same chunks.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shared.decoding import MALFORMED, decode
from shared.errors import InvalidRunFile
from shared.tensors.spec import RANK_MAX
from shared.workloads.base import ChunkRef, Data, DatasetManifest, DatasetWanted
from shared.workloads.data.pass_order import permutation

KIND = "samples"
FIELDS, MADE_FOR = "fields", "workload"  # keys of a manifest
SAMPLES_MIN = 32
_RECORD_BYTES_MAX = 64 << 20
_CHUNK_SAMPLES = 64  # samples are shuffled across chunks, so small chunks cost a task nothing
_CHUNKS_MAX = 4096  # a manifest must stay small
_TYPES = ("u1", "i1", "i2", "i4", "i8", "f2", "f4", "b1")

Field = tuple[str, str, tuple[int, ...]]  # name, dtype, shape
Fields = tuple[Field, ...]


def fields_of(sample: object) -> Fields:
    """Return the fields of a sample. Raises InvalidRunFile, without the place of the sample."""
    return tuple(
        (name, _dtype(name, value), tuple(value.shape)) for name, value in _parts(sample).items()
    )


def record(sample: object, fields: Fields) -> bytes:
    """Return a sample as bytes. Raises InvalidRunFile if the sample has other fields."""
    actual = fields_of(sample)
    if actual != fields:
        raise InvalidRunFile(
            f"a sample has {_in_words(actual)}, the first has {_in_words(fields)}: give all samples"
            " the same fields and shapes (cut or pad them)"
        )
    parts = _parts(sample)
    return b"".join(parts[name].astype(f"<{dtype}").tobytes() for name, dtype, _ in fields)


def _parts(sample: object) -> dict[str, NDArray[np.generic]]:
    if isinstance(sample, Mapping):
        named = {str(name): value for name, value in sample.items()}
    elif isinstance(sample, tuple | list):
        named = {str(index): value for index, value in enumerate(sample)}
    else:
        named = {"": sample}
    return {name: np.asarray(value) for name, value in named.items()}


def _dtype(name: str, value: NDArray[np.generic]) -> str:
    kind = value.dtype.str[1:].replace("f8", "f4").replace("u2", "i4").replace("u4", "i8")
    if kind not in _TYPES or value.ndim > RANK_MAX:
        raise InvalidRunFile(
            f"field {name or 0} of a sample is {value.dtype} with the shape {value.shape}: make it"
            " an array of numbers"
        )
    return kind


def _in_words(fields: Fields) -> str:
    return ", ".join(f"{name or 'a value'} {dtype} {list(shape)}" for name, dtype, shape in fields)


def record_type(fields: Fields) -> np.dtype[np.void]:
    """Return the type of a record, for arrays of records."""
    return np.dtype([(f"f{n}", f"<{dtype}", shape) for n, (_, dtype, shape) in enumerate(fields)])


def read_fields(manifest: DatasetManifest) -> Fields:
    """Return the fields of a dataset. Raises InvalidRunFile."""
    try:
        fields = decode(str(manifest.meta.get(FIELDS, "")), Fields)
    except MALFORMED as error:
        raise InvalidRunFile(f"the dataset {manifest.name} does not say its fields") from error
    size = sum(math.prod(shape) * 8 for _, _, shape in fields)
    fits = all(
        dtype in _TYPES and len(shape) <= RANK_MAX and min(shape, default=0) >= 0
        for _, dtype, shape in fields
    )
    if not fits or not 0 < size <= 8 * _RECORD_BYTES_MAX:
        raise InvalidRunFile(f"the fields of the dataset {manifest.name} make no samples")
    return fields


def counts_of(manifest: DatasetManifest) -> list[int]:
    """Return the samples of each chunk. Raises InvalidRunFile for a chunk of another size."""
    if FIELDS not in manifest.meta:  # the imagined dataset of a simulation
        return [chunk.items for chunk in manifest.chunks]
    size = record_type(read_fields(manifest)).itemsize
    for index, chunk in enumerate(manifest.chunks):
        if chunk.items < 0 or chunk.size != chunk.items * size:
            raise InvalidRunFile(
                f"chunk {index} of {manifest.name} has {chunk.size} bytes, but {chunk.items}"
                f" samples have {chunk.items * size}"
            )
    return [chunk.items for chunk in manifest.chunks]


class Records:
    """Samples of a dataset, each (chunk, number in the chunk), from memory-mapped chunks."""

    def __init__(self, data: Data, rows: NDArray[np.int64]) -> None:
        self._data = data
        self._rows = rows
        self._fields = read_fields(data.manifest)
        self._counts = counts_of(data.manifest)
        self._open: dict[int, NDArray[np.void]] = {}

    def read(self, start: int, stop: int) -> dict[str, NDArray[np.generic]]:
        """Return samples [start, stop), stacked, by field. Raises InvalidRunFile."""
        kind = record_type(self._fields)
        out = np.empty(stop - start, kind)
        for place, (chunk, sample) in zip(
            range(len(out)), self._rows[start:stop].tolist(), strict=True
        ):
            out[place] = self._chunk(chunk)[sample]
        return {name: out[f"f{n}"] for n, (name, _, _) in enumerate(self._fields)}

    def _chunk(self, index: int) -> NDArray[np.void]:
        records = self._open.get(index)
        if records is None:
            path, kind = self._data.chunk(index), record_type(self._fields)
            expected = self._counts[index] * kind.itemsize
            if path.stat().st_size != expected:
                raise InvalidRunFile(
                    f"chunk {index} of {self._data.manifest.name} has {path.stat().st_size} bytes,"
                    f" not {expected}"
                )
            records = self._open[index] = np.memmap(path, kind, "r", shape=(self._counts[index],))
        return records


def build_records(
    request: DatasetWanted,
    spool: Path,
    fields: Fields,
    workload: str,
    put: Callable[[bytes], str],
) -> DatasetManifest:
    """Store the records of a file as a dataset of a workload.

    Copies are dropped; the records with the smallest SHA-256 are held out. Raises InvalidRunFile
    for fewer than 32 different samples.
    """
    kind = record_type(fields)
    count = spool.stat().st_size // kind.itemsize
    records = np.memmap(spool, kind, "r", shape=(count,)) if count else np.empty(0, kind)
    digests = {hashlib.sha256(records[n].tobytes()).digest(): n for n in reversed(range(count))}
    if len(digests) < SAMPLES_MIN:
        raise InvalidRunFile(
            f"{len(digests)} different samples are too few to learn from (at least {SAMPLES_MIN})"
        )
    order = [number for _, number in sorted(digests.items())]
    held_out = max(1, round(request.heldout_share * len(order)))
    train, heldout = order[held_out:], order[:held_out]
    train = [train[place] for place in permutation(len(train), request.seed, 1).tolist()]
    size = max(_CHUNK_SAMPLES, -(-len(train) // _CHUNKS_MAX))

    def stored(numbers: Sequence[int]) -> tuple[ChunkRef, ...]:
        parts = [numbers[start : start + size] for start in range(0, len(numbers), size)]
        blobs = [records[list(part)].tobytes() for part in parts]
        return tuple(
            ChunkRef(sha256=put(blob), size=len(blob), items=len(part))
            for blob, part in zip(blobs, parts, strict=True)
        )

    return DatasetManifest(
        name=request.name,
        kind=KIND,
        licence=request.licence,
        source=request.source,
        chunks=stored(train),
        heldout=stored(heldout),
        meta={
            FIELDS: json.dumps(fields),
            MADE_FOR: workload,
            "samples": len(train),
            "heldout_samples": held_out,
            "copies": count - len(order),
        },
    )
