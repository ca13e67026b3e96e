"""Own data of this machine for runs whose data stay with their members.

    members/<run>/data.json           record of the data in use
    members/<run>/<build>/<sha256>    chunks, held-out part and assets of one build

Neither a file below this folder nor its name is ever sent. What leaves the machine are the numbers
in `OwnRecord.numbers`, losses on the data, and the updates that are trained on it.

The folder of a run is named by the hash of the run's name, because a coordinator chose that name.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
from msgspec.structs import replace

from shared.errors import BadRequest, Configuration, VolunteerError
from shared.files.deletions import delete_folder
from shared.proofs.signing import digest
from shared.protocol.members import MemberData
from shared.sentences import Sentence
from shared.workloads.base import ChunkRef, DatasetManifest
from volunteer.files import (
    RECORD_BYTES_MAX,
    private_directory,
    read_record,
    write_record,
    write_whole,
)
from volunteer.storage.blob_cache import hash_of

RECORD = "data.json"


class OwnDataUnusable(VolunteerError):
    """Raised when the own data of this machine cannot serve a run."""


class OwnRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Own data for one run: the manifest of its files on this machine, and the numbers that are
    declared to the coordinator.
    """

    run: str
    build: str  # folder of the files
    manifest: DatasetManifest
    numbers: MemberData  # numbers that are declared, with the edition of these chunks
    at: float  # time when the data were added

    @property
    def refs(self) -> tuple[ChunkRef, ...]:
        """Return every file of the data."""
        manifest = self.manifest
        return (*manifest.chunks, *manifest.heldout, *manifest.assets.values())

    @property
    def size(self) -> int:
        """Return the bytes of all files."""
        return sum(ref.size for ref in self.refs)


class OwnBuild:
    """Files of a build that is not in use yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, data: bytes) -> str:
        """Store a chunk; return its SHA-256. Raises StorageFull, OSError."""
        name = digest(data)
        write_whole(self.folder / name, data)
        return name


class OwnData:
    """Own data of one account on this machine, by run."""

    def __init__(self, root: Path) -> None:
        self.root = root  # made with the first data
        # Version whose held-out loss was measured last, by run.
        self.measured: dict[str, int] = {}
        self._verified: dict[Path, tuple[int, int]] = {}  # inode and mtime when verified

    def place(self, run: str) -> Path:
        """Return the folder of a run's data."""
        return self.root / digest(run.encode())[:16]

    def records(self) -> tuple[OwnRecord, ...]:
        """Return the readable records, by run."""
        records = []
        for path in sorted(self.root.glob(f"*/{RECORD}")):
            try:
                record = read_record(path, OwnRecord)
            except Configuration:
                continue  # its run reports the damage
            if record is not None:
                records.append(record)
        return tuple(sorted(records, key=lambda record: record.run))

    def record(self, run: str) -> OwnRecord:
        """Return the data for a run. Raises OwnDataUnusable."""
        try:
            record = read_record(self.place(run) / RECORD, OwnRecord)
        except Configuration as error:
            raise OwnDataUnusable(_add_again_sentence(run, damaged=True)) from error
        if record is None or record.run != run:
            raise OwnDataUnusable(_add_again_sentence(run, damaged=False))
        return record

    @contextmanager
    def building(self, run: str) -> Iterator[OwnBuild]:
        """Make the folder of a build, deleted at the end unless `use` was called."""
        place = private_directory(private_directory(self.root) / self.place(run).name)
        folder = private_directory(place / secrets.token_hex(8))
        try:
            yield OwnBuild(folder)
        finally:
            if not self._in_use(run, folder):
                delete_folder(folder, "scratch")
                self._tidy(run)

    def use(self, record: OwnRecord) -> OwnRecord:
        """Put a build in use, delete the previous build, and return the record as stored. Its
        edition is the previous build's if the chunks are the same. Raises StorageFull, BadRequest.
        """
        edition = record.build
        with suppress(OwnDataUnusable):
            before = self.record(record.run)
            if before.manifest.chunks == record.manifest.chunks:
                edition = before.numbers.edition
        record = replace(record, numbers=replace(record.numbers, edition=edition))
        if len(msgspec.json.encode(record)) > RECORD_BYTES_MAX:
            raise BadRequest(Sentence("these are too many files for one machine: add fewer"))
        place = self.place(record.run)
        write_record(place / RECORD, record, durable=True)
        for folder in place.iterdir():
            if folder.is_dir() and folder.name != record.build:
                delete_folder(folder, "replaced")
        return record

    def remove(self, run: str) -> bool:
        """Delete the data for a run; return False if there were no data. Raises OSError."""
        place = self.place(run)
        if not place.exists():
            return False
        delete_folder(place, "asked", strict=True)
        return True

    def files(self, record: OwnRecord, refs: Iterable[ChunkRef]) -> dict[str, Path]:
        """Return files of a record by hash; each is verified once in a process.

        Raises OwnDataUnusable for a missing or damaged file.
        """
        folder = self.place(record.run) / record.build
        files: dict[str, Path] = {}
        for ref in refs:
            path = folder / ref.sha256
            try:
                stat = path.stat()
                mark = (stat.st_ino, stat.st_mtime_ns)
                whole = stat.st_size == ref.size and (
                    self._verified.get(path) == mark or hash_of(path) == ref.sha256
                )
            except FileNotFoundError as error:
                raise OwnDataUnusable(_add_again_sentence(record.run, damaged=False)) from error
            except OSError as error:
                raise OwnDataUnusable(_add_again_sentence(record.run, damaged=True)) from error
            if not whole:
                raise OwnDataUnusable(_add_again_sentence(record.run, damaged=True))
            self._verified[path] = mark
            files[ref.sha256] = path
        return files

    def _in_use(self, run: str, folder: Path) -> bool:
        try:
            return self.record(run).build == folder.name
        except OwnDataUnusable:
            return False

    def _tidy(self, run: str) -> None:
        """Delete the folder of a run without data."""
        place = self.place(run)
        if place.exists() and not any(place.iterdir()):
            delete_folder(place, "scratch")


def _add_again_sentence(run: str, *, damaged: bool) -> Sentence:
    """Return the sentence about data that have to be added again."""
    if damaged:
        return Sentence(
            "the copies of your data for {run} are damaged: `volunteer data add {run} PATH` makes "
            "them again",
            run=run,
        )
    return Sentence(
        "there are no data of yours for {run} on this machine: `volunteer data add {run} PATH` "
        "adds them",
        run=run,
    )
