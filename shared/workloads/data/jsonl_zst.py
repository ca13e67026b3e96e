"""JSON lines compressed by zstd: small, readable with common tools, and limited in size when
unpacked.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

import msgspec

from shared.decoding import MALFORMED, decoder
from shared.errors import BadRequest

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

T = TypeVar("T", bound=msgspec.Struct)

_LEVEL = 6
_WINDOW_LOG_MAX = 27  # memory of the decoder: 128 MiB


def pack(records: Iterable[msgspec.Struct]) -> bytes:
    """Return records as compressed JSON lines, one a record."""
    return zstd.compress(msgspec.json.Encoder().encode_lines(list(records)), _LEVEL)


def unpack(data: bytes, kind: type[T], bytes_max: int, records_max: int) -> list[T]:
    """Return the records of packed lines. Raises BadRequest, with the line, for damaged or too
    large files.
    """
    text = _expand(data, bytes_max)
    ends = text.count(b"\n") + text.count(b"\r")  # a list of 256 MiB of lines takes 2 GiB
    if ends > 2 * records_max:
        raise BadRequest(f"a file has at most {records_max} lines, this one has more")
    lines = text.splitlines()
    if len(lines) > records_max:
        raise BadRequest(f"a file has at most {records_max} lines, this one has {len(lines)}")
    return list(_decoded(lines, kind))


def _expand(data: bytes, bytes_max: int) -> bytes:
    decoder = zstd.ZstdDecompressor(
        options={zstd.DecompressionParameter.window_log_max: _WINDOW_LOG_MAX}
    )
    try:
        expanded = decoder.decompress(data, max_length=bytes_max + 1)
    except zstd.ZstdError as error:
        raise BadRequest(f"this is not a compressed file: {error}") from error
    if len(expanded) > bytes_max:
        raise BadRequest(f"the file holds more than {bytes_max >> 20} MiB")
    if not decoder.eof or decoder.unused_data:
        raise BadRequest("the file is cut off, or something follows its end")
    return expanded


def _decoded(lines: list[bytes], kind: type[T]) -> Iterator[T]:
    reader = decoder(kind)
    for number, line in enumerate(lines, 1):
        try:
            yield reader.decode(line)
        except MALFORMED as error:
            raise BadRequest(f"line {number} is not a record: {error}") from error
