"""Codecs: the wire form of an update, and its reading slice by slice for a merge.

The codec's kernel encodes parameters and momenta. Every codec stores buffers as absolute float32
values and counters as int64. Both come first in the file, where they are aligned.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self, TypeAlias

import numpy as np
from typing_extensions import override

from shared.errors import BadRequest, InvalidFrame
from shared.nearest_name import hint
from shared.tensors.frame import Frame, FrameWriter, open_frame, read_header
from shared.tensors.header import check_header, header_limit
from shared.tensors.quantize import (
    Bfloat16,
    Blocks,
    Dither,
    Float32,
    Kernel,
    refuse_nonfinite,
    sum_squares,
)
from shared.tensors.slices import F32, Array, ArrayReader, SchemaTensors, SliceReader
from shared.tensors.spec import (
    INTEGERS,
    WALK_ELEMENTS,
    Schema,
    TensorSpec,
    by_name,
    grid,
)

Tensors: TypeAlias = Mapping[str, object]
Spans: TypeAlias = Iterator[tuple[int, int]]  # first byte, and the byte after the last
Echo: TypeAlias = Callable[[TensorSpec, int, F32], None]  # parameter, first element, numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedUpdate:
    """Hash and size of a finished update file."""

    sha256: str
    size: int  # bytes


class Cut(NamedTuple):
    """Elements [start, stop) of a flat tensor: a piece of the chunk grid."""

    spec: TensorSpec
    start: int
    stop: int


class DecodedUpdate(SchemaTensors):
    """Update that is decoded when it is read: float32 arrays, int64 for counters."""

    def __init__(self, frame: Frame, schema: Schema, kernel: Kernel) -> None:
        super().__init__(schema)
        self._frame = frame
        self._kernel = kernel
        self._wire: dict[str, Sequence[Array]] = {}  # cached: a merge asks for many small slices

    def read(self, name: str, start: int, stop: int, room: F32 | None = None) -> Array:
        """Return elements [start, stop) of the flat tensor; `room` is optional scratch space.

        Raises InvalidFrame if scales are invalid.
        """
        spec, wire = self._specs[name], self._flat(name)
        if not spec.is_encoded:
            return wire[0][start:stop]
        # a hostile scale gives infinities, which `inspect` reports
        with naming_tensor(name), np.errstate(over="ignore"):
            return self._kernel.decode(wire, spec.count, start, stop, room)

    def square(self, name: str, start: int, stop: int) -> float:
        """Return the squared norm of a slice on the chunk grid, which is finite if all numbers are.
        Raises as `read` does.
        """
        spec = self._specs[name]
        if not spec.is_encoded:
            return sum_squares(self.read(name, start, stop))
        with naming_tensor(name), np.errstate(over="ignore"):
            return self._kernel.square(self._flat(name), spec.count, start, stop)

    def _flat(self, name: str) -> Sequence[Array]:
        """Return a tensor in its wire form, each array flat."""
        if name not in self._wire:
            spec = self._specs[name]
            wire = self._kernel.parts(spec) if spec.is_encoded else (spec,)
            self._wire[name] = [self._frame.array(part.name).reshape(-1) for part in wire]
        return self._wire[name]

    def close(self) -> None:
        self._wire.clear()
        self._frame.close()

    @override
    def __getitem__(self, name: str) -> Array:
        spec = self._specs[name]
        return self.read(name, 0, spec.count).reshape(spec.shape)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Codec:
    """Wire form of updates, with a kernel for parameters."""

    name: str
    kernel: Kernel

    def wire_schema(self, schema: Schema) -> Schema:
        """Return the tensors that a file of this codec must hold, in their order."""
        carried = [_wire_spec(spec) for spec in schema if not spec.is_encoded]
        carried.sort(key=lambda spec: spec.dtype != "I64")
        encoded = [part for spec in schema if spec.is_encoded for part in self.kernel.parts(spec)]
        wire = (*carried, *encoded)
        by_name(wire)
        return wire

    def encode(
        self,
        tensors: Tensors | SliceReader,
        schema: Schema,
        path: Path,
        seed: int | None = None,
        echo: Echo | None = None,
    ) -> EncodedUpdate:
        """Write an update (a mapping of arrays, or a `Delta`) to `path`.

        With a `seed` (the task's) codes are rounded at random, so that their mean is the update;
        without one they are rounded to the nearest. `echo` receives the numbers that a receiver
        will decode, parameter by parameter and piece by piece. Raises InvalidFrame, StorageFull,
        OSError.
        """
        wire, source = self.wire_schema(schema), _reader(tensors, schema)
        with FrameWriter(path, wire, {"codec": self.name}) as writer:
            for spec in wire:
                if not spec.is_encoded:
                    _write_unencoded(spec, source, writer)
            for spec in schema:
                if spec.is_encoded:
                    self._encode(spec, source, writer, seed, echo)
            written = writer.close()
        return EncodedUpdate(sha256=written.sha256, size=written.size)

    def decode(self, path: Path, schema: Schema) -> DecodedUpdate:
        """Open an update after checking its header. Raises InvalidFrame, OSError."""
        return DecodedUpdate(open_frame(path, self.wire_schema(schema)), schema, self.kernel)

    def spans(self, file: BinaryIO, schema: Schema, cuts: Iterable[Cut]) -> Spans:
        """Yield the byte ranges of an update's file that hold these pieces of the chunk grid.

        Raises InvalidFrame.
        """
        wire = self.wire_schema(schema)
        header = read_header(file, header_limit(wire))
        check_header(header, wire, os.fstat(file.fileno()).st_size)
        for spec, start, stop in cuts:
            if not spec.is_encoded:
                yield header.span(spec.name, start, stop)
                continue
            before, behind = (
                self.kernel.parts(TensorSpec(spec.name, (count,))) for count in (start, stop)
            )
            for first, last in zip(before, behind, strict=True):
                yield header.span(first.name, first.count, last.count)

    def _encode(
        self,
        spec: TensorSpec,
        source: SliceReader,
        writer: FrameWriter,
        seed: int | None,
        echo: Echo | None,
    ) -> None:
        names = [part.name for part in self.kernel.parts(spec)]
        # Scales are small: they wait in memory until the codes are written.
        behind: list[tuple[Array, ...]] = []
        for start, stop in grid(spec.count, WALK_ELEMENTS):
            numbers = source.read(spec.name, start, stop)
            dither = None if seed is None else Dither(seed, spec.name, start)
            with naming_tensor(spec.name):
                parts = self.kernel.encode(numbers, dither)
            if echo:
                echo(spec, start, self.kernel.decode(parts, stop - start, 0, stop - start))
            writer.write(names[0], parts[0])
            behind.append(parts[1:])
        for name, pieces in zip(names[1:], zip(*behind, strict=True), strict=False):
            for piece in pieces:
                writer.write(name, piece)


def _wire_spec(spec: TensorSpec) -> TensorSpec:
    """Return the spec of a buffer or a counter in the file."""
    whole = spec.dtype in INTEGERS
    return TensorSpec(spec.name, spec.shape, "I64" if whole else "F32", spec.role)


def _write_unencoded(spec: TensorSpec, source: SliceReader, writer: FrameWriter) -> None:
    for start, stop in grid(spec.count):
        numbers = source.read(spec.name, start, stop)
        with naming_tensor(spec.name):
            refuse_nonfinite(numbers)
        writer.write(spec.name, numbers)


@contextlib.contextmanager
def naming_tensor(name: str) -> Iterator[None]:
    """Add a tensor's name to the message of an InvalidFrame of the block."""
    try:
        yield
    except InvalidFrame as error:
        raise InvalidFrame(f"{name!r}: {error.message}") from error


def _reader(tensors: Tensors | SliceReader, schema: Schema) -> SliceReader:
    return tensors if isinstance(tensors, SliceReader) else ArrayReader(tensors, schema)


CODECS: Mapping[str, Codec] = {
    kind.name: kind
    for kind in (
        Codec("float32", Float32()),
        Codec("bf16", Bfloat16()),
        Codec("int8", Blocks(limit=127, block=256)),
        Codec("int4", Blocks(limit=7, block=64)),
    )
}


def codec(name: str) -> Codec:
    """Return the codec called `name`. Raises BadRequest with the nearest name."""
    kind = CODECS.get(name)
    if kind is None:
        raise BadRequest(f'there is no codec "{name[:40]}": {hint(name, CODECS)}')
    return kind
