"""A volunteer against coordinators that keep their record, cut it, fork it, or rewrite it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.errors import BadSignature, NotFound
from shared.proofs import merkle
from shared.proofs.signing import SigningKey, canonical
from shared.protocol import endpoints
from shared.protocol.endpoint import Endpoint
from shared.protocol.transparency import (
    HeadPayload,
    LedgerEntry,
    Receipt,
    SignedHead,
    SignedReceipt,
    TreeHead,
    TreeProof,
    ledger_leaf,
)
from tests.support.merkle_tree import MerkleTree
from volunteer.account.record_check import SKEW_S, RecordCheck, check_receipt, contradiction
from volunteer.storage.receipts import HEADS_MAX, KeptHead, ReceiptBook, evenly_spaced

ME = "volunteer-mia-000001"


class Coordinator:
    """A record in memory, and what an `Api` answers about it."""

    def __init__(self, key: SigningKey) -> None:
        self.key = key
        self.entries: list[LedgerEntry] = []
        self.now = 1000.0
        self.count = 0

    def pay(self, count: int = 1) -> None:
        for _ in range(count):
            self.count += 1
            number = self.count
            moves = ((ME, "pending", -5), (ME, "earned", 5))
            self.entries.append(
                LedgerEntry(
                    id=number,
                    key=f"earn:{number}",
                    kind="earn",
                    run_id=1,
                    contribution_id=number,
                    memo="",
                    at=float(number),
                    moves=moves,
                )
            )
            self.now += 100.0

    def tree(self) -> MerkleTree:
        tree = MerkleTree()
        for entry in self.entries:
            tree.append_leaf(ledger_leaf(entry))
        return tree

    def head(self) -> TreeHead:
        tree = self.tree()
        root = merkle.Frontier(tree.node, len(tree)).root().hex()
        return TreeHead(size=len(tree), root=root, at=self.now)

    def signed(self, payload: bytes) -> dict[str, str]:
        return {"payload": payload.decode(), "signature": self.key.sign(payload).hex()}

    async def query(self, endpoint: Endpoint[Any], **args: Any) -> Any:
        answers: dict[Endpoint[Any], Callable[..., Any]] = {
            endpoints.TREE_HEAD: self.tree_head,
            endpoints.CONSISTENCY: self.consistency,
            endpoints.RECEIPTS: self.receipts,
        }
        return answers[endpoint](**args)

    def tree_head(self) -> SignedHead:
        return SignedHead(**self.signed(canonical(HeadPayload(tree=self.head()))))

    def consistency(self, old: int, new: int) -> TreeProof:
        tree = self.tree()
        if new > len(tree):
            raise NotFound
        hashes = merkle.consistency_proof(tree.node, old, new)
        return TreeProof(size=new, hashes=tuple(each.hex() for each in hashes))

    def receipts(self, cursor: int) -> tuple[SignedReceipt, ...]:
        return tuple(
            SignedReceipt(**self.signed(canonical(self.receipt(entry))))
            for entry in self.entries[cursor : cursor + 100]
        )

    def receipt(self, entry: LedgerEntry, **other: Any) -> Receipt:
        tree, place = self.tree(), self.entries.index(entry)
        proof = merkle.inclusion_proof(tree.node, place, len(tree))
        values: dict[str, Any] = {
            "volunteer": ME, "run": "r", "contribution": entry.contribution_id, "version": 1,
            "credits_micro": 5, "entry": entry, "leaf": place,
            "proof": tuple(each.hex() for each in proof), "tree": self.head(),
        }  # fmt: skip
        return Receipt(**values | other)


@pytest.fixture
def key(tmp_path: Path) -> SigningKey:
    return SigningKey.load_or_create(tmp_path / "key")


@pytest.fixture
def server(key: SigningKey) -> Coordinator:
    return Coordinator(key)


def volunteer(server: Coordinator, folder: Path) -> tuple[RecordCheck, ReceiptBook]:
    book = ReceiptBook(folder)
    api: Any = server
    return RecordCheck(api, book, server.key.public_key.hex(), ME), book


def test_an_honest_record_that_grows_is_never_accused(server: Coordinator, tmp_path: Path) -> None:
    async def grow() -> None:
        check, book = volunteer(server, tmp_path / "receipts")
        assert await check.check() == ""  # of an empty record no head is kept
        for _ in range(120):
            server.pay(3)
            assert await check.fetch() == ""
            assert await check.check() == ""
        assert await check.check_all() == ""
        assert book.last == 360
        assert len([*book.all()]) == 360
        assert len(book.signed_heads.heads) <= HEADS_MAX
        assert (book.signed_heads.heads[0].tree.size, book.signed_heads.heads[-1].tree.size) == (
            3,
            360,
        )

    asyncio.run(grow())


def test_several_pages_are_fetched_once_and_a_restart_goes_on(
    server: Coordinator, tmp_path: Path
) -> None:
    async def run() -> None:
        server.pay(250)
        check, book = volunteer(server, tmp_path / "receipts")
        assert await check.fetch() == ""
        assert book.last == 250
        with (tmp_path / "receipts" / "receipts.jsonl").open("ab") as file:
            file.write(b'{"payload": "torn')
        server.pay()
        check, book = volunteer(server, tmp_path / "receipts")
        for _ in range(2):
            assert await check.fetch() == ""
        assert [check_receipt(each, server.key.public_key.hex(), ME).problem
                for each in book.all()] == [""] * 251  # fmt: skip
        assert volunteer(server, tmp_path / "receipts")[1].last == 251

    asyncio.run(run())


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kept=st.integers(1, 40), more=st.integers(0, 40), seed=st.integers(0, 1 << 30))
def test_any_rewritten_history_is_noticed(
    key: SigningKey, tmp_path_factory: pytest.TempPathFactory, kept: int, more: int, seed: int
) -> None:
    """Change, remove, insert or swap entries under a head that was kept, then go on."""
    rng, server = random.Random(seed), Coordinator(key)
    folder = tmp_path_factory.mktemp("home") / "receipts"

    async def run() -> None:
        server.pay(kept)
        check, book = volunteer(server, folder)
        assert await check.fetch() == ""
        at = rng.randrange(kept)
        other = Coordinator(key)
        other.pay(kept + 1)
        match rng.randrange(3):
            case 0:
                del server.entries[at]
            case 1:
                server.entries.insert(at, other.entries[-1])
            case _:
                server.entries[at] = other.entries[-1]
        server.now += SKEW_S
        server.pay(more)
        said = await check.check()
        assert "rewrote its history" in said
        assert book.signed_heads.broken is not None
        for _ in range(2):
            assert "rewrote its history" in await volunteer(server, folder)[0].check_all()
        assert volunteer(server, folder)[1].start_anew() is not None
        assert await volunteer(server, folder)[0].check_all() == ""

    asyncio.run(run())


def test_a_head_that_comes_late_is_no_accusation(server: Coordinator, tmp_path: Path) -> None:
    async def run() -> None:
        check, book = volunteer(server, tmp_path / "receipts")
        server.pay(4)
        old = await check.present_head()
        server.pay(3)
        assert await check.check() == ""
        book.unchecked_head = old
        assert await check.check() == ""
        assert book.signed_heads.broken is None

    asyncio.run(run())


def test_two_records_at_once_are_noticed_whichever_is_seen_first(
    server: Coordinator, key: SigningKey, tmp_path: Path
) -> None:
    async def run() -> None:
        other = Coordinator(key)
        for each in (server, other):
            each.pay(6)
        other.entries[2] = server.receipt(server.entries[3]).entry
        check, book = volunteer(server, tmp_path / "receipts")
        assert await check.check() == ""
        book.unchecked_head = await volunteer(other, tmp_path / "other")[0].present_head()
        assert "rewrote its history" in await check.check()
        assert contradiction([server.head(), other.head()]) != ""
        assert contradiction([server.head(), server.head()]) == ""

    asyncio.run(run())


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"volunteer": "volunteer-eve-000001"}, "to another account"),
        ({"contribution": 9}, "to another contribution"),
        ({"credits_micro": 6}, "names another amount"),
        ({"leaf": 1}, "not in the record"),
        ({"proof": ()}, "not in the record"),
        ({"kind": "tree-head"}, "cannot be read"),
    ],
)
def test_a_receipt_that_says_something_else_is_wrong(
    server: Coordinator, tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    server.pay(3)
    payload = canonical(server.receipt(server.entries[0], **changes))
    signed = SignedReceipt(**server.signed(payload))
    key = server.key.public_key.hex()
    assert problem in check_receipt(signed, key, ME).problem
    foreign = SignedReceipt(payload=signed.payload, signature="00" * 64)
    assert "signature" in check_receipt(foreign, key, ME).problem
    assert "signature" in check_receipt(
        SignedReceipt(payload=signed.payload, signature="no hex"), key, ME
    ).problem  # fmt: skip

    def receipts(cursor: int) -> tuple[SignedReceipt, ...]:
        return (signed,)

    async def run() -> None:
        server.receipts = receipts  # type: ignore[method-assign]
        check, book = volunteer(server, tmp_path / "receipts")
        assert "wrong receipt" in await check.fetch()
        assert [*book.all()] == []

    asyncio.run(run())


def test_a_head_of_another_key_is_refused(
    server: Coordinator, key: SigningKey, tmp_path: Path
) -> None:
    check, _ = volunteer(server, tmp_path / "receipts")
    server.key = SigningKey.load_or_create(tmp_path / "another")
    with pytest.raises(BadSignature):
        asyncio.run(check.check())


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8])
def test_no_more_heads_are_compared_than_asked_for(most: int) -> None:
    heads = [
        KeptHead(tree=TreeHead(size=size, root="", at=0.0), payload="", signature="")
        for size in range(8)
    ]
    sizes = [head.tree.size for head in evenly_spaced(heads, most)]
    assert len(sizes) == len(set(sizes)) == most
    assert sizes[-1] == 7  # the newest is always one of them
    assert most == 1 or sizes[0] == 0
