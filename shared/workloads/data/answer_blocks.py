"""Blocks of a dataset of dialogues that have a token to learn, as one text of its manifest.

A window of tokens without any such target teaches nothing, so it is no sample. The text has one bit
for each `BLOCK` targets of a chunk, compressed, so that the number of samples of any context
follows from the manifest alone, everywhere alike.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shared.errors import InvalidRunFile
from shared.workloads.base import DatasetManifest
from shared.workloads.data.tokenizer import LEARNT

BLOCK = 32  # targets; windows of a multiple of it are told apart exactly
ANSWERS = "answers"  # field of a manifest


def chunk_bits(chunk: bytes) -> bytes:
    """Return the bits of one chunk of marked tokens."""
    tokens = np.frombuffer(chunk, "<u4")
    learnt = (tokens[1:] & np.uint32(LEARNT)) != 0
    padded = np.zeros(-(-len(learnt) // BLOCK) * BLOCK, np.bool_)
    padded[: len(learnt)] = learnt
    return np.packbits(padded.reshape(-1, BLOCK).any(1)).tobytes()


def answers_text(bits: Iterable[bytes]) -> str:
    """Return the text of all training chunks."""
    return base64.b64encode(zlib.compress(b"".join(bits), 9)).decode()


def learnt_windows(manifest: DatasetManifest, size: int) -> tuple[NDArray[np.int64], ...] | None:
    """Return for each training chunk its windows of `size` targets that may have one to learn; None
    for a dataset that says nothing of answers. Raises InvalidRunFile for a malformed text.
    """
    text = manifest.meta.get(ANSWERS)
    if not isinstance(text, str):
        return None
    return _windows(text, tuple(chunk.items for chunk in manifest.chunks), size)


@lru_cache(maxsize=8)
def _windows(text: str, items: tuple[int, ...], size: int) -> tuple[NDArray[np.int64], ...]:
    counts = [-(-max(0, count - 1) // BLOCK) for count in items]
    packed = _unpacked(text, sum(-(-count // 8) for count in counts))
    windows, start = [], 0
    for count, tokens in zip(counts, items, strict=True):
        length = -(-count // 8)
        bits = np.unpackbits(packed[start : start + length], count=count)
        start += length
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(bits, dtype=np.int64)])
        first = np.arange(max(0, (tokens - 1) // size), dtype=np.int64) * size
        marked = before[(first + size - 1) // BLOCK + 1] - before[first // BLOCK]
        windows.append(np.flatnonzero(marked))
    return tuple(windows)


def _unpacked(text: str, length: int) -> NDArray[np.uint8]:
    decompressor = zlib.decompressobj()
    try:
        data = decompressor.decompress(base64.b64decode(text, validate=True), length + 1)
    except (binascii.Error, ValueError, zlib.error) as error:
        raise InvalidRunFile(f"the manifest's {ANSWERS} cannot be read: {error}") from error
    if len(data) != length:
        raise InvalidRunFile(f"the manifest's {ANSWERS} do not fit its chunks")
    return np.frombuffer(data, np.uint8)
