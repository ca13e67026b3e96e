"""Windows of dialogues, packed by best fit: the samples of a model that learns answers.

A manifest has the runs of learnt and of other tokens in every dialogue, so every machine computes
the same windows of any context from the manifest alone. A dialogue that fits a window is never
divided. A longer one is cut into parts of a window's length, each of which begins with the last
token of the part before; a part without a token to learn is left out.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from bisect import bisect_left, insort
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shared.errors import InvalidRunFile
from shared.workloads.base import Data, DatasetManifest
from shared.workloads.data.tokenizer import FIRST, LEARNT, TokenChunks

RUNS = "runs"  # field of a manifest
_FIRST, _LEARNT = 2, 1  # marks of a run, in the two bits below its length
_BYTES = 4  # size of a run in the text of runs

Numbers = NDArray[np.int64]


class Dialogues(NamedTuple):
    """Dialogues of all training chunks, as one stream of tokens."""

    starts: Numbers  # place of the first token of each dialogue
    lengths: Numbers
    edges: Numbers  # places where a run begins, and the end of the stream
    learnt: Numbers  # learnt tokens before each edge
    chunks: Numbers  # places where a chunk begins


class Packing(NamedTuple):
    """Windows of a chunk: window w has the parts bounds[w] to bounds[w + 1] - 1."""

    bounds: Numbers
    starts: Numbers  # places in the chunk
    lengths: Numbers


def runs_of(tokens: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return the runs of equally marked tokens: four times their lengths, plus their marks."""
    answers = (tokens & np.uint32(LEARNT)) != 0
    first = (tokens & np.uint32(FIRST)) != 0
    starts = np.flatnonzero(first | np.diff(answers, prepend=~answers[:1]))
    lengths = np.diff(starts, append=len(tokens))
    marks = np.where(first[starts], _FIRST, 0) | np.where(answers[starts], _LEARNT, 0)
    return np.asarray(lengths << 2 | marks, np.uint32)


def runs_text(runs: Iterable[NDArray[np.uint32]]) -> str:
    """Return the runs of all training chunks as base64 text, compressed: the lowest bytes of all
    runs first, then the second bytes, and so on, since most upper bytes are zero.
    """
    stream = np.concatenate([np.zeros(0, "<u4"), *runs]).astype("<u4")
    planes = stream.view(np.uint8).reshape(-1, _BYTES).T
    return base64.b64encode(zlib.compress(planes.tobytes())).decode()


def dialogues_of(manifest: DatasetManifest) -> Dialogues:
    """Return the dialogues of the training chunks. Raises InvalidRunFile for malformed runs."""
    text = manifest.meta.get(RUNS)
    sizes = tuple(chunk.items for chunk in manifest.chunks)
    return _dialogues(text if isinstance(text, str) else "", sizes)


def packings(manifest: DatasetManifest, context: int) -> tuple[Packing, ...]:
    """Return the windows of each training chunk. Raises InvalidRunFile for malformed runs."""
    dialogues_of(manifest)
    text = manifest.meta.get(RUNS)
    return _packings(str(text), tuple(chunk.items for chunk in manifest.chunks), context)


def learnt_share(manifest: DatasetManifest, context: int) -> float:
    """Return the share of the targets of all windows that are learnt."""
    windows = sum(len(packing.bounds) - 1 for packing in packings(manifest, context))
    return int(dialogues_of(manifest).learnt[-1]) / max(1, windows * context)


class DialogueWindows:
    """Windows (chunk, number) with the parts that the chunk's packing names."""

    def __init__(self, data: Data, context: int, vocab_size: int, rows: Numbers) -> None:
        self._packings = packings(data.manifest, context)
        self._context = context
        self._rows = rows
        self._chunks = TokenChunks(data, vocab_size)

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, start: int, stop: int) -> Numbers:
        """Return windows [start, stop) of the list, shape (B, T + 1), unlearnt zeros at their ends;
        every part begins with the mark FIRST. Raises InvalidRunFile for an unusable chunk.
        """
        out = np.zeros((stop - start, self._context + 1), np.int64)
        for line, (chunk, window) in zip(out, self._rows[start:stop].tolist(), strict=True):
            packing, tokens = self._packings[chunk], self._chunks.tokens(chunk)
            place = 0
            for part in range(packing.bounds[window], packing.bounds[window + 1]):
                begin, length = packing.starts[part], packing.lengths[part]
                line[place : place + length] = tokens[begin : begin + length]
                # the first token of a part is no target: the token before it is of another part
                line[place] = line[place] & ~LEARNT | FIRST
                place += length
        return out


