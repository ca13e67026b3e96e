"""Merkle tree over an append-only log: roots, inclusion and consistency proofs (RFC 9162, section
2.1).

Leaves are hashed as SHA-256(0x00 || entry), inner nodes as SHA-256(0x01 || left || right), so that
no entry can pass for a node. Every computation reads the hashes of complete subtrees through a
`Nodes` function: `nodes(level, index)` is the hash over entries [index * 2^level, (index + 1) *
2^level). These hashes never change; a server keeps them in a table, so a proof over n entries costs
O(log n) reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import TypeAlias

HASH_BYTES = 32
EMPTY = sha256(b"").digest()
PROOF_MAX = 64  # most hashes in a proof over fewer than 2^63 entries

Nodes: TypeAlias = Callable[[int, int], bytes]


def leaf(entry: bytes) -> bytes:
    """Return the hash of one entry."""
    return sha256(b"\x00" + entry).digest()


def parent(left: bytes, right: bytes) -> bytes:
    """Return the hash of an inner node."""
    return sha256(b"\x01" + left + right).digest()


class Frontier:
    """Right edge of a tree: the O(log n) hashes that appending an entry and the root need."""

    def __init__(self, nodes: Nodes, size: int) -> None:
        self.size = size
        self._peaks = [nodes(level, index) for level, index in peaks(size)]  # the largest first

    def append_leaf(self, leaf_hash: bytes) -> list[tuple[int, int, bytes]]:
        """Add an entry by its leaf hash. Return (level, index, hash) of each subtree that it
        completes, the leaf first.
        """
        self.size += 1
        nodes, node_hash = [], leaf_hash
        for level, index in completed_subtrees(self.size):
            if level:
                node_hash = parent(self._peaks.pop(), node_hash)
            nodes.append((level, index, node_hash))
        self._peaks.append(node_hash)
        return nodes

    def root(self) -> bytes:
        """Return the root over all entries."""
        if not self._peaks:
            return EMPTY
        digest_of_root = self._peaks[-1]
        for peak in self._peaks[-2::-1]:
            digest_of_root = parent(peak, digest_of_root)
        return digest_of_root


def peaks(size: int) -> list[tuple[int, int]]:
    """Return (level, index) of the largest complete subtrees of `size` entries, left to right."""
    levels = range(size.bit_length() - 1, -1, -1)
    return [(level, (size >> level) - 1) for level in levels if size >> level & 1]


def completed_subtrees(size: int) -> list[tuple[int, int]]:
    """Return (level, index) of the subtrees that the last of `size` entries completes, the leaf
    first.
    """
    nodes, level, count = [], 0, size
    while True:
        nodes.append((level, count - 1))
        if count % 2:
            return nodes
        level, count = level + 1, count // 2


def inclusion_proof(nodes: Nodes, index: int, size: int) -> list[bytes]:
    """Return the proof, from leaf to root, that the entry `index` is in the tree of `size` entries.
    Raises ValueError for an index outside it.
    """
    if not 0 <= index < size:
        raise ValueError(f"there is no entry {index} among {size}")
    path, low, high = [], 0, size
    while high - low > 1:
        middle = low + _split(high - low)
        if index < middle:
            path.append(_range_hash(nodes, middle, high))
            high = middle
        else:
            path.append(_range_hash(nodes, low, middle))
            low = middle
    return path[::-1]


def consistency_proof(nodes: Nodes, old: int, new: int) -> list[bytes]:
    """Return the proof that the tree of `new` entries begins with that of `old` entries. Raises
    ValueError unless 0 < old <= new.
    """
    if not 0 < old <= new:
        raise ValueError(f"a tree of {new} entries cannot begin with one of {old}")
    path, low, high, whole = [], 0, new, True
    while old != high:
        middle = low + _split(high - low)
        if old <= middle:
            path.append(_range_hash(nodes, middle, high))
            high = middle
        else:
            path.append(_range_hash(nodes, low, middle))
            low, whole = middle, False
    if not whole:
        path.append(_range_hash(nodes, low, high))
    return path[::-1]


def proves_inclusion(
    leaf_hash: bytes, index: int, size: int, proof: Sequence[bytes], root_hash: bytes
) -> bool:
    """Return True if the proof leads from the leaf to the root (RFC 9162, 2.1.3.2)."""
    if not 0 <= index < size or len(proof) > PROOF_MAX:
        return False
    place, last, digest_so_far = index, size - 1, leaf_hash
    for sibling in proof:
        if last == 0 or len(sibling) != HASH_BYTES:
            return False
        if place % 2 or place == last:
            digest_so_far = parent(sibling, digest_so_far)
            while not place % 2 and place:
                place, last = place >> 1, last >> 1
        else:
            digest_so_far = parent(digest_so_far, sibling)
        place, last = place >> 1, last >> 1
    return last == 0 and digest_so_far == root_hash


def proves_consistency(
    old: int, new: int, proof: Sequence[bytes], old_root: bytes, new_root: bytes
) -> bool:
    """Return True if the proof shows that the new tree begins with the old (RFC 9162, 2.1.4.2)."""
    if not 0 < old <= new or any(len(node) != HASH_BYTES for node in proof):
        return False
    if old == new:
        return not proof and old_root == new_root
    path = list(proof)
    if old & (old - 1) == 0:  # a complete subtree: its root is the first node
        path.insert(0, old_root)
    if not 0 < len(path) <= PROOF_MAX + 1:
        return False
    place, last = old - 1, new - 1
    while place % 2:
        place, last = place >> 1, last >> 1
    old_digest = new_digest = path[0]
    for node in path[1:]:
        if last == 0:
            return False
        if place % 2 or place == last:
            old_digest, new_digest = parent(node, old_digest), parent(node, new_digest)
            while not place % 2 and place:
                place, last = place >> 1, last >> 1
        else:
            new_digest = parent(new_digest, node)
        place, last = place >> 1, last >> 1
    return last == 0 and old_digest == old_root and new_digest == new_root


def _split(size: int) -> int:
    """Return the largest power of two below `size`, which is at least 2."""
    return 1 << (size - 1).bit_length() - 1


def _range_hash(nodes: Nodes, low: int, high: int) -> bytes:
    """Return the hash over entries [low, high) of the tree."""
    size = high - low
    if size & (size - 1) == 0:  # a complete subtree: the split leaves `low` a multiple of its size
        return nodes(size.bit_length() - 1, low // size)
    middle = low + _split(size)
    return parent(_range_hash(nodes, low, middle), _range_hash(nodes, middle, high))
