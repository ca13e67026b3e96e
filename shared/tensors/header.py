"""Header of a tensor file, read as hostile data and written in one canonical form.

The format is safetensors: eight bytes little-endian length, a JSON object, then one buffer without
gaps. Each tensor's type, shape and offsets are checked against the expected schema before a tensor
is read. This module does not import numpy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Annotated, NoReturn, TypeAlias

import msgspec

from shared.decoding import convert
from shared.errors import InvalidFrame
from shared.tensors.spec import RANK_MAX, Schema, by_name

LENGTH_BYTES = 8
ALIGNMENT = 64  # the buffer begins on a cache line; readers of the format skip the padding
HEADER_BYTES_MAX = 1 << 20
METADATA_ENTRIES_MAX = 64
METADATA_BYTES_MAX = 1 << 16

_Natural: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 53) - 1)]


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor in a header; offsets are bytes from the start of the buffer."""

    dtype: str
    shape: Annotated[tuple[_Natural, ...], msgspec.Meta(max_length=RANK_MAX)]
    data_offsets: tuple[_Natural, _Natural]


class Header(msgspec.Struct, frozen=True):
    """Parsed header; `data_start` is the offset of the buffer in the file."""

    entries: dict[str, Entry]
    metadata: dict[str, str]
    data_start: int

    def span(self, name: str, first: int = 0, stop: int | None = None) -> tuple[int, int]:
        """Return the offsets in the file of a tensor's elements [first, stop), all by default."""
        entry = self.entries[name]
        begin, end = entry.data_offsets
        count = math.prod(entry.shape)
        width = (end - begin) // max(1, count)
        begin += self.data_start
        return begin + first * width, begin + (count if stop is None else stop) * width


def header_limit(schema: Schema) -> int:
    """Return the largest header, in bytes, that an honest file of this schema can have."""
    escaped = sum(6 * len(spec.name) for spec in schema)  # a character may be written \\uXXXX
    return escaped + 256 * len(schema) + 2 * METADATA_BYTES_MAX


def header_length(prefix: bytes, file_bytes: int, limit: int = HEADER_BYTES_MAX) -> int:
    """Return the length of the JSON from the first eight bytes. Raises InvalidFrame."""
    if len(prefix) < LENGTH_BYTES:
        raise InvalidFrame("the tensor file is cut off in its first eight bytes")
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if length > limit:
        raise InvalidFrame(
            f"the header of the tensor file claims {length} bytes; at most {limit} are read"
        )
    if length > file_bytes - LENGTH_BYTES:
        raise InvalidFrame("the tensor file is cut off in its header")
    return length


def parse_header(text: bytes) -> Header:
    """Read a header's JSON strictly, without duplicate or unknown keys. Raises InvalidFrame."""
    body = text.rstrip(b" ")
    if not (body.startswith(b"{") and body.endswith(b"}")):
        raise InvalidFrame("the header of the tensor file is not a JSON object")
    try:
        raw = json.loads(
            body.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_float=_no_fraction,
            parse_constant=_no_fraction,
        )
        metadata = _metadata(raw.pop("__metadata__", {}))
        entries = convert(raw, dict[str, Entry])
    except (ValueError, msgspec.ValidationError, RecursionError) as error:
        reason = "it is nested too deep" if isinstance(error, RecursionError) else str(error)[:200]
        raise InvalidFrame(f"the header of the tensor file cannot be read: {reason}") from error
    return Header(entries=entries, metadata=metadata, data_start=LENGTH_BYTES + len(text))


def check_header(header: Header, schema: Schema, file_bytes: int) -> None:
    """Check a header against schema and file size. Raises InvalidFrame with the first
    difference.
    """
    expected = by_name(schema)
    for name in header.entries:
        if name not in expected:
            raise InvalidFrame(
                f"the tensor file holds {name[:80]!r}, which the schema does not know"
            )
    for spec in schema:
        entry = header.entries.get(spec.name)
        if entry is None:
            raise InvalidFrame(f"the tensor {spec.name!r} is missing")
        if entry.dtype != spec.dtype:
            raise InvalidFrame(
                f"{spec.name!r} is {entry.dtype[:20]!r}; the schema says {spec.dtype}"
            )
        if entry.shape != spec.shape:
            raise InvalidFrame(
                f"{spec.name!r} has the shape {entry.shape}; the schema says {spec.shape}"
            )
        begin, end = entry.data_offsets
        if end - begin != spec.nbytes:
            raise InvalidFrame(
                f"{spec.name!r} covers {end - begin} bytes; its shape needs {spec.nbytes}"
            )
    check_cover(header, file_bytes)


def check_cover(header: Header, file_bytes: int) -> None:
    """Check that the tensors fill the file from the header to its end. Raises InvalidFrame."""
    position = 0
    ordered = sorted(header.entries.items(), key=lambda item: item[1].data_offsets)
    for name, entry in ordered:
        begin, end = entry.data_offsets
        if begin != position:
            problem = "overlaps another tensor" if begin < position else "leaves a hole before it"
            raise InvalidFrame(f"{name[:80]!r} {problem}")
        position = end
    expected = header.data_start + position
    if file_bytes != expected:
        problem = "cut off" if file_bytes < expected else "too long"
        raise InvalidFrame(
            f"the tensor file is {problem}: {file_bytes} bytes, and its header describes {expected}"
        )


def render_header(schema: Schema, metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the bytes of a header: its length, and the JSON for tensors in schema order. The same
    input gives the same bytes.
    """
    by_name(schema)
    document: dict[str, object] = {}
    if metadata:
        document["__metadata__"] = dict(sorted(_metadata(dict(metadata)).items()))
    position = 0
    for spec in schema:
        end = position + spec.nbytes
        document[spec.name] = {
            "dtype": spec.dtype,
            "shape": spec.shape,
            "data_offsets": (position, end),
        }
        position = end
    text = msgspec.json.encode(document)
    text += b" " * (-(LENGTH_BYTES + len(text)) % ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _metadata(raw: object) -> dict[str, str]:
    metadata = convert(raw, dict[str, str])
    size = sum(len(text.encode()) for pair in metadata.items() for text in pair)
    if len(metadata) > METADATA_ENTRIES_MAX or size > METADATA_BYTES_MAX:
        raise InvalidFrame(
            f"the metadata of a tensor file may hold {METADATA_ENTRIES_MAX} entries and "
            f"{METADATA_BYTES_MAX} bytes"
        )
    return metadata


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return the fields of a JSON object. Raises ValueError if a key occurs twice."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key occurs twice")
    return fields


def _no_fraction(text: str) -> NoReturn:
    raise ValueError(f"{text[:20]} is not a whole number")