@lru_cache(maxsize=4)
def _dialogues(text: str, sizes: tuple[int, ...]) -> Dialogues:
    runs = _unpacked(text, _BYTES * sum(sizes))
    lengths = (runs >> 2).astype(np.int64)
    edges = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    answers = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths * (runs & _LEARNT))])
    starts = edges[:-1][(runs & _FIRST) != 0]
    bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.asarray(sizes, np.int64))])
    total = int(bounds[-1])
    whole = np.isin(bounds, np.append(starts, total)).all()
    if edges[-1] != total or not (lengths > 0).all() or not whole:
        raise InvalidRunFile(f"the manifest's {RUNS} do not fit its chunks")
    return Dialogues(starts, np.diff(starts, append=total), edges, answers, bounds[:-1])


def _unpacked(text: str, most: int) -> NDArray[np.uint32]:
    decompressor = zlib.decompressobj()
    try:
        planes = decompressor.decompress(base64.b64decode(text, validate=True), most + 1)
    except (binascii.Error, ValueError, zlib.error) as error:
        raise InvalidRunFile(f"the manifest's {RUNS} cannot be read: {error}") from error
    if len(planes) > most or len(planes) % _BYTES:
        raise InvalidRunFile(f"the manifest's {RUNS} do not fit its chunks")
    runs = np.frombuffer(planes, np.uint8).reshape(_BYTES, -1).T
    return np.ascontiguousarray(runs).view("<u4").reshape(-1)


@lru_cache(maxsize=4)
def _packings(text: str, sizes: tuple[int, ...], context: int) -> tuple[Packing, ...]:
    dialogues = _dialogues(text, sizes)
    counts = -(-(dialogues.lengths - 1) // context)  # parts; a dialogue of one token has no part
    dialogue = np.repeat(np.arange(len(counts)), counts)
    skipped = (np.arange(len(dialogue)) - (np.cumsum(counts) - counts)[dialogue]) * context
    starts = dialogues.starts[dialogue] + skipped
    lengths = np.minimum(context + 1, dialogues.lengths[dialogue] - skipped)
    targets = np.stack([starts + 1, starts + lengths])
    first, last = np.interp(targets, dialogues.edges, dialogues.learnt)
    starts, lengths = starts[last > first], lengths[last > first]
    if not sizes:
        return ()
    bounds = np.searchsorted(starts, dialogues.chunks[1:])
    return tuple(
        _packed(part_starts - begin, part_lengths, context + 1)
        for part_starts, part_lengths, begin in zip(
            np.split(starts, bounds), np.split(lengths, bounds), dialogues.chunks, strict=True
        )
    )


def _packed(starts: Numbers, lengths: Numbers, room: int) -> Packing:
    """Put each part, the longest first, into the window with the least sufficient room."""
    order = np.argsort(-lengths, kind="stable")
    windows: list[int] = []  # window of each part in this order
    rooms: list[tuple[int, int]] = []  # (room, window), ascending
    count = 0
    for length in lengths[order].tolist():
        at = bisect_left(rooms, (length, 0))
        if at < len(rooms):
            free, window = rooms.pop(at)
        else:
            free, window, count = room, count, count + 1
        windows.append(window)
        insort(rooms, (free - length, window))
    numbers = np.asarray(windows, np.int64)
    by_window = np.argsort(numbers, kind="stable")
    bounds = np.searchsorted(numbers[by_window], np.arange(count + 1))
    order = order[by_window]
    return Packing(bounds, starts[order], lengths[order])
