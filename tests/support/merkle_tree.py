"""A Merkle tree in memory, the reference that the table of nodes is held against."""

from __future__ import annotations

from shared.proofs.merkle import leaf, parent


class MerkleTree:
    """A tree in memory: the complete subtrees of an append-only log, level by level."""

    def __init__(self) -> None:
        self._levels: list[list[bytes]] = [[]]

    def __len__(self) -> int:
        return len(self._levels[0])

    def append(self, entry: bytes) -> list[tuple[int, int, bytes]]:
        """Add an entry. Return the complete subtrees it finished as (level, index, hash)."""
        return self.append_leaf(leaf(entry))

    def append_leaf(self, hashed: bytes) -> list[tuple[int, int, bytes]]:
        """Add an entry by its leaf hash. Return the complete subtrees it finished."""
        finished = []
        for level in range(len(self._levels) + 1):
            if level == len(self._levels):
                self._levels.append([])
            nodes = self._levels[level]
            nodes.append(hashed)
            finished.append((level, len(nodes) - 1, hashed))
            if len(nodes) % 2:
                break
            hashed = parent(nodes[-2], nodes[-1])
        return finished

    def node(self, level: int, index: int) -> bytes:
        """Return the hash of a complete subtree. Raises IndexError when it is not complete."""
        return self._levels[level][index]
