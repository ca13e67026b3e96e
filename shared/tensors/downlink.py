"""Downlink of weights to volunteers: links, each of which turns one version's published weights
into the next one's.

    published(n) = published(n - 1) - Q(published(n - 1) - master(n)),   rounded to bfloat16 where n has a snapshot

A link has the form of a volunteer's update: Q is a codec; buffers and counters are the master's. Q
needs no residual, because the next difference is taken from the published weights again. The
coordinator derives the published weights from the link while writing it, so everyone who applies
the link gets the same bytes. Published files have no metadata, so equal weights have equal hashes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Set
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shared.errors import InvalidFrame
from shared.proofs.signing import canonical, digest
from shared.tensors.codec import Codec, EncodedUpdate, naming_tensor
from shared.tensors.frame import NUMPY, FrameWriter, WrittenFile, open_frame, schema_of_file
from shared.tensors.quantize import SCALE, SPAN, refuse_nonfinite
from shared.tensors.slices import (
    F32,
    Array,
    ArrayReader,
    SliceReader,
    aligned,
    bf16_from_float,
    float_from_bf16,
)
from shared.tensors.spec import (
    INTEGERS,
    MOMENTUM,
    WALK_ELEMENTS,
    Role,
    Schema,
    TensorSpec,
    grid,
)
from shared.tensors.update import Delta


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """Settings for the writing or the application of a link."""

    codec: Codec
    rounded: bool  # True: the resulting weights are rounded to bfloat16
    sync: bool = False  # True: the resulting file survives a power cut


def write_link(
    base: Path, master: Path, schema: Schema, files: tuple[Path, Path], how: LinkSettings
) -> tuple[EncodedUpdate, WrittenFile]:
    """Write the link from the published weights `base` towards the master weights, and the
    published weights that result from it; return the hashes and sizes of both.

    `files` are the paths of the link and of the resulting weights. Raises InvalidFrame,
    StorageFull, OSError.
    """
    link, path = files
    with ExitStack() as stack:
        old = stack.enter_context(open_frame(base, schema))
        new = stack.enter_context(open_frame(master, schema))
        writer = stack.enter_context(FrameWriter(path, schema, sync=how.sync))
        published = _PublishedFile(schema, writer, how.rounded)
        before, after = ArrayReader(old, schema), ArrayReader(new, schema)

        def echo(spec: TensorSpec, start: int, decoded: F32) -> None:
            published.carry(after, until=spec.name)
            published.put(spec, before.read(spec.name, start, start + decoded.size), minus=decoded)

        encoded = how.codec.encode(Delta(old, new, schema), schema, link, echo=echo)
        published.carry(after)
        return encoded, writer.close()


def follow_link(
    base: Path, link: Path, schema: Schema, path: Path, how: LinkSettings
) -> WrittenFile:
    """Apply a link to the published weights `base`; write the resulting ones to `path`. Raises
    InvalidFrame, StorageFull, OSError.
    """
    with ExitStack() as files:
        old = ArrayReader(files.enter_context(open_frame(base, schema)), schema)
        step = files.enter_context(how.codec.decode(link, schema))
        writer = files.enter_context(FrameWriter(path, schema, sync=how.sync))
        published = _PublishedFile(schema, writer, how.rounded)
        room = aligned(SPAN)
        for spec in schema:
            if spec.is_encoded:
                published.carry(step, until=spec.name)
                for start, stop in grid(spec.count, SPAN):
                    decoded = step.read(spec.name, start, stop, room)
                    published.put(spec, old.read(spec.name, start, stop), minus=decoded)
        published.carry(step)
        return writer.close()


def round_weights(master: Path, schema: Schema, path: Path) -> WrittenFile:
    """Write the published weights of a version without a base: the master's, rounded to bfloat16.
    Return the hash and size of the file.

    Raises InvalidFrame, StorageFull, OSError.
    """
    with ExitStack() as files:
        source = ArrayReader(files.enter_context(open_frame(master, schema)), schema)
        writer = files.enter_context(FrameWriter(path, schema, sync=False))
        published = _PublishedFile(schema, writer, True)
        for spec in schema:
            if spec.is_encoded:
                published.carry(source, until=spec.name)
                for start, stop in grid(spec.count, SPAN):
                    published.put(spec, source.read(spec.name, start, stop))
        published.carry(source)
        return writer.close()


def schema_of_link(base: Path, link: Path, sha256: str) -> Schema:
    """Return the schema of the weights `base`, checked against its SHA-256 in a signed manifest.

    The header of a file has no roles: parameters and momenta, which their names tell apart, are the
    tensors that the link quantises, counters the tensors of integers, buffers all other tensors.
    Raises InvalidFrame, OSError.
    """
    scaled = {spec.name for spec in schema_of_file(link) if spec.name.endswith(SCALE)}
    schema = tuple(_with_role(spec, scaled) for spec in schema_of_file(base))
    if digest(canonical(schema)) != sha256:
        raise InvalidFrame("a link and its base are of another model than the manifest says")
    return schema


def _with_role(spec: TensorSpec, scaled: Set[str]) -> TensorSpec:
    role: Role = "counter" if spec.dtype in INTEGERS else "buffer"
    if spec.name + SCALE in scaled:
        role = "momentum" if spec.name.startswith(MOMENTUM) else "parameter"
    return TensorSpec(spec.name, spec.shape, spec.dtype, role)


class _PublishedFile:
    """Published weights being written to a file, in the order of the schema."""

    def __init__(self, schema: Schema, writer: FrameWriter, rounded: bool) -> None:
        self._left = deque(schema)
        self._writer = writer
        self._rounded = rounded

    def carry(self, source: SliceReader, until: str | None = None) -> None:
        """Write buffers and counters up to the parameter `until`, or the end. Raises as `put`."""
        while self._left and self._left[0].name != until:
            spec = self._left.popleft()
            if not spec.is_encoded:
                for start, stop in grid(spec.count, WALK_ELEMENTS):
                    self._write(spec, source.read(spec.name, start, stop))

    def put(self, spec: TensorSpec, numbers: F32, minus: F32 | None = None) -> None:
        """Write a piece of a parameter. Raises InvalidFrame, StorageFull, OSError."""
        plain = spec.dtype == "F32"
        count = numbers.size
        into = self._writer.room(spec.name, count) if plain else np.empty(count, np.float32)
        if minus is None:
            np.copyto(into, numbers)
        else:
            with np.errstate(over="ignore", invalid="ignore"):  # checked below
                np.subtract(numbers, minus, out=into)
        with naming_tensor(spec.name):
            refuse_nonfinite(into)
        if self._rounded and plain:
            float_from_bf16(bf16_from_float(into), into)
        if not plain:
            self._write(spec, into)

    def _write(self, spec: TensorSpec, values: Array) -> None:
        if spec.dtype == "BF16":
            self._writer.write(spec.name, bf16_from_float(values))
        else:
            self._writer.write(spec.name, values.astype(NUMPY[spec.dtype], copy=False))
