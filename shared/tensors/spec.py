"""Schema of a set of tensors: names, shapes, dtypes and roles, in canonical order.

The schema is known before any tensor arrives, and every tensor is checked against it. This module
imports neither numpy nor torch, so wire messages and command line modules may import it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod
from typing import Literal, TypeAlias

import msgspec

from shared.errors import InvalidFrame

Role: TypeAlias = Literal["parameter", "momentum", "buffer", "counter"]

MOMENTUM = "momentum/"  # begins the name of a parameter's momentum

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
INTEGERS = frozenset({"BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"})

NAME_CHARS_MAX = 256
RANK_MAX = 8
TENSOR_BYTES_MAX = 1 << 44  # 16 TiB: more than any model has; a float64 holds every offset exactly
CHUNK_ELEMENTS = 1 << 22  # elements of a chunk of the fixed grid: a multiple of every block size
WALK_ELEMENTS = 1 << 17  # elements of a finer grid, for work whose result does not depend on it


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor; `dtype` is safetensors' name of the type.

    Parameters are trained; momenta of their optimiser, buffers (batch-norm statistics) and counters
    (steps seen) only accompany them. Raises InvalidFrame for a tensor that no file could hold.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "F32"
    role: Role = "parameter"

    def __post_init__(self) -> None:
        fits = 0 < len(self.name) <= NAME_CHARS_MAX and self.name.isprintable()
        if not fits or self.name == "__metadata__":
            raise InvalidFrame(f"{self.name[:80]!r} cannot be the name of a tensor")
        if self.dtype not in ITEM_BYTES:
            dtypes = ", ".join(ITEM_BYTES)
            raise InvalidFrame(
                f"{self.name!r} has the dtype {self.dtype[:20]!r}; known are {dtypes}"
            )
        if len(self.shape) > RANK_MAX or any(side < 0 for side in self.shape):
            raise InvalidFrame(f"{self.name!r} has an impossible shape")
        if self.nbytes > TENSOR_BYTES_MAX:
            raise InvalidFrame(f"{self.name!r} is larger than any tensor may be")

    @property
    def count(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.count * ITEM_BYTES[self.dtype]

    @property
    def is_encoded(self) -> bool:
        """Return True if an update holds the tensor's change, encoded by a codec, and False if it
        holds the tensor itself.
        """
        return self.role in ("parameter", "momentum")


Schema: TypeAlias = tuple[TensorSpec, ...]


def momenta_of(schema: Schema) -> Schema:
    """Return the momentum of each parameter, for a run that merges and publishes them."""
    return tuple(
        TensorSpec(MOMENTUM + spec.name, spec.shape, role="momentum")
        for spec in schema
        if spec.role == "parameter"
    )


def parameters(schema: Schema) -> int:
    """Return the number of a model's parameters."""
    return sum(spec.count for spec in schema if spec.role == "parameter")


def nbytes(schema: Schema) -> int:
    """Return the bytes of all tensors, without a header."""
    return sum(spec.nbytes for spec in schema)


def streamed_nbytes(schema: Schema) -> int:
    """Return the bytes of the tensors outside blocks and of the largest block. The name of a tensor
    in a block has the block's number.
    """
    sizes: Counter[str] = Counter()
    for spec in schema:
        block = next((part for part in spec.name.split(".") if part.isdigit()), "")
        sizes[block] += spec.nbytes
    outside = sizes.pop("", 0)
    return outside + max(sizes.values(), default=0)


def by_name(schema: Schema) -> dict[str, TensorSpec]:
    """Return the schema by name. Raises InvalidFrame when two tensors share a name."""
    specs = {spec.name: spec for spec in schema}
    if len(specs) != len(schema):
        names = [spec.name for spec in schema]
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidFrame(f"the schema names the tensor {twice!r} twice")
    return specs


def grid(elements: int, step: int = CHUNK_ELEMENTS) -> Iterator[tuple[int, int]]:
    """Yield [start, stop) of each chunk of a flat tensor, in order."""
    for start in range(0, elements, step):
        yield start, min(start + step, elements)
