"""Merkle trees against a naive one, and against whoever would rewrite a log."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shared.proofs import merkle
from tests.support.merkle_tree import MerkleTree

ENTRIES = st.lists(st.binary(max_size=8), min_size=1, max_size=40)
# The eight entries of the test data of RFC 6962's reference implementation, and the root over each
# number of them.
KNOWN = [
    bytes.fromhex(entry)
    for entry in (
        "", "00", "10", "2021", "3031", "40414243",
        "5051525354555657", "606162636465666768696a6b6c6d6e6f",
    )
]  # fmt: skip
KNOWN_ROOTS = (
    "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
)
# Consistency proofs of that data as the same implementation gives them.
KNOWN_CONSISTENCY = {
    (1, 1): (),
    (1, 8): (
        "96a296d224f285c67bee93c30f8a309157f0daa35dc5b87e410b78630a09cfc7",
        "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
        "6b47aaf29ee3c2af9af889bc1fb9254dabd31177f16232dd6aab035ca39bf6e4",
    ),
    (2, 5): (
        "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
        "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",
    ),
    (6, 8): (
        "0ebc5d3437fbe2db158b9f126a1d118e308181031d0a949f8dededebc558ef6a",
        "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
        "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    ),
}


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


def root_of(nodes: merkle.Nodes, size: int) -> bytes:
    return merkle.Frontier(nodes, size).root()


def grown(entries: list[bytes]) -> MerkleTree:
    tree = MerkleTree()
    for entry in entries:
        tree.append(entry)
    return tree


@pytest.mark.parametrize("size", range(len(KNOWN_ROOTS)))
def test_known_roots(size: int) -> None:
    assert root_of(grown(KNOWN[:size]).node, size).hex() == KNOWN_ROOTS[size]
    assert root_of(grown(KNOWN).node, size).hex() == KNOWN_ROOTS[size]


@pytest.mark.parametrize(("old", "new"), KNOWN_CONSISTENCY)
def test_known_proofs(old: int, new: int) -> None:
    proof = merkle.consistency_proof(grown(KNOWN).node, old, new)
    assert tuple(node.hex() for node in proof) == KNOWN_CONSISTENCY[old, new]
    was, now = bytes.fromhex(KNOWN_ROOTS[old]), bytes.fromhex(KNOWN_ROOTS[new])
    assert merkle.proves_consistency(old, new, proof, was, now)


def test_every_proof_of_a_small_tree_holds_and_no_other() -> None:
    """All pairs up to 33 entries, so that no shape of a tree is left to chance."""
    entries = [bytes([n]) for n in range(33)]
    tree = grown(entries)
    roots = [root_of(tree.node, size) for size in range(len(entries) + 1)]
    consistent, included = merkle.proves_consistency, merkle.proves_inclusion
    for new in range(1, len(entries) + 1):
        for old in range(1, new + 1):
            proof, was, now = merkle.consistency_proof(tree.node, old, new), roots[old], roots[new]
            assert consistent(old, new, proof, was, now)
            assert not any(consistent(old, new, bad, was, now) for bad in spoiled(proof))
            assert not consistent(old, new, proof, was, roots[new - 1])
            assert not consistent(old, new, proof, roots[old - 1], now)
        for index in range(new):
            proof, leaf = merkle.inclusion_proof(tree.node, index, new), merkle.leaf(entries[index])
            assert included(leaf, index, new, proof, roots[new])
            assert not any(included(leaf, index, new, bad, roots[new]) for bad in spoiled(proof))
            assert not included(leaf, index, new, proof, roots[new - 1])


def spoiled(proof: list[bytes]) -> Iterator[list[bytes]]:
    """The proof with a node missing, changed, cut or too many."""
    for at, node in enumerate(proof):
        before, after = proof[:at], proof[at + 1 :]
        yield [*before, *after]
        yield [*before, merkle.EMPTY, *after]
        yield [*before, node[:-1], *after]
        yield [*before, node, node, *after]
    yield [*proof, merkle.EMPTY]
    yield [merkle.EMPTY, *proof]


@given(ENTRIES)
def test_every_root_is_that_of_the_naive_tree(entries: list[bytes]) -> None:
    tree = grown(entries)
    for size in range(len(entries) + 1):
        assert root_of(tree.node, size) == naive(entries[:size])


@given(ENTRIES, st.data())
def test_what_is_in_the_tree_is_proved_and_nothing_else(
    entries: list[bytes], data: st.DataObject
) -> None:
    tree, size = grown(entries), len(entries)
    index = data.draw(st.integers(0, size - 1))
    proof = merkle.inclusion_proof(tree.node, index, size)
    root = root_of(tree.node, size)
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
    was, now = root_of(tree.node, old), root_of(tree.node, new)
    assert merkle.proves_consistency(
        old, new, merkle.consistency_proof(tree.node, old, new), was, now
    )
    changed = data.draw(st.integers(0, old - 1))
    other = grown([*entries[:changed], b"rewritten", *entries[changed + 1 :]])
    forged = merkle.consistency_proof(other.node, old, new)
    assert not merkle.proves_consistency(old, new, forged, was, root_of(other.node, new))


@given(st.integers(1, 5000))
@example(1)
@example(2)
@example(7)
@example(8)
@example(4096)
def test_what_an_entry_finishes_is_known_without_the_tree(size: int) -> None:
    tree = MerkleTree()
    for _ in range(size - 1):
        tree.append_leaf(merkle.EMPTY)
    assert [(level, index) for level, index, _ in tree.append_leaf(merkle.EMPTY)] == list(
        merkle.completed_subtrees(size)
    )


@given(st.integers(0, 300), st.integers(1, 70))
@example(0, 1)
@example(1, 1)
@example(7, 9)
@example(255, 2)
def test_the_right_edge_alone_grows_the_same_tree(size: int, more: int) -> None:
    tree = grown([str(n).encode() for n in range(size)])
    edge = merkle.Frontier(tree.node, size)
    for number in range(size, size + more):
        hashed = merkle.leaf(str(number).encode())
        assert edge.append_leaf(hashed) == tree.append_leaf(hashed)
    assert edge.size == len(tree)
    assert edge.root() == naive([str(n).encode() for n in range(size + more)])


@pytest.mark.parametrize(("index", "size"), [(-1, 3), (3, 3), (0, 0)])
def test_there_is_no_proof_for_an_entry_that_is_not_there(index: int, size: int) -> None:
    with pytest.raises(ValueError, match="no entry"):
        merkle.inclusion_proof(grown([b"a", b"b", b"c"]).node, index, size)


@given(st.integers(-5, 50), st.integers(-5, 50), st.lists(st.binary(max_size=33), max_size=70))
def test_nonsense_proves_nothing(a: int, b: int, proof: list[bytes]) -> None:
    tree = grown([bytes([n]) for n in range(50)])
    root = root_of(tree.node, 50)
    assert not merkle.proves_inclusion(merkle.leaf(b"not there"), a, b, proof, root)
    assert not merkle.proves_consistency(a, b, proof, merkle.EMPTY, root)


@pytest.mark.parametrize(("old", "new"), [(0, 3), (-1, 3), (4, 3)])
def test_there_is_no_proof_that_a_tree_begins_with_a_larger_or_an_empty_one(
    old: int, new: int
) -> None:
    with pytest.raises(ValueError, match=f"a tree of 3 entries cannot begin with one of {old}"):
        merkle.consistency_proof(grown([b"a", b"b", b"c"]).node, old, new)


def test_bounds_of_what_proves_anything() -> None:
    leaf, short = merkle.leaf(b"a"), bytes(31)
    included, consistent = merkle.proves_inclusion, merkle.proves_consistency
    assert included(leaf, 0, 1, [], leaf)
    assert not included(leaf, 1, 1, [], leaf)
    assert not included(leaf, -1, 1, [], leaf)
    assert not included(leaf, 0, 0, [], leaf)
    assert not included(leaf, 0, 2, [short], merkle.parent(leaf, short))
    other = merkle.leaf(b"b")
    left, right = merkle.parent(leaf, other), merkle.parent(other, leaf)
    assert not included(leaf, 0, 4, [other], left)  # a path that ends below the root
    assert not included(leaf, 0, 1, [other], right)  # and one that goes on above it
    assert not consistent(1, 4, [other], leaf, left)
    tree = grown([b"a", b"b", b"c", b"d"])
    proof = [*merkle.consistency_proof(tree.node, 3, 4), other]
    above = [merkle.parent(other, root_of(tree.node, size)) for size in (3, 4)]
    assert not consistent(3, 4, proof, *above)
    assert consistent(1, 1, [], leaf, leaf)
    assert not consistent(0, 0, [], leaf, leaf)
    assert not consistent(1, 0, [], leaf, leaf)
    assert not consistent(1, 1, [], leaf, merkle.EMPTY)
    assert not consistent(1, 1, [leaf], leaf, leaf)
    assert not consistent(1, 2, [short], leaf, merkle.parent(leaf, short))
    assert not consistent(1, 2, [], leaf, leaf)
    assert not consistent(3, 5, [], leaf, leaf)


@pytest.mark.parametrize(("levels", "proved"), [(63, True), (64, True), (65, False)])
def test_a_proof_has_64_hashes_at_most(levels: int, proved: bool) -> None:
    """The first entry of a tree that nobody can build; only its right half is made up."""
    found = first = merkle.leaf(b"a")
    proof = [merkle.leaf(bytes([level])) for level in range(levels)]
    for sibling in proof:
        found = merkle.parent(found, sibling)
    assert merkle.proves_inclusion(first, 0, 1 << levels, proof, found) is proved
    assert merkle.proves_consistency(1, 1 << levels, proof, first, found) is proved
