"""Outbox: finished results that the coordinator has not answered yet. Each is on disk before its
first byte is sent.

An entry is two files: the update, and a record that makes it valid. The record is written last and
deleted first. Only a final answer drops an entry, so a result survives restarts and lost replies;
sending it twice is harmless, since submitting is unique on (task, attempt, part, tries).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from shared.errors import Configuration
from shared.files.deletions import delete_file
from shared.files.disk_writes import PARTIAL_SUFFIX
from shared.protocol.contributions import SubmitRequest
from shared.sentences import Sentence
from volunteer.files import private_directory, read_record, set_aside, write_record

ENTRIES_MAX = 256
NAME = re.compile(r"[0-9]+-[0-9]+-[0-9]+-[0-9]+")


class QueuedResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result waiting to be submitted."""

    task: int
    run: str
    device: str
    submit: SubmitRequest
    price_micro: int
    at: float
    last: bool = True  # last result of its lease

    @property
    def name(self) -> str:
        request = self.submit
        return f"{self.task}-{request.attempt}-{request.part}-{request.tries}"


class Outbox:
    """Directory of queued results. Its calls block on the disk."""

    def __init__(self, root: Path, warn: Callable[[str], None] = lambda sentence: None) -> None:
        self.root = private_directory(root)
        self._guard = threading.Lock()  # training threads put, the event loop reads and drops
        self._entries: dict[str, QueuedResult] = {}
        for path in sorted(root.glob("*.json")):
            try:
                entry = read_record(path, QueuedResult)
            except Configuration as error:
                warn(
                    Sentence(
                        "a result cannot be read and is kept in {place}: {error}",
                        place=set_aside(path),
                        error=error.message,
                    )
                )
                continue
            if entry is not None and self.payload(entry.name).exists():
                self._entries[entry.name] = entry
            else:
                delete_file(path, "scratch")
        self._sweep()

    def entries(self) -> tuple[QueuedResult, ...]:
        """Return the entries, oldest first."""
        with self._guard:
            return tuple(sorted(self._entries.values(), key=lambda entry: (entry.at, entry.name)))

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    @property
    def full(self) -> bool:
        """Return True while too many results wait, so that no new work should begin."""
        return len(self._entries) >= ENTRIES_MAX

    def holds(self, task: int, attempt: int) -> bool:
        """Return True if a result of this lease waits here."""
        return any((e.task, e.submit.attempt) == (task, attempt) for e in self.entries())

    def payload(self, name: str) -> Path:
        """Return the path of an entry's update; write it, durably, before `put`. Raises
        Configuration for an invalid name.
        """
        if not NAME.fullmatch(name):
            raise Configuration(Sentence("{name} is not the name of a result", name=repr(name)))
        return self.root / f"{name}.safetensors"

    def put(self, entry: QueuedResult) -> None:
        """Store a result, which then survives a power cut. Raises Configuration if its update is
        missing, StorageFull, OSError.
        """
        if not self.payload(entry.name).exists():
            raise Configuration(
                Sentence("the update of the result {name} is missing", name=entry.name)
            )
        write_record(self._record(entry.name), entry, durable=True)
        with self._guard:
            self._entries[entry.name] = entry

    def drop(self, entry: QueuedResult) -> None:
        """Delete a result after the coordinator's final answer."""
        delete_file(self._record(entry.name), "settled")
        delete_file(self.payload(entry.name), "settled")
        with self._guard:
            self._entries.pop(entry.name, None)

    def _record(self, name: str) -> Path:
        return self.root / f"{name}.json"

    def _sweep(self) -> None:
        """Delete updates whose record was never written, and files that ended processes left."""
        aside = {path.name.partition(".")[0] for path in self.root.glob("*.json.*")}
        for path in self.root.iterdir():
            orphan = path.suffix == ".safetensors" and path.stem not in {*self._entries, *aside}
            if orphan or path.name.endswith(PARTIAL_SUFFIX):
                delete_file(path, "scratch")
