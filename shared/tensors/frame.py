"""Tensor files: memory-mapped for reading after strict checks, written once and hashed meanwhile.

BF16 tensors appear as uint16 arrays, because numpy has no such type; `slices.to_float32` turns them
into numbers.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn, Self

import msgspec
import numpy as np
from typing_extensions import override

from shared.errors import InvalidFrame
from shared.files.deletions import delete_file
from shared.files.disk_writes import PARTIAL_SUFFIX, full_disk_errors, sync_directory
from shared.tensors.header import (
    HEADER_BYTES_MAX,
    LENGTH_BYTES,
    Header,
    check_header,
    header_length,
    header_limit,
    parse_header,
    render_header,
)
from shared.tensors.slices import Array, SchemaTensors
from shared.tensors.spec import Schema, TensorSpec, nbytes
from shared.tensors.writer import Sink

if TYPE_CHECKING:
    import torch

NUMPY: dict[str, np.dtype[Any]] = {
    name: np.dtype(code)
    for name, code in {
        "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "F16": "<f2", "BF16": "<u2",
        "U32": "<u4", "I32": "<i4", "F32": "<f4", "U64": "<u8", "I64": "<i8", "F64": "<f8",
    }.items()
}  # fmt: skip
_SAFETENSORS = {dtype: name for name, dtype in NUMPY.items() if name != "BF16"}


class Frame(SchemaTensors):
    """Tensors of one file, as views into it, in the order of the schema.

    The file must not be cut short while the frame is open: blobs are immutable.
    """

    def __init__(self, buffer: mmap.mmap | bytes, header: Header, schema: Schema) -> None:
        super().__init__(schema)
        self.metadata = header.metadata
        self.size = len(buffer)  # bytes of the whole file
        self._buffer = buffer
        self._header = header

    def array(self, name: str) -> Array:
        """Return one tensor with its shape, without a copy; read-only unless opened
        `copy_on_write`.
        """
        spec = self._specs[name]
        dtype = NUMPY[spec.dtype]
        if spec.count == 0:
            return np.empty(spec.shape, dtype)
        flat: Array = np.frombuffer(self._buffer, dtype, spec.count, self.span(name)[0])
        return flat.reshape(spec.shape)

    def span(self, name: str) -> tuple[int, int]:
        """Return the offsets of a tensor's first byte in the file and of the byte after its
        last.
        """
        return self._header.span(name)

    def close(self) -> None:
        """Unmap the file, or let its last array do so."""
        if isinstance(self._buffer, mmap.mmap):
            try:
                self._buffer.close()
            except BufferError:
                self._buffer = b""  # arrays still use the buffer, which is freed with them

    @override
    def __getitem__(self, name: str) -> Array:
        return self.array(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()


def open_frame(path: Path, schema: Schema, *, copy_on_write: bool = False) -> Frame:
    """Map a tensor file after checking its whole header. Raises InvalidFrame, OSError.

    `copy_on_write` gives writable arrays whose changes never reach the file (torch warns about
    read-only ones).
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        header = _read_header(file, size, header_limit(schema))
        check_header(header, schema, size)
        access = mmap.ACCESS_COPY if copy_on_write else mmap.ACCESS_READ
        return Frame(mmap.mmap(file.fileno(), size, access=access), header, schema)


def torch_tensors(path: Path, schema: Schema) -> dict[str, torch.Tensor]:
    """Return the tensors of a mapped file, which changes of a tensor never reach. Raises
    InvalidFrame, OSError.
    """
    import torch

    frame = open_frame(path, schema, copy_on_write=True)
    return {name: torch.from_numpy(frame.array(name)) for name in frame}


def read_header(source: Path | BinaryIO | bytes, limit: int = HEADER_BYTES_MAX) -> Header:
    """Return the header of a file, or of bytes that begin one. Raises InvalidFrame, OSError."""
    if isinstance(source, bytes):
        length = header_length(source[:LENGTH_BYTES], len(source), limit)
        return parse_header(source[LENGTH_BYTES : LENGTH_BYTES + length])
    if not isinstance(source, Path):
        return _read_header(source, os.fstat(source.fileno()).st_size, limit)
    with source.open("rb") as file:
        return read_header(file, limit)


def _read_header(file: BinaryIO, size: int, limit: int) -> Header:
    length = header_length(file.read(LENGTH_BYTES), size, limit)
    return parse_header(file.read(length))


class WrittenFile(msgspec.Struct, frozen=True, kw_only=True):
    """Hash and size of a finished file."""

    sha256: str
    size: int  # bytes


