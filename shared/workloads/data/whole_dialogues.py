"""Whole dialogues of a held-out part, on which models of all window lengths are measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from shared.workloads.base import Data
from shared.workloads.data.pass_order import permutation
from shared.workloads.data.tokenizer import FIRST, LEARNT, TokenChunks

Dialogue = NDArray[np.int64]


def whole_dialogues(heldout: Data, vocab_size: int, most: int) -> list[Dialogue]:
    """Return the dialogues of all chunks that have a learnt token, as marked tokens in a fixed
    mixed order: as many as have at most `most` tokens together, but at least one. Raises
    InvalidRunFile for an unusable chunk.
    """
    chunks = TokenChunks(heldout, vocab_size)
    dialogues: list[NDArray[np.unsignedinteger]] = []
    for index in range(len(heldout.manifest.chunks)):
        tokens = chunks.tokens(index)
        starts = np.flatnonzero(tokens & np.uint32(FIRST))
        dialogues += np.split(tokens, starts[1:])
    selected: list[Dialogue] = []
    count = 0
    for place in permutation(len(dialogues), 0, 0):
        if selected and count + len(dialogues[place]) > most:
            break
        if (dialogues[place][1:] & np.uint32(LEARNT)).any():
            selected.append(dialogues[place].astype(np.int64))
            count += len(dialogues[place])
    return selected


def rows_of(
    dialogues: Sequence[Dialogue], context: int, logits_max: int
) -> Iterator[NDArray[np.int64]]:
    """Yield batches of dialogues of similar length, as rows (B, T + 1) with -1 after their ends.

    A batch has at most `logits_max` targets; a dialogue longer than the context loses its end.
    """
    order = sorted(range(len(dialogues)), key=lambda place: len(dialogues[place]))
    batch: list[Dialogue] = []
    for place in order:
        dialogue = dialogues[place][: context + 1]
        if batch and (len(batch) + 1) * (len(dialogue) - 1) > logits_max:
            yield _padded(batch)
            batch = []
        batch.append(dialogue)
    if batch:
        yield _padded(batch)


def _padded(batch: Sequence[Dialogue]) -> NDArray[np.int64]:
    rows = np.full((len(batch), max(map(len, batch))), -1, np.int64)
    for row, dialogue in zip(rows, batch, strict=True):
        row[: len(dialogue)] = dialogue
    return rows
