"""Checks of the coordinator's record: of each receipt, and of the stored signed heads against the
present head. A head is the number and the root hash of all entries at one time.

A coordinator that changes or removes an entry covered by a signed head cannot prove that a later
head is consistent with it, so every volunteer who stored that head notices.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from shared.decoding import MALFORMED, decode
from shared.errors import BadRequest, BadSignature, InvalidFrame, NotFound
from shared.proofs.signing import verify_text
from shared.protocol import endpoints
from shared.protocol.transparency import (
    PAID,
    RECEIPTS_MAX,
    HeadPayload,
    Receipt,
    RestorePayload,
    SignedReceipt,
    TreeHead,
    continues,
    credited,
    includes,
)
from shared.sentences import Sentence
from volunteer.net.api import Api
from volunteer.storage.receipts import KeptHead, ReceiptBook, evenly_spaced, read_receipt

CHECKED_MAX = 32  # most stored heads that one check compares with the present one
SKEW_S = 60.0  # largest difference between the clocks of two replicas of the coordinator
FETCHES_MAX = 50  # most pages of receipts that one `fetch` requests


class CheckedReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """Receipt with its fault; "" if it is correct."""

    receipt: Receipt | None
    problem: str


def check_receipt(signed: SignedReceipt, public_key: str, volunteer: str) -> CheckedReceipt:
    """Check one receipt's signature, content and inclusion, without the network."""
    try:
        receipt = read_receipt(signed, public_key)
    except (BadSignature, InvalidFrame) as error:
        return CheckedReceipt(receipt=None, problem=error.message)
    entry = receipt.entry
    if receipt.volunteer != volunteer:
        problem: str = Sentence("it belongs to another account")
    elif entry.contribution_id != receipt.contribution:
        problem = Sentence("its entry belongs to another contribution")
    elif entry.kind not in PAID or (receipt.contribution is None) != ("answer" in entry.kind):
        problem = Sentence("its entry is of another kind")
    elif credited(entry, volunteer) != receipt.credits_micro:
        problem = Sentence("its entry names another amount")
    elif not includes(receipt):
        problem = Sentence("its entry is not in the record whose head it names")
    else:
        problem = ""
    return CheckedReceipt(receipt=receipt, problem=problem)


def contradiction(heads: Sequence[TreeHead]) -> str:
    """Return a sentence if two signed heads of the same size differ, else ""."""
    roots: dict[int, TreeHead] = {}
    for head in heads:
        other = roots.setdefault(head.size, head)
        if other.root != head.root:
            return Sentence(
                "the coordinator signed two different records of {size} entries, on {day} and "
                "on {day2}: it rewrote its history",
                size=head.size,
                day=day(other.at),
                day2=day(head.at),
            )
    return ""


