"""Record of the coordinator as a Merkle tree: heads, proofs, and receipts of payments.

The entries of the ledger and the lines of the record are the leaves of one tree (RFC 9162), in the
order in which they were sealed. A head states the number of entries and their root; whoever keeps a
head can demand a proof that the entries under it are still there, unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shared.proofs import merkle
from shared.protocol.base import Message

Hash = Annotated[str, Meta(max_length=2 * merkle.HASH_BYTES)]  # hex
Hashes = Annotated[tuple[Hash, ...], Meta(max_length=merkle.PROOF_MAX + 1)]
Places = Annotated[int, Meta(ge=0, le=2**63 - 1)]  # number of leaves, or index of a leaf
PAID = ("earn", "escrow", "vest", "answer", "answered")  # kinds of entries with a receipt
RECEIPTS_MAX = 100  # receipts in one reply


class TreeHead(Message):
    """Number of entries of the record, and their root."""

    size: Places
    root: Hash
    at: float


class SignedHead(Message):
    payload: str  # canonical JSON of a HeadPayload
    signature: str  # hex


class HeadPayload(Message, kw_only=True):
    """Signed content of a head; `kind` distinguishes it from all other signed payloads."""

    kind: Literal["tree-head"] = "tree-head"
    tree: TreeHead


class RestorePayload(Message, kw_only=True):
    """Signed statement of a restored coordinator: runs, record, time (`tree.at`)."""

    kind: Literal["restore"] = "restore"
    heads: dict[str, int]  # newest version of each run
    tree: TreeHead
    saved_at: float


class SignedRestore(Message):
    payload: str  # canonical JSON of a RestorePayload
    signature: str  # hex


class TreeProof(Message):
    """Proof of consistency: the record of `size` entries begins with that of a smaller size."""

    size: Places
    hashes: Hashes


class LedgerEntry(Message):
    """Entry of the ledger: the values whose hash is the entry's leaf in the tree."""

    id: int
    key: str
    kind: str
    run_id: int | None
    contribution_id: int | None
    memo: str
    at: float
    moves: tuple[tuple[str, str, int], ...]  # owner, kind of account, micro-credits


class Receipt(Message, kw_only=True):
    """Receipt of a payment, signed by the coordinator."""

    kind: Literal["receipt"] = "receipt"
    volunteer: str
    run: str
    contribution: int | None  # None = pay for an answer to a prompt
    version: int | None  # version that contains the work; None for work that needs no merge
    credits_micro: int
    entry: LedgerEntry
    leaf: Places  # index of the entry's leaf in the tree
    proof: Hashes
    tree: TreeHead


class SignedReceipt(Message):
    payload: str  # canonical JSON of a Receipt
    signature: str  # hex


def leaf_hash(log: str, fields: Sequence[object]) -> bytes:
    """Return the hash of the leaf for a row of a log ("events" or "record") with these fields."""
    return merkle.leaf(msgspec.json.encode([log, *fields]))


def ledger_leaf(entry: LedgerEntry) -> bytes:
    """Return the hash of the leaf for an entry of the ledger."""
    moves = sorted(entry.moves)
    fields = [entry.key, entry.kind, entry.run_id, entry.contribution_id, entry.memo, moves]
    digest = sha256(msgspec.json.encode(fields)).hexdigest()
    return leaf_hash("events", [entry.id, entry.key, digest, entry.at])


def credited(entry: LedgerEntry, volunteer: str) -> int:
    """Return the credits that an entry adds to a volunteer's accounts, debits left out."""
    return sum(amount for owner, _, amount in entry.moves if owner == volunteer and amount > 0)


def includes(receipt: Receipt) -> bool:
    """Return True if a receipt's entry is in the tree of its head."""
    tree = receipt.tree
    try:
        proof, root = [*map(bytes.fromhex, receipt.proof)], bytes.fromhex(tree.root)
    except ValueError:
        return False
    leaf = ledger_leaf(receipt.entry)
    return merkle.proves_inclusion(leaf, receipt.leaf, tree.size, proof, root)


def continues(old: TreeHead, new: TreeHead, proof: TreeProof) -> bool:
    """Return True if the record of the head `new` begins with that of `old`."""
    try:
        hashes = [*map(bytes.fromhex, proof.hashes)]
        before, after = bytes.fromhex(old.root), bytes.fromhex(new.root)
    except ValueError:
        return False
    if not old.size:
        return before == merkle.EMPTY
    return merkle.proves_consistency(old.size, new.size, hashes, before, after)
