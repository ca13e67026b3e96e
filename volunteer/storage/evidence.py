"""Evidence: the states that finished tasks can be recomputed from, kept until the coordinator has
chosen which ones it wants.

A file is named by its SHA-256 and linked, not copied; a record names the files of each result.
Unreferenced files are deleted, except the newest few of each device, which its next tasks begin
with.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from shared.errors import Configuration
from shared.files.disk_writes import PARTIAL_SUFFIX
from shared.sentences import Sentence
from volunteer.files import private_directory, read_record, write_record
from volunteer.storage.outbox import NAME

NEWEST = 3  # states of one device kept without a record


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Files of one result; `contribution` is 0 until the coordinator asks for them."""

    name: str  # name of the result
    files: tuple[str, ...]  # SHA-256
    contribution: int = 0


class EvidenceFiles:
    """Directory of evidence files. Any thread may call it.

    `known` returns False for a result that a killed process never finished.
    """

    def __init__(self, root: Path, known: Callable[[str], bool] = lambda name: True) -> None:
        self.root = private_directory(root)
        self._guard = threading.Lock()
        self._newest: defaultdict[str, deque[str]] = defaultdict(lambda: deque(maxlen=NEWEST))
        self._requests: dict[str, Request] = {}
        for path in root.glob("*.json"):
            with contextlib.suppress(Configuration):
                found = read_record(path, Request)
                if found is not None and (found.contribution or known(found.name)):
                    self._requests[found.name] = found
                else:
                    path.unlink(missing_ok=True)
        with self._guard:
            self._collect()

    def add(self, path: Path, owner: str) -> str:
        """Store a file under its SHA-256; return the hash, "" if that fails."""
        try:
            with path.open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            with self._guard:
                if not self.file(sha256).exists():
                    self._link(path, sha256)
                self._newest[owner].append(sha256)
                self._collect()
        except OSError:
            return ""
        return sha256

    def file(self, sha256: str) -> Path:
        """Return the path of a file."""
        return self.root / f"{sha256}.safetensors"

    def keep(self, name: str, files: tuple[str, ...]) -> None:
        """Keep files until the verdict on a result."""
        named = tuple(sha256 for sha256 in files if sha256)
        if named:
            with self._guard:
                self._note(Request(name=name, files=named))

    def ask(self, contribution: int, files: tuple[str, ...]) -> None:
        """Keep the files that the coordinator asks for until they are revealed."""
        with self._guard:
            found = (one.name for one in self._requests.values() if {*files} <= {*one.files})
            if (name := next(found, "")) and files:
                self._note(Request(name=name, files=files, contribution=contribution))
            self._collect()

    def drop(self, name: str) -> None:
        """Release the files of a result."""
        with self._guard:
            if self._requests.pop(name, None) is not None:
                self._record(name).unlink(missing_ok=True)
                self._collect()

    def asked(self) -> tuple[Request, ...]:
        """Return the requests whose files are to be revealed."""
        with self._guard:
            return tuple(one for one in self._requests.values() if one.contribution)

    def _note(self, request: Request) -> None:
        if not NAME.fullmatch(request.name):
            raise Configuration(
                Sentence("{name} is not the name of a result", name=repr(request.name))
            )
        with contextlib.suppress(OSError):  # on a full disk it is kept only until the program ends
            write_record(self._record(request.name), request)
        self._requests[request.name] = request

    def _record(self, name: str) -> Path:
        return self.root / f"{name}.json"

    def _link(self, path: Path, sha256: str) -> None:
        partial = self.root / f"{sha256}{PARTIAL_SUFFIX}"
        partial.unlink(missing_ok=True)
        try:
            os.link(path, partial)
        except OSError:  # a file system without links
            shutil.copyfile(path, partial)
        partial.replace(self.file(sha256))

    def _collect(self) -> None:
        """Delete the unreferenced files."""
        kept = {sha256 for one in self._requests.values() for sha256 in one.files}
        kept.update(sha256 for newest in self._newest.values() for sha256 in newest)
        for path in self.root.iterdir():
            orphan = path.suffix == ".safetensors" and path.stem not in kept
            if orphan or path.name.endswith(PARTIAL_SUFFIX):
                path.unlink(missing_ok=True)
