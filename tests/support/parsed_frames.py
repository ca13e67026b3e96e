"""Tensor files in memory."""

from __future__ import annotations

from shared.tensors.frame import Frame, read_header
from shared.tensors.header import check_header, header_limit
from shared.tensors.spec import Schema


def parse_frame(data: bytes, schema: Schema) -> Frame:
    """Return the tensors of a file in memory. Raises InvalidFrame."""
    header = read_header(data, header_limit(schema))
    check_header(header, schema, len(data))
    return Frame(data, header, schema)
