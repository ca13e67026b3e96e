"""Facts that are derived from an author's code, and the requests that derive them."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import msgspec

from shared.decoding import convert
from shared.errors import InvalidRunFile
from shared.tensors.spec import Role
from shared.workloads.base import Config, DatasetManifest
from shared.workloads.data.image_chunks import images_of
from shared.workloads.data.windows import windows_of
from shared.workloads.derived.model_code import DERIVED
from shared.workloads.derived.sample_records import Fields, counts_of

DataKind = Literal["samples", "images", "tokens"]
BLOCK = "block_size"  # key of `[model]`: tokens of a sample


class CodePlace(NamedTuple):
    """Place of an author's code, "module:name", and the kind of its data."""

    code: str
    data: DataKind


class Derived(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that were derived from an author's code for one config."""

    tensors: tuple[tuple[str, tuple[int, ...], Role], ...]
    flops: float  # FLOPs of a sample, forward and backward
    sample_bytes: int  # bytes that a sample keeps for the backward pass
    # True: the loss of a batch is the mean of its parts' losses; with batch norm it is not
    additive: bool


class TableRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request to check a `[model]` table, and to derive the facts of its config."""

    code: str
    data: DataKind
    table: dict[str, Any]
    manifest: DatasetManifest | None  # without its chunks


class SamplesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request to write the samples of files into the file `records`."""

    code: str
    sources: tuple[str, ...]
    options: dict[str, str]
    records: str


class CodeReply(msgspec.Struct, frozen=True, kw_only=True):
    """Reply to a request. If `complaint`, a sentence, is not "", the other fields are empty."""

    complaint: str = ""
    table: dict[str, Any] = {}
    derived: Derived | None = None
    fields: Fields = ()
    skipped: tuple[str, ...] = ()


def derived_of(config: Config) -> Derived:
    """Return the derived facts of a config. Raises InvalidRunFile."""
    try:
        return convert(config[DERIVED], Derived)
    except (KeyError, msgspec.ValidationError) as error:
        raise InvalidRunFile(
            f"the model's table lacks what was derived from its code ({error}): create the run anew"
        ) from error


def sample_counts(kind: DataKind, config: Config, manifest: DatasetManifest) -> list[int]:
    """Return the samples of each chunk. Raises InvalidRunFile."""
    if kind == "tokens":
        return windows_of(manifest, int(config[BLOCK]))
    if kind == "images":
        return images_of(manifest, image_shape(manifest))
    return counts_of(manifest)


def image_shape(manifest: DatasetManifest) -> tuple[int, int, int]:
    """Return the shape (C, S, S) of a dataset's images."""
    side = int(manifest.meta.get("size", 0))
    return int(manifest.meta.get("channels", 0)), side, side