class RecordCheck:
    """Fetches receipts and heads of one coordinator and compares them with the stored ones."""

    def __init__(self, api: Api, book: ReceiptBook, public_key: str, volunteer: str) -> None:
        self._api = api
        self._book = book
        self._key = public_key
        self._volunteer = volunteer

    async def fetch(self) -> str:
        """Fetch new receipts. Return a sentence if one is wrong, else "".

        Raises NotFound if the coordinator is too old to give receipts, Unreachable.
        """
        for _ in range(FETCHES_MAX):
            receipts = await self._api.query(endpoints.RECEIPTS, cursor=self._book.last)
            for signed in receipts:
                check = check_receipt(signed, self._key, self._volunteer)
                if check.problem:
                    return Sentence(
                        "the coordinator sent a wrong receipt: {problem}", problem=check.problem
                    )
            added = self._book.add(receipts)
            if added and (problem := await self.compare_and_store(_head_of(receipts[-1]))):
                return problem
            if not added or len(receipts) < RECEIPTS_MAX:
                break
        return ""

    async def present_head(self) -> KeptHead:
        """Return the present head. Raises BadSignature, InvalidFrame, Unreachable."""
        signed = await self._api.query(endpoints.TREE_HEAD)
        verify_text(self._key, signed.payload, signed.signature)
        try:
            tree = decode(signed.payload, HeadPayload).tree
        except MALFORMED as error:
            raise InvalidFrame(
                Sentence("the head of the record cannot be read: {error}", error=error)
            ) from error
        return KeptHead(tree=tree, payload=signed.payload, signature=signed.signature)

    async def check(self) -> str:
        """Compare the present head, and the head in the newest manifest, with the newest stored
        head.

        Returns a sentence if the record was rewritten, else "".
        """
        head, self._book.unchecked_head = self._book.unchecked_head, None
        if head is not None and (problem := await self.compare_and_store(head)):
            return problem
        return await self.compare_and_store(await self.present_head())

    async def check_all(self) -> str:
        """Compare stored heads of all ages with the present head; return as `check` does."""
        record = self._book.signed_heads
        now = await self.present_head()
        heads = [*record.heads, *((record.broken,) if record.broken else ())]
        if problem := contradiction([head.tree for head in [*heads, now]]):
            self._book.keep_contradiction(now)
            return problem
        for old in evenly_spaced(heads, CHECKED_MAX):
            if problem := await self._compare(old, now):
                self._book.keep_contradiction(now)
                return problem
        return await self.compare_and_store(now)

    async def compare_and_store(self, new: KeptHead) -> str:
        """Compare a signed head with the newest stored head, and store it if it is larger and
        continues the stored head. Return "", or a sentence if the two heads contradict each other;
        `new` is then stored as evidence.
        """
        heads = self._book.signed_heads.heads
        newest = heads[-1] if heads else None
        if newest is None:
            if new.tree.size:
                self._book.keep(new)
            return ""
        if new.tree.size < newest.tree.size and new.tree.at < newest.tree.at + SKEW_S:
            old, late = new, newest  # an older head arrived late
        else:
            old, late = newest, new
        if problem := await self._compare(old, late):
            self._book.keep_contradiction(new)
            return problem
        if new.tree.size > newest.tree.size:
            self._book.keep(new)
        return ""

    async def accept_restore(self) -> str:
        """Accept the coordinator's new statement that it was restored from a backup. Return a
        sentence for the owner, else "". Raises BadSignature, InvalidFrame, Unreachable.
        """
        signed = (await self._api.call(endpoints.SERVER)).restored
        if signed is None:
            return ""
        verify_text(self._key, signed.payload, signed.signature)
        try:
            to = decode(signed.payload, RestorePayload)
        except MALFORMED as error:
            raise InvalidFrame(
                Sentence("the head of the record cannot be read: {error}", error=error)
            ) from error
        aside = self._book.apply_restore(to)
        if aside is None:
            return ""
        return Sentence(
            "the coordinator was restored on {day} from a backup of {day2}: {heads}; what it "
            "signed since, with your receipts, is kept in {folder}",
            day=day(to.tree.at),
            day2=day(to.saved_at),
            heads=", ".join(f"{run} {version}" for run, version in sorted(to.heads.items())),
            folder=aside,
        )

    async def _compare(self, old: KeptHead, new: KeptHead) -> str:
        """Return "" if the record of `new` is proved to begin with the record of `old`, else a
        sentence for the owner.
        """
        before, now = old.tree, new.tree
        if now.size < before.size:
            return _rewrite_sentence(old, now)
        if now.size == before.size:
            return "" if now.root == before.root else _rewrite_sentence(old, now)
        if not before.size:
            return ""
        try:
            proof = await self._api.query(endpoints.CONSISTENCY, old=before.size, new=now.size)
        except (NotFound, BadRequest):
            return _rewrite_sentence(old, now)
        return "" if continues(before, now, proof) else _rewrite_sentence(old, now)


def _rewrite_sentence(old: KeptHead, now: TreeHead) -> str:
    """Return the sentence about a record that does not continue its older head."""
    sentence = Sentence(
        "the record of {size} entries that it signed on {day}",
        size=old.tree.size,
        day=day(old.tree.at),
    )
    if now.size < old.tree.size:
        return Sentence(
            "the coordinator rewrote its history: {said} has only {size} now",
            said=sentence,
            size=now.size,
        )
    return Sentence(
        "the coordinator rewrote its history: its record no longer begins with {said}",
        said=sentence,
    )


def _head_of(signed: SignedReceipt) -> KeptHead:
    tree = decode(signed.payload, Receipt).tree
    return KeptHead(tree=tree, payload=signed.payload, signature=signed.signature)


def day(at: float) -> str:
    """Return a time as UTC day and minute; "an unknown day" if no calendar has it."""
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M")
    except (OverflowError, ValueError, OSError):
        return Sentence("an unknown day")
