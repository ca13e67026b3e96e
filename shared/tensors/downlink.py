"""The way of weights down to volunteers: links, each of which turns one version's published weights into the next one's.

    published(n) = published(n - 1) - Q(published(n - 1) - master(n)),   rounded to bfloat16 where n has a snapshot

A link is an update like those that volunteers hand in: Q is a codec, buffers and counters are the master's own. What Q could
not say needs no residual, for the next difference is taken from the published weights again. The coordinator publishes
what it gets by following its own link, so whoever follows it holds the same bits. Published files have no metadata:
equal weights have equal hashes.
"""

from __future__ import annotations

from collections.abc import Set
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shared.errors import InvalidFrame
from shared.signing import canonical, digest
from shared.tensors.blocks import SCALE, refuse_nonfinite
from shared.tensors.frame import NUMPY, FrameWriter, Written, open_frame, schema_of_file
from shared.tensors.quantize import Codec, EncodedUpdate, telling
from shared.tensors.slices import Array, ArrayReader, SliceReader, bf16_from_float, float_from_bf16
from shared.tensors.spec import INTEGERS, WALK_ELEMENTS, Role, Schema, TensorSpec, grid
from shared.tensors.update import delta

LINK_CODEC = "int8"


def write_link(base: Path, master: Path, schema: Schema, path: Path, codec: Codec) -> EncodedUpdate:
    """Write the link from the published weights `base` towards the master weights. Raises InvalidFrame, StorageFull."""
    with open_frame(base, schema) as old, open_frame(master, schema) as new:
        return codec.encode(delta(old, new, schema), schema, path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Following:
    """How a link is followed."""

    codec: Codec
    rounded: bool  # to bfloat16
    sync: bool = False  # whether what comes of it has to survive a power cut


def follow_link(base: Path, link: Path, schema: Schema, path: Path, how: Following) -> Written:
    """Write the published weights that a link leads to. Raises InvalidFrame, StorageFull."""
    with ExitStack() as files:
        old = ArrayReader(files.enter_context(open_frame(base, schema)), schema)
        step = files.enter_context(how.codec.decode(link, schema))
        writer = files.enter_context(FrameWriter(path, schema, sync=how.sync))
        for spec in schema:
            for start, stop in grid(spec.count, WALK_ELEMENTS):
                values = step.read(spec.name, start, stop)
                if spec.role == "parameter":
                    with np.errstate(over="ignore", invalid="ignore"):  # looked at next
                        values = old.read(spec.name, start, stop) - values
                _write(writer, spec, values, how.rounded)
        return writer.close()


def round_weights(master: Path, schema: Schema, path: Path) -> Written:
    """Write the published weights of a version that has none to begin from: the master's, rounded to bfloat16.

    Raises InvalidFrame, StorageFull.
    """
    with ExitStack() as files:
        source: SliceReader = ArrayReader(files.enter_context(open_frame(master, schema)), schema)
        writer = files.enter_context(FrameWriter(path, schema, sync=False))
        for spec in schema:
            for start, stop in grid(spec.count, WALK_ELEMENTS):
                _write(writer, spec, source.read(spec.name, start, stop), True)
        return writer.close()


def schema_of_link(base: Path, link: Path, sha256: str) -> Schema:
    """The schema of two files of our own cache, held against the hash that a signed manifest gives. Raises InvalidFrame.

    Only parameters are quantised, which shows in the link; what else is whole numbers are counters.
    """
    scaled = {spec.name for spec in schema_of_file(link) if spec.name.endswith(SCALE)}
    found = tuple(_with_role(spec, scaled) for spec in schema_of_file(base))
    if digest(canonical(found)) != sha256:
        raise InvalidFrame("a link and its base are of another model than the manifest says")
    return found


def _with_role(spec: TensorSpec, scaled: Set[str]) -> TensorSpec:
    role: Role = "counter" if spec.dtype in INTEGERS else "buffer"
    if spec.name + SCALE in scaled:
        role = "parameter"
    return TensorSpec(spec.name, spec.shape, spec.dtype, role)


def _write(writer: FrameWriter, spec: TensorSpec, values: Array, rounded: bool) -> None:
    if spec.role == "parameter":
        with telling(spec.name):
            refuse_nonfinite(values)
        if rounded and spec.dtype == "F32":
            values = float_from_bf16(bf16_from_float(values))
    if spec.dtype == "BF16":
        writer.write(spec.name, bf16_from_float(values))
    else:
        writer.write(spec.name, values.astype(NUMPY[spec.dtype], copy=False))
