"""Order of a pass: a stored seed makes one permutation of every sample of a dataset, the same on
every machine.

There are two levels, so that a task needs few chunks and still gets mixed data: the chunks are
permuted, then the samples of `mix` neighbouring chunks are shuffled together. Only requested groups
are built.

A chunk of text holds few documents, and workers that train on the same few give similar updates:
DiLoCo ended 1.2 % behind data-parallel training with 4 chunks a group, 0.3 % with 16
(docs/decisions/0006-pass-order.md).

The random numbers are the raw 64-bit output of Philox 4x64-10 (Salmon et al. 2011) with the key
(seed, stream), and a permutation is the stable argsort of them. Both are fixed by definition,
unlike the shuffling methods of NumPy's generators, which may change between releases; golden values
in the tests pin them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from shared.errors import BadRequest

_WORD = (1 << 64) - 1
MIX = 16  # chunks whose samples are shuffled together
# Most samples mixed at once, in 0.5 GiB of memory: 16 chunks of the largest size in windows of 16
# tokens.
GROUP_SAMPLES_MAX = 1 << 23
_CHUNK_SAMPLES_MAX = 1 << 40
_KEPT_GROUPS = 4  # a task moves forward and rereads only the last few groups


def permutation(count: int, seed: int, stream: int) -> NDArray[np.int64]:
    """Return a permutation of `range(count)`, fixed for ever by `seed` and `stream`."""
    key = np.array([seed & _WORD, stream & _WORD], dtype=np.uint64)
    words = np.random.Philox(key=key, counter=0).random_raw(count)
    return np.argsort(words, kind="stable").astype(np.int64)


class PassOrder:
    """Samples of a pass, at positions 0 to `total` - 1; chunk `c` has `counts[c]` samples."""

    def __init__(self, counts: Sequence[int], seed: int, mix: int = MIX) -> None:
        if mix < 1 or any(not 0 <= count <= _CHUNK_SAMPLES_MAX for count in counts):
            raise BadRequest("a pass needs a mix of at least 1 and chunks of at least 0 samples")
        sizes = np.asarray(counts, dtype=np.int64).reshape(-1)
        order = permutation(len(sizes), seed, 0)
        self._chunks = order[sizes[order] > 0]  # an empty chunk is never fetched
        self._sizes = sizes[self._chunks]
        self._seed = seed
        self._mix = mix
        groups = (
            np.add.reduceat(self._sizes, np.arange(0, len(self._sizes), mix))
            if len(self._sizes)
            else self._sizes
        )
        # group g has the positions [bounds[g], bounds[g + 1])
        self._bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(groups)])
        self._built: dict[int, NDArray[np.int64]] = {}

    @property
    def total(self) -> int:
        """Return the number of samples of the pass."""
        return int(self._bounds[-1])

    def at(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the samples at [start, stop) as rows (chunk, sample in that chunk)."""
        parts = [self._group(group)[first:last] for group, first, last in self._pieces(start, stop)]
        return np.concatenate(parts) if parts else np.empty((0, 2), np.int64)

    def chunks(self, start: int, stop: int) -> tuple[int, ...]:
        """Return the chunks that [start, stop) reads, earlier groups first."""
        numbers: dict[int, None] = {}
        for group, first, last in self._pieces(start, stop):
            is_whole = last - first == self._bounds[group + 1] - self._bounds[group]
            if is_whole:  # no need to build the group
                members = self._members(group)
            else:
                members = self._group(group)[first:last, 0]
            numbers.update(dict.fromkeys(members.tolist()))
        return tuple(numbers)

    def reach(self, start: int, stop: int) -> tuple[int, ...]:
        """Return the chunks of every group that [start, stop) touches, without building a group."""
        numbers: dict[int, None] = {}
        for group, _, _ in self._pieces(start, stop):
            numbers.update(dict.fromkeys(self._members(group).tolist()))
        return tuple(numbers)

    def _pieces(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Return the groups that [start, stop) touches: (group, first, last) within the group.
        Raises BadRequest for positions outside of the pass.
        """
        if not 0 <= start <= stop <= self.total:
            raise BadRequest(
                f"positions {start} to {stop} do not lie in a pass of {self.total} samples"
            )
        if start == stop:
            return []
        low = int(np.searchsorted(self._bounds, start, side="right")) - 1
        high = int(np.searchsorted(self._bounds, stop, side="left"))
        edges = [(int(a), int(b)) for a, b in pairwise(self._bounds[low : high + 1])]
        return [
            (low + index, max(start, begin) - begin, min(stop, end) - begin)
            for index, (begin, end) in enumerate(edges)
        ]

    def _members(self, group: int) -> NDArray[np.int64]:
        return self._chunks[group * self._mix : (group + 1) * self._mix]

    def _group(self, group: int) -> NDArray[np.int64]:
        """Return all samples of a group in the order of the pass, (n, 2). Raises BadRequest for
        more than GROUP_SAMPLES_MAX.
        """
        rows = self._built.get(group)
        if rows is None:
            sizes = self._sizes[group * self._mix : (group + 1) * self._mix]
            total = int(sizes.sum())
            if total > GROUP_SAMPLES_MAX:
                raise BadRequest(
                    f"this dataset mixes {total:,} samples of {len(sizes)} chunks, more than the"
                    f" {GROUP_SAMPLES_MAX:,} that are held at once: make it with smaller chunks"
                )
            chunk = np.repeat(self._members(group), sizes)
            sample = np.concatenate([np.arange(size, dtype=np.int64) for size in sizes])
            rows = np.stack([chunk, sample], axis=1)[permutation(len(chunk), self._seed, group + 1)]
            if len(self._built) >= _KEPT_GROUPS:
                del self._built[next(iter(self._built))]
            self._built[group] = rows
        return rows
