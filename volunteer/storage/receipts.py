"""Receipts of payments and signed heads of the record, kept on disk for one coordinator.

    receipts/receipts.jsonl    one signed receipt per line, oldest first
    receipts/seen.json         heads that were checked
    receipts/versions.json     newest version of each run

A line that a crash cut short is ignored and fetched again, since fetching resumes after the last
readable line.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from shared.decoding import MALFORMED, decode
from shared.errors import Configuration, InvalidFrame, StorageFull
from shared.proofs.signing import verify_text
from shared.protocol.transparency import Receipt, RestorePayload, SignedReceipt, TreeHead
from shared.sentences import Sentence
from volunteer.files import private_directory, read_record, set_aside, write_record, write_whole

KEPT_MAX = 10_000  # receipts; the oldest are dropped first, the heads stay
SPARE = 1_000  # further receipts until the file is rewritten
HEADS_MAX = 32
RUNS_MAX = 1_000
LINE_BYTES_MAX = 1 << 16

log = logging.getLogger(__name__)

T = TypeVar("T")


class KeptHead(msgspec.Struct, frozen=True, kw_only=True):
    """Head of the record with the coordinator's signature: evidence."""

    tree: TreeHead
    payload: str
    signature: str


class SignedHeads(msgspec.Struct, frozen=True, kw_only=True):
    """Heads that the coordinator signed so far."""

    heads: tuple[KeptHead, ...] = ()  # smallest first; each continues the previous one
    broken: KeptHead | None = None  # first head that contradicts these heads
    restored_at: float = 0.0  # time of the restore that the coordinator last announced


class Versions(msgspec.Struct, frozen=True, kw_only=True):
    """Newest seen version of each run."""

    newest: dict[str, int] = {}


