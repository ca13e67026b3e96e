"""Merkle trees against a naive one, and against whoever would rewrite a log."""

from __future__ import annotations

from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import merkle

ENTRIES = st.lists(st.binary(max_size=8), min_size=1, max_size=40)
# The roots of RFC 6962's test data, in order of the number of entries.
KNOWN = [b"", b"\x00", b"\x10", b"\x20\x21", b"\x30\x31", b"\x40\x41\x42\x43"]


def naive(entries: list[bytes]) -> bytes:
    """MTH as RFC 9162 writes it, recursively over the entries."""
    if not entries:
        return sha256(b"").digest()
    if len(entries) == 1:
        return sha256(b"\x00" + entries[0]).digest()
    k = 1
    while k * 2 < len(entries):
        k *= 2
    return sha256(b"\x01" + naive(entries[:k]) + naive(entries[k:])).digest()


def grown(entries: list[bytes]) -> merkle.Tree:
    tree = merkle.Tree()
    for entry in entries:
        tree.append(entry)
    return tree


def test_known_roots() -> None:
    assert merkle.root(merkle.Tree().node, 0).hex().startswith("e3b0c44298fc1c14")
    tree = grown(KNOWN[:1])
    assert merkle.root(tree.node, 1).hex().startswith("6e340b9cffb37a98")


@given(ENTRIES)
def test_every_root_is_that_of_the_naive_tree(entries: list[bytes]) -> None:
    tree = grown(entries)
    for size in range(len(entries) + 1):
        assert merkle.root(tree.node, size) == naive(entries[:size])


@given(ENTRIES, st.data())
def test_what_is_in_the_tree_is_proved_and_nothing_else(
    entries: list[bytes], data: st.DataObject
) -> None:
    tree, size = grown(entries), len(entries)
    index = data.draw(st.integers(0, size - 1))
    proof = merkle.inclusion(tree.node, index, size)
    root = merkle.root(tree.node, size)
    hashed = merkle.leaf(entries[index])
    assert merkle.proves_inclusion(hashed, index, size, proof, root)
    assert not merkle.proves_inclusion(merkle.leaf(b"another!!"), index, size, proof, root)
    assert not merkle.proves_inclusion(hashed, index, size, proof, sha256(root).digest())
    assert not merkle.proves_inclusion(hashed, index, size, [*proof, root], root)
    if proof:
        assert not merkle.proves_inclusion(hashed, index, size, proof[:-1], root)


@given(ENTRIES, st.data())
def test_a_log_that_only_grew_is_consistent_and_a_rewritten_one_is_not(
    entries: list[bytes], data: st.DataObject
) -> None:
    new = len(entries)
    old = data.draw(st.integers(1, new))
    tree = grown(entries)
    was, now = merkle.root(tree.node, old), merkle.root(tree.node, new)
    assert merkle.proves_consistency(old, new, merkle.consistency(tree.node, old, new), was, now)
    changed = data.draw(st.integers(0, old - 1))
    other = grown([*entries[:changed], b"rewritten", *entries[changed + 1 :]])
    forged = merkle.consistency(other.node, old, new)
    assert not merkle.proves_consistency(old, new, forged, was, merkle.root(other.node, new))


@given(st.integers(1, 5000))
def test_what_an_entry_finishes_is_known_without_the_tree(size: int) -> None:
    tree = merkle.Tree()
    for _ in range(size - 1):
        tree.append_leaf(merkle.EMPTY)
    assert [(level, index) for level, index, _ in tree.append_leaf(merkle.EMPTY)] == list(
        merkle.finished(size)
    )


@given(st.integers(0, 300), st.integers(1, 70))
def test_the_right_edge_alone_grows_the_same_tree(size: int, more: int) -> None:
    tree = grown([str(n).encode() for n in range(size)])
    edge = merkle.Frontier(tree.node, size)
    for number in range(size, size + more):
        hashed = merkle.leaf(str(number).encode())
        assert edge.append_leaf(hashed) == tree.append_leaf(hashed)
    assert edge.size == len(tree)
    assert edge.root() == merkle.root(tree.node, len(tree))


@pytest.mark.parametrize(("index", "size"), [(-1, 3), (3, 3), (0, 0)])
def test_there_is_no_proof_for_an_entry_that_is_not_there(index: int, size: int) -> None:
    with pytest.raises(ValueError, match="no entry"):
        merkle.inclusion(grown([b"a", b"b", b"c"]).node, index, size)


@given(st.integers(-5, 50), st.integers(-5, 50), st.lists(st.binary(max_size=33), max_size=70))
def test_nonsense_proves_nothing(a: int, b: int, proof: list[bytes]) -> None:
    tree = grown([bytes([n]) for n in range(50)])
    root = merkle.root(tree.node, 50)
    assert not merkle.proves_inclusion(merkle.leaf(b"not there"), a, b, proof, root)
    assert not merkle.proves_consistency(a, b, proof, merkle.EMPTY, root)
