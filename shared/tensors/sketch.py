"""Sketches of updates: a few hundred numbers that preserve the angle between two updates, by which
an audit compares them.

    places = draw_places(schema, secret, most)   elements, and their signs
    sketch(update, places)                       (D,) float32: sums of M elements with random signs

The elements are short stretches of the parameters, drawn by a secret, so that a cheater does not
know which ones count. If two updates have the cosine 1 - d, the sketches' cosine is off by about
2 d / sqrt(D), an eighth of d.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shared.tensors.spec import Role, Schema

    Floats = NDArray[np.float32]

NUMBERS = 256  # numbers of a sketch, D
STRETCH = 128  # elements of a stretch, which are read together
AUDIT_STRETCHES = 128  # most stretches for the sums of an audit


class Slices(Protocol):
    """Tensor file that is read slice by slice."""

    def read(self, name: str, start: int, stop: int) -> Floats:
        """Return elements [start, stop) of the flattened tensor `name`."""


@dataclass(frozen=True, slots=True)
class Places:
    """Stretches of tensors, of M elements together, and the signs of the elements."""

    stretches: tuple[tuple[str, int, int], ...]  # tensor, first element, element after the last
    signs: Floats  # (D, M), 1 or -1


def draw_places(
    schema: Schema, secret: bytes, most: int, roles: Sequence[Role] = ("parameter",)
) -> Places:
    """Draw at most `most` stretches of the tensors of these roles, and signs for each number of a
    sketch. The same secret gives the same places on every machine.
    """
    parameters = [spec for spec in schema if spec.role in roles and spec.count]
    blocks = np.array([-(-spec.count // STRETCH) for spec in parameters], np.int64)
    ends = np.cumsum(blocks)
    random = np.random.Generator(np.random.Philox(key=_number(secret)))
    total = int(ends[-1]) if len(ends) else 0
    numbers = np.unique(random.integers(0, total, 4 * most)) if total else np.zeros(0, int)
    numbers = np.sort(random.permutation(numbers)[:most])
    stretches = []
    for block in numbers.tolist():
        index = int(np.searchsorted(ends, block, side="right"))
        start = (block - int(ends[index] - blocks[index])) * STRETCH
        spec = parameters[index]
        stretches.append((spec.name, start, min(start + STRETCH, spec.count)))
    size = sum(stop - start for _, start, stop in stretches)
    signs = random.integers(0, 2, (NUMBERS, size), np.int8).astype(np.float32)
    return Places(tuple(stretches), signs * 2 - 1)


def sketch(update: Slices, places: Places) -> Floats:
    """Return the sketch of an update or a version, (D,) float32."""
    parts = [update.read(name, start, stop) for name, start, stop in places.stretches]
    values = np.concatenate(parts) if parts else np.zeros(0, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        projection: Floats = places.signs @ values
    return projection


def audit_sums(update: Slices, schema: Schema, seed: int) -> Floats:
    """Return the sums of an update that an audit compares, (2 D,) float32: of the parameters, then
    of the momenta and buffers.
    """
    halves: tuple[tuple[Role, ...], ...] = (("parameter",), ("momentum", "buffer"))
    secret = seed.to_bytes(8, "big")
    drawn = [draw_places(schema, secret, AUDIT_STRETCHES, roles) for roles in halves]
    return np.concatenate([sketch(update, places) for places in drawn])


def _number(secret: bytes) -> int:
    return int.from_bytes(sha256(b"places" + secret).digest()[:16], "big")
