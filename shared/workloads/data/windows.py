"""Windows of tokens, read from memory-mapped chunks: the samples of language models."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shared.errors import BadRequest, InvalidRunFile
from shared.workloads.base import Data, DatasetManifest
from shared.workloads.data.dialogue_windows import packings
from shared.workloads.data.pass_order import PassOrder, permutation
from shared.workloads.data.tokenizer import MARKED, TokenChunks, dtype_of, stored_type


def windows_of(manifest: DatasetManifest, block_size: int, *, last: bool = False) -> list[int]:
    """Return the number of windows of `block_size` targets in each chunk; with `last`, a shorter
    window at the end of each chunk of text counts too. Dialogues are packed into windows.

    Raises InvalidRunFile for a chunk whose bytes cannot hold the claimed number of tokens: memory
    is allocated by that number before a chunk is opened.
    """
    token_bytes = stored_type(dtype_of(manifest)).itemsize
    for index, chunk in enumerate(manifest.chunks):
        if chunk.items < 0 or chunk.size != chunk.items * token_bytes:
            raise InvalidRunFile(
                f"chunk {index} of {manifest.name} has {chunk.size} bytes, but {chunk.items} tokens"
                f" have {chunk.items * token_bytes}"
            )
    if dtype_of(manifest) == MARKED:
        return [len(packing.bounds) - 1 for packing in packings(manifest, block_size)]
    more = block_size - 1 if last else 0
    return [max(0, (chunk.items - 1 + more) // block_size) for chunk in manifest.chunks]


def check_lengths(manifest: DatasetManifest, block_size: int) -> None:
    """Raise InvalidRunFile if a part of a text dataset has no whole window."""
    for chunks, use in ((manifest.chunks, "train on"), (manifest.heldout, "hold out")):
        longest = max((chunk.items for chunk in chunks), default=block_size + 1)
        if longest <= block_size:
            raise InvalidRunFile(
                f'the dataset "{manifest.name}" has no more than {longest} tokens in one piece to'
                f" {use}: [model] block_size must be at most {longest - 1}, or add more text"
            )


class Windows:
    """Windows (chunk, number) of texts: window s is tokens [s T, s T + T], T inputs and T
    targets.
    """

    def __init__(
        self, data: Data, block_size: int, vocab_size: int, rows: NDArray[np.int64]
    ) -> None:
        self._block = block_size
        self._rows = rows
        self._chunks = TokenChunks(data, vocab_size)

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return windows [start, stop) of the list, shape (B, T + 1); -1 after the end of a chunk.

        Raises InvalidRunFile for an unusable chunk.
        """
        T = self._block
        out = np.full((stop - start, T + 1), -1, np.int64)
        for line, (chunk, sample) in zip(out, self._rows[start:stop].tolist(), strict=True):
            window = self._chunks.tokens(chunk)[sample * T : sample * T + T + 1]
            line[: len(window)] = window
        return out


def task_samples(
    order: PassOrder, start: int, stop: int, steps: int, batch_size: int
) -> NDArray[np.int64]:
    """Return the samples of a task as rows (chunk, sample in that chunk). Raises BadRequest unless
    they fill `steps` batches, the last perhaps in part.
    """
    samples = stop - start
    if not (
        steps >= 1 and batch_size >= 1 and (steps - 1) * batch_size < samples <= steps * batch_size
    ):
        raise BadRequest(f"a task of {samples} samples does not make {steps} steps of {batch_size}")
    return order.at(start, stop)


def spread(counts: Sequence[int], count: int) -> NDArray[np.int64]:
    """Return at most `count` samples as rows (chunk, sample), evenly spread over chunks of `counts`
    samples, in a fixed mixed order.
    """
    ends = np.cumsum(np.asarray(counts, np.int64))
    total = int(ends[-1]) if len(ends) else 0
    count_read = min(total, count)
    flat = np.arange(count_read, dtype=np.int64) * total // max(1, count_read)
    flat = flat[permutation(count_read, 0, 0)]
    chunk = np.searchsorted(ends, flat, side="right")
    starts = np.concatenate([np.zeros(1, np.int64), ends])
    return np.stack([chunk, flat - starts[chunk]], axis=1)