class FrameWriter:
    """Writer of a tensor file, chunk by chunk, with the tensors in the order of the schema; a
    context manager.

    The file gets its name only when it is complete, hashed and with `sync` synced; a failure leaves
    no file behind. Raises InvalidFrame for data that does not fit the schema, StorageFull, OSError.
    """

    def __init__(
        self,
        path: Path,
        schema: Schema,
        metadata: Mapping[str, str] | None = None,
        *,
        sync: bool = True,
    ) -> None:
        header = render_header(schema, metadata)
        self.written: WrittenFile | None = None
        self._path = path
        self._sync = sync
        self._schema = schema
        self._index = 0  # tensor being written
        self._filled = 0  # elements of this tensor written so far
        self._temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL_SUFFIX}")
        self._sink = Sink(self._temporary, len(header) + nbytes(schema), sync=sync)
        self._append(memoryview(header))

    def write(self, name: str, chunk: Array) -> None:
        """Append elements to the tensor `name`; a tensor may come in any number of chunks."""
        if chunk.size == 0:
            return
        dtype = self._take(name, chunk.size)
        if chunk.dtype != dtype:
            self._refuse(
                f"{name!r} is {self._schema[self._index].dtype} and was given {chunk.dtype}"
            )
        self._append(np.ascontiguousarray(chunk).reshape(-1).view(np.uint8).data)

    def room(self, name: str, count: int) -> Array:
        """Return the next elements of the tensor `name`, (count,), to be filled before the next
        call.

        Works like `write` without the copy, for at most PIECE_BYTES.
        """
        dtype = self._take(name, count)
        with self._writing():
            room = self._sink.room(count * dtype.itemsize)
        return np.frombuffer(room, dtype)

    def close(self) -> WrittenFile:
        """Finish the file; return its hash and size. Raises InvalidFrame if a tensor is missing."""
        spec = self._current()
        if spec is not None:
            self._refuse(f"{spec.name!r} has {self._filled} of its {spec.count} elements")
        with self._writing():
            sha256 = self._sink.close()
            self._temporary.replace(self._path)
            if self._sync:
                sync_directory(self._path.parent)
        self.written = WrittenFile(sha256=sha256, size=self._sink.size)
        return self.written

    def abort(self) -> None:
        """Remove the partial file; a no-op after `close`."""
        if self.written is None:
            delete_file(self._temporary, "scratch")
            self._sink.abort()

    def _take(self, name: str, count: int) -> np.dtype[Any]:
        """Count `count` elements of a tensor as written; return their type."""
        spec = self._current()
        if spec is None or spec.name != name:
            expected = repr(spec.name) if spec else "nothing more"
            self._refuse(f"{name!r} was written where {expected} was due")
        if self._filled + count > spec.count:
            self._refuse(f"{name!r} was given more than its {spec.count} elements")
        self._filled += count
        return NUMPY[spec.dtype]

    def _current(self) -> TensorSpec | None:
        while self._index < len(self._schema):
            spec = self._schema[self._index]
            if self._filled < spec.count:
                return spec
            self._index, self._filled = self._index + 1, 0
        return None

    def _append(self, data: memoryview) -> None:
        with self._writing():
            self._sink.write(data)

    def _refuse(self, reason: str) -> NoReturn:
        self.abort()
        raise InvalidFrame(reason)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with full_disk_errors(self._path):
            try:
                yield
            except OSError:
                self.abort()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.abort()
        elif self.written is None:
            self.close()


def schema_of(tensors: Mapping[str, Array]) -> Schema:
    """Return the schema of arrays, all as parameters. Raises InvalidFrame for a dtype that
    safetensors lacks.
    """
    specs = []
    for name, array in tensors.items():
        if array.dtype not in _SAFETENSORS:
            raise InvalidFrame(f"{name!r} is {array.dtype}, which a tensor file cannot hold")
        specs.append(TensorSpec(name, tuple(array.shape), _SAFETENSORS[array.dtype]))
    return tuple(specs)


def frame_bytes(
    tensors: Mapping[str, Array],
    metadata: Mapping[str, str] | None = None,
    schema: Schema | None = None,
) -> bytes:
    """Return a small tensor file in memory; BF16 (as uint16) needs the schema. Raises
    InvalidFrame.
    """
    specs = schema_of(tensors) if schema is None else schema
    parts = [render_header(specs, metadata)]
    for spec in specs:
        array = tensors.get(spec.name)
        if array is None or array.shape != spec.shape or array.dtype != NUMPY[spec.dtype]:
            raise InvalidFrame(f"{spec.name!r} is not {spec.dtype} with the shape {spec.shape}")
        parts.append(np.ascontiguousarray(array).tobytes())
    return b"".join(parts)


def schema_of_file(path: Path) -> Schema:
    """Return the schema from the header of one of our own files, with all roles "buffer". Raises
    InvalidFrame, OSError.
    """
    entries = read_header(path).entries
    in_order = sorted(entries.items(), key=lambda item: item[1].data_offsets)
    return tuple(TensorSpec(name, entry.shape, entry.dtype, "buffer") for name, entry in in_order)