class ReceiptBook:
    """Receipts of one account, and the heads it has seen."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = folder / "receipts.jsonl"
        self._signed_heads: SignedHeads | None = None
        self._versions: Versions | None = None
        self.unchecked_head: KeptHead | None = None  # head in the newest manifest
        self._last: int | None = None
        self._count = 0

    @property
    def signed_heads(self) -> SignedHeads:
        if self._signed_heads is None:
            self._signed_heads = _read(self.folder / "seen.json", SignedHeads)
        return self._signed_heads

    @property
    def last(self) -> int:
        """Return the number of the last ledger entry with a receipt here."""
        if self._last is None:
            self._last = self._count = 0
            for signed in self.all():
                self._last = max(self._last, _entry_of(signed))
                self._count += 1
        return self._last

    def all(self) -> Iterator[SignedReceipt]:
        """Read every receipt, oldest first; damaged receipts are left out."""
        try:
            file = self._file.open("rb")
        except FileNotFoundError:
            return
        with file:
            while line := file.readline(LINE_BYTES_MAX):
                try:
                    yield decode(line, SignedReceipt)
                except MALFORMED:
                    continue

    def add(self, receipts: Iterable[SignedReceipt]) -> int:
        """Append the missing receipts; return their number. Raises StorageFull, OSError."""
        new = [receipt for receipt in receipts if _entry_of(receipt) > self.last]
        if not new:
            return 0
        private_directory(self.folder)
        lines = b"".join(msgspec.json.encode(receipt) + b"\n" for receipt in new)
        handle = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o600)
        with os.fdopen(handle, "r+b") as file:
            end = file.seek(0, os.SEEK_END)
            if end and (file.seek(end - 1), file.read(1))[1] != b"\n":
                lines = b"\n" + lines  # the previous line was cut short
            file.seek(0, os.SEEK_END)
            file.write(lines)
        self._last = _entry_of(new[-1])
        self._count += len(new)
        if self._count > KEPT_MAX + SPARE:
            self._shorten()
        return len(new)

    def keep(self, head: KeptHead) -> None:
        """Store a head that continues the newest one. If there are then more than HEADS_MAX heads,
        every second head is dropped.
        """
        heads = [*self.signed_heads.heads, head]
        if len(heads) > HEADS_MAX:
            heads = [*heads[:-1:2], head]
        self._remember(msgspec.structs.replace(self.signed_heads, heads=tuple(heads)))

    def keep_contradiction(self, head: KeptHead) -> None:
        """Store a head that contradicts the others, as evidence; only the first is kept."""
        if self.signed_heads.broken is None:
            self._remember(msgspec.structs.replace(self.signed_heads, broken=head))

    def newest(self, run: str) -> int:
        """Return the newest seen version of a run; -1 if no version was seen."""
        if self._versions is None:
            self._versions = _read(self.folder / "versions.json", Versions)
        return self._versions.newest.get(run, -1)

    def note_version(self, run: str, version: int) -> None:
        """Store the newest version of a run."""
        if version > self.newest(run):
            assert self._versions is not None  # `newest` has read it
            other_runs = {name: at for name, at in self._versions.newest.items() if name != run}
            recent = dict([*other_runs.items()][-(RUNS_MAX - 1) :])
            self._versions = Versions(newest=recent | {run: version})
            self._write("versions.json", self._versions)

    def start_anew(self) -> Path | None:
        """Set the whole folder aside and start anew; return where it is now, None if there was no
        folder. Raises Configuration if a thousand such folders exist.
        """
        if not self.folder.exists():
            return None
        for number in range(1, 1000):
            aside = self.folder.with_name(f"{self.folder.name}.{number}")
            if not aside.exists():
                self.folder.replace(aside)
                self._signed_heads = self._versions = self._last = self.unchecked_head = None
                return aside
        raise Configuration(
            Sentence(
                "{parent} holds a thousand old records: move them away", parent=self.folder.parent
            )
        )

    def apply_restore(self, to: RestorePayload) -> Path | None:
        """Start anew after a restore of the coordinator from a backup, but keep the heads that its
        record must still continue, and the versions that it still has.

        Return the folder set aside, None if this statement was applied before.
        """
        if to.tree.at <= self.signed_heads.restored_at:
            return None
        stays = tuple(head for head in self.signed_heads.heads if head.tree.size <= to.tree.size)
        self.newest("")  # loads the versions
        assert self._versions is not None
        before = self._versions.newest
        newest = {run: min(at, to.heads[run]) for run, at in before.items() if run in to.heads}
        aside = self.start_anew()
        self._versions = Versions(newest=newest)
        self._write("versions.json", self._versions)
        self._remember(SignedHeads(heads=stays, restored_at=to.tree.at))
        return aside

    def _remember(self, state: SignedHeads) -> None:
        self._signed_heads = state
        self._write("seen.json", state)

    def _write(self, name: str, record: msgspec.Struct) -> None:
        """Write a record; if the disk is full, the next change writes it."""
        private_directory(self.folder)
        try:
            write_record(self.folder / name, record)
        except StorageFull as error:
            log.warning("not remembered: %s", error.message)

    def _shorten(self) -> None:
        receipts = [*self.all()][-KEPT_MAX:]
        lines = b"".join(msgspec.json.encode(receipt) + b"\n" for receipt in receipts)
        write_whole(self._file, lines)
        self._count = len(receipts)


def read_receipt(signed: SignedReceipt, public_key: str) -> Receipt:
    """Return the content of a receipt. Raises BadSignature, InvalidFrame."""
    verify_text(public_key, signed.payload, signed.signature)
    try:
        return decode(signed.payload, Receipt)
    except MALFORMED as error:
        raise InvalidFrame(Sentence("a receipt cannot be read: {error}", error=error)) from error


def _read(path: Path, kind: type[T]) -> T:
    """Return the stored record, or an empty one if it is missing or damaged."""
    try:
        return read_record(path, kind) or kind()
    except Configuration:
        set_aside(path)
        return kind()


def evenly_spaced(heads: Sequence[KeptHead], most: int) -> list[KeptHead]:
    """Return at most `most` evenly spaced heads, with the last, and the first unless `most` is
    1.
    """
    if len(heads) <= most:
        return list(heads)
    gap = (len(heads) - 1) / max(1, most - 1)
    return [heads[-1 - round(at * gap)] for at in reversed(range(most))]


def _entry_of(signed: SignedReceipt) -> int:
    try:
        return decode(signed.payload, Receipt).entry.id
    except MALFORMED:
        return 0
