"""Update of a worker, and its measurement by the coordinator."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from typing_extensions import override

from shared.tensors.codec import Codec, DecodedUpdate
from shared.tensors.slices import Array, ArrayReader, SchemaTensors
from shared.tensors.spec import INTEGERS, Schema, TensorSpec, grid

VARIANCE = "running_var"  # PyTorch's name of a running variance


class Delta(SchemaTensors):
    """Update of local training, computed when it is read: base minus local for parameters and
    momenta, the local values of buffers and counters.
    """

    def __init__(
        self, base: Mapping[str, object], local: Mapping[str, object], schema: Schema
    ) -> None:
        super().__init__(schema)
        self._base = ArrayReader(base, schema)
        self._local = ArrayReader(local, schema)

    def read(self, name: str, start: int, stop: int) -> Array:
        """Return elements [start, stop) of the flat tensor.

        Raises InvalidFrame if a tensor is missing, or its shape or type differs from the schema.
        """
        local = self._local.read(name, start, stop)
        if not self._specs[name].is_encoded:
            return local
        with np.errstate(over="ignore", invalid="ignore"):  # the encoder finds NaN and infinity
            difference: Array = self._base.read(name, start, stop) - local
        return difference

    @override
    def __getitem__(self, name: str) -> Array:
        spec = self._specs[name]
        return self.read(name, 0, spec.count).reshape(spec.shape)


class UpdateStats(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of an update."""

    norm: float  # L2 norm over all parameters
    momentum: float  # L2 norm over all momenta
    norms: dict[str, float]  # L2 norm of each parameter and buffer
    finite: bool
    negative: str = ""  # name of a variance with a value below zero


def inspect(path: Path, schema: Schema, codec: Codec) -> UpdateStats:
    """Measure the norms of an update file, and find numbers that are not finite and variances below
    zero. The caller has checked the file's hash.

    Raises InvalidFrame, OSError when it cannot be read.
    """
    with codec.decode(path, schema) as update:
        squares = dict.fromkeys(update, 0.0)
        floats = [spec for spec in schema if spec.dtype not in INTEGERS]
        for spec in floats:
            for start, stop in grid(spec.count):
                squares[spec.name] += update.square(spec.name, start, stop)
        finite = all(math.isfinite(squares[spec.name]) for spec in floats)
        norms = {
            role: math.sqrt(sum(squares[spec.name] for spec in floats if spec.role == role))
            for role in ("parameter", "momentum")
        }
        return UpdateStats(
            norm=norms["parameter"],
            momentum=norms["momentum"],
            norms={spec.name: math.sqrt(squares[spec.name]) for spec in floats},
            finite=finite,
            negative=_negative(update, floats) if finite else "",
        )


def _negative(update: DecodedUpdate, floats: Sequence[TensorSpec]) -> str:
    """Return the name of the first running variance with a negative value, whose root would be NaN;
    "" if all values are valid.
    """
    for spec in floats:
        if spec.role == "buffer" and spec.name.endswith(VARIANCE):
            parts = (update.read(spec.name, *span) for span in grid(spec.count))
            if any(np.min(part, initial=0) < 0 for part in parts):
                return spec.name
    return ""
