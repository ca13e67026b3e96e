"""Reading of tensors slice by slice, without a whole model in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from shared.errors import InvalidFrame
from shared.tensors.spec import INTEGERS, Schema, by_name

Array: TypeAlias = npt.NDArray[Any]
F32: TypeAlias = npt.NDArray[np.float32]
U16: TypeAlias = npt.NDArray[np.uint16]

LINE = 64  # bytes of a cache line


@runtime_checkable
class SliceReader(Protocol):
    """Source of flat slices of named tensors: float32, and int64 where the schema has integers."""

    def read(self, name: str, start: int, stop: int) -> Array: ...


class SchemaTensors(Mapping[str, Array]):
    """Tensors of a schema by name, in its order."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self._specs = by_name(schema)

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    @override
    def __len__(self) -> int:
        return len(self._specs)


class ArrayReader:
    """Slices of tensors in a mapping: a dict of arrays, a `Frame`, or torch tensors on the CPU.
    Raises InvalidFrame for a tensor that does not fit the schema.
    """

    def __init__(self, tensors: Mapping[str, object], schema: Schema) -> None:
        self._tensors = tensors
        self._specs = by_name(schema)
        self._last: tuple[str, Array] | None = None

    def read(self, name: str, start: int, stop: int) -> Array:
        """Return elements [start, stop) of the flat tensor, as a view if no conversion is
        needed.
        """
        last = self._last  # read once: several threads may share a reader
        if last is None or last[0] != name:
            self._last = last = name, self._flat(name)
        spec, part = self._specs[name], last[1][start:stop]
        return (
            part.astype(np.int64, copy=False)
            if spec.dtype in INTEGERS
            else to_float32(part, spec.dtype)
        )

    def _flat(self, name: str) -> Array:
        if name not in self._tensors:
            raise InvalidFrame(f"the tensor {name!r} is missing")
        array = np.asarray(self._tensors[name])
        spec = self._specs[name]
        if array.shape != spec.shape:
            raise InvalidFrame(
                f"{name!r} has the shape {array.shape}; the schema says {spec.shape}"
            )
        as_bits = spec.dtype == "BF16" and array.dtype == np.uint16
        if (spec.dtype in INTEGERS) != (array.dtype.kind in "biu") and not as_bits:
            raise InvalidFrame(f"{name!r} is {array.dtype}; the schema says {spec.dtype}")
        return array.reshape(-1)


def to_float32(array: Array, dtype: str) -> F32:
    """Return a tensor's numbers as float32. BF16 tensors are uint16 bits in a frame, and already
    float32 in other mappings.
    """
    if dtype == "BF16" and array.dtype == np.uint16:
        return float_from_bf16(array)
    return array.astype(np.float32, copy=False)


def bf16_from_float(numbers: F32) -> U16:
    """Return the bits of numbers rounded to bfloat16, to nearest even. Finite numbers stay finite:
    the largest are rounded down.
    """
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    sign = (bits >> 16).astype(np.uint16) & np.uint16(0x8000)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    rounded = (magnitude + np.uint32(0x7FFF) + ((magnitude >> 16) & np.uint32(1))) >> 16
    finite = np.minimum(rounded, np.uint32(0x7F7F))
    if magnitude.size and magnitude.max() >= 0x7F800000:
        special = np.where(magnitude > 0x7F800000, np.uint32(0x7FC0), np.uint32(0x7F80))
        finite = np.where(magnitude >= 0x7F800000, special, finite)
    result: U16 = finite.astype(np.uint16) | sign
    return result


def float_from_bf16(bits: U16, room: F32 | None = None) -> F32:
    """Return the float32 numbers of bfloat16 bits, the upper halves of float32; they are written
    into the start of `room` if it is given.
    """
    wide = np.empty(bits.shape, np.uint32) if room is None else room[: bits.size].view(np.uint32)
    np.copyto(wide, bits)
    wide <<= 16
    return wide.view(np.float32)


def aligned(*shape: int, dtype: npt.DTypeLike = np.float32) -> Array:
    """Return an empty array that begins on a cache line; numpy's own may halve the speed."""
    kind = np.dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    raw = np.empty(size + LINE, np.uint8)
    first = -raw.ctypes.data % LINE
    return raw[first : first + size].view(kind).reshape(shape)
