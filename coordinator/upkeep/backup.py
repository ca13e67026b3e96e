"""Backup and restore: one consistent instant of the database, every blob it names, the keys, and a
signed list of hashes.

    DIR/backup.json + backup.sig   list of the files with hashes, signed by the coordinator's key
    DIR/tables/NAME.jsonl          one row a line, the same for both databases
    DIR/blobs/ab/abcdef...         named by hash
    DIR/keys/                      signing key, TLS certificate and key (all 0600)

A backup is made while the server works. A backup holds secrets: keep it as private as the data
directory.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import aclosing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import msgspec
import structlog

from coordinator.accounts.server_identity import own_key
from coordinator.certificates import CERT_FILE, KEY_FILE, write_private
from coordinator.config import without_password
from coordinator.database import datasets, key_values, runs
from coordinator.database.engine import dump
from coordinator.database.engine.open_database import (
    Database,
    highest_instant,
    is_new,
    migrate,
)
from coordinator.database.ledger import record_tree
from coordinator.database.migrations.upgrade import REVISIONS
from coordinator.runs.definition import definition
from coordinator.storage.blobs import BlobStore, MissingBlob, in_pool, open_in_pool, storage_errors
from coordinator.storage.folders import data_directory
from coordinator.storage.open_blobs import open_blobs
from coordinator.upkeep.store_mark import StoreMarks, check_unused, stored_mark
from shared.clock import SystemClock
from shared.decoding import decode
from shared.errors import (
    BadRequest,
    Configuration,
    Conflict,
    NotFound,
    StorageFull,
    VolunteerError,
    why,
)
from shared.files.deletions import delete_file, delete_folder
from shared.files.new_folder import make_empty_folder
from shared.programs.machine_limits import disk_bytes
from shared.proofs.signing import SigningKey, canonical, fingerprint, verify
from shared.protocol.transparency import RestorePayload, SignedRestore
from shared.text import size

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.config import Settings
    from shared.clock import Clock

FORMAT = 1
SNAPSHOTS_MAX = 3
LOW_FLOORS = 4  # multiple of the disk's floor below which the space for backups is low
LIST, SIGNATURE = "backup.json", "backup.sig"

log = structlog.get_logger("backup")


class TableFile(msgspec.Struct, frozen=True, kw_only=True):
    """File of one table in a backup."""

    rows: int
    sha256: str


class BackupList(msgspec.Struct, frozen=True, kw_only=True):
    """Manifest of a backup; the signature covers the bytes of its file."""

    format: int
    revision: str
    created_at: float
    public_key: str
    tables: dict[str, TableFile]
    keys: dict[str, str]  # file name -> SHA-256
    blobs: dict[str, int]  # SHA-256 -> size


class BackupSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of a backup or a restore."""

    path: str
    rows: int
    blobs: int
    bytes: int
    created_at: float
    fingerprint: str
    private_runs: tuple[str, ...] = ()  # after a restore: runs with a budget of epsilon


# --- backup ---


async def backup(
    db: Database,
    blobs: BlobStore,
    settings: Settings,
    clock: Clock,
    to: Path,
    place: BackupPlace | None = None,
) -> BackupSummary:
    """Write a backup into a new or empty folder, or by way of the folder to another `place`, and
    read it again.

    Raises Conflict when the folder is not empty, NotFound for a lost blob, StorageFull.
    """
    place = place or FolderPlace(blobs, to)
    await in_pool(_make_room, to)
    try:
        listed = await _write(db, settings, clock, to, place)
    except BaseException as error:
        await in_pool(delete_folder, to, "scratch")
        if isinstance(error, StorageFull):
            await _note(db, {key_values.BACKUP_ROOM: f"no space was left for the backup {to}"})
            raise StorageFull(
                f"no space is left for {to}: what was there of it is deleted"
            ) from error
        raise
    room = await in_pool(_shortage, to, settings) if isinstance(place, FolderPlace) else ""
    await _note(db, {key_values.BACKUP: str(listed.created_at), key_values.BACKUP_ROOM: room})
    return summary(to, listed)


async def _note(db: Database, values: Mapping[str, str]) -> None:
    """Store values that the alerts read."""

    def write(conn: Connection) -> None:
        for key, value in values.items():
            key_values.put(conn, key, value)

    try:
        await db.write(write)
    except VolunteerError as error:  # the backup is complete even if the database takes no writes
        log.warning("the backup is not noted for the alerts", error=error.message)


def _shortage(folder: Path, settings: Settings) -> str:
    """Return why the disk of a new backup has no room for another backup; "" if it has room."""
    free = disk_bytes(folder)[0]
    if free >= LOW_FLOORS * settings.space_floor_bytes:
        return ""
    return f"{size(free)} are free beside the backup {folder}"


async def _write(
    db: Database, settings: Settings, clock: Clock, to: Path, place: BackupPlace
) -> BackupList:
    key = SigningKey.load(settings.signing_key_file)
    blobs, tables = await _copy_consistent(db, to, place)
    keys = await in_pool(_copy_keys, settings, to / "keys")
    listed = BackupList(
        format=FORMAT,
        revision=REVISIONS[-1],
        created_at=clock.now(),
        public_key=key.public_key.hex(),
        tables=tables,
        keys=keys,
        blobs=blobs,
    )
    payload = canonical(listed)
    await in_pool(write_private, to / SIGNATURE, key.sign(payload).hex().encode())
    await place.finish(to, listed, payload)
    return listed


class BackupPlace(Protocol):
    """Interface of a place for a backup, whose blobs are copied before its list."""

    async def take(self, sha256: str) -> bool:
        """Copy one blob and check its bytes; return False when it is missing or damaged."""

    async def finish(self, folder: Path, listed: BackupList, payload: bytes) -> None:
        """Check the written files, then add the list, with which the backup is complete."""


class FolderPlace:
    """Backup in a folder, which shares the blobs of an earlier backup, `like`."""

    def __init__(self, blobs: BlobStore, folder: Path, like: Path | None = None) -> None:
        self._blobs, self._folder, self._like = blobs, folder / "blobs", like
        self._shared = set[str]()  # blobs linked from the earlier backup; linking checked them

    async def take(self, sha256: str) -> bool:
        target = self._folder / sha256[:2] / sha256
        if await in_pool(target.is_file):
            return True  # an earlier try has copied it
        if self._like is not None:
            old = self._like / "blobs" / sha256[:2] / sha256
            if await in_pool(_linked, old, target):
                self._shared.add(sha256)
                return True
        return await copy_blob(self._blobs, sha256, target)

    async def finish(self, folder: Path, listed: BackupList, payload: bytes) -> None:
        await in_pool(check_files, folder, listed, self._shared)
        await in_pool(write_private, folder / LIST, payload)


async def _copy_consistent(
    db: Database, to: Path, place: BackupPlace
) -> tuple[dict[str, int], dict[str, TableFile]]:
    """Copy the rows and blobs of one instant; start again when a blob was deleted in between.
    Raises NotFound for a lost blob, Conflict if a blob was deleted in each try.
    """
    for _ in range(SNAPSHOTS_MAX):
        tables = await db.read(lambda conn: _dump(conn, to / "tables"))
        blobs = await in_pool(_registered, to / "tables" / "blobs.jsonl")
        missing = [sha for sha in blobs if not await place.take(sha)]
        if not missing:
            return blobs, tables
        registered = await db.read(datasets.all_registered)
        lost = [sha for sha in missing if sha in registered]
        if lost:
            raise NotFound(f"the blob {lost[0]} is lost or damaged: `coordinator check` says more")
    raise Conflict("in each try a blob was deleted before it was copied: try again")


def _make_room(to: Path) -> None:
    make_empty_folder(to, "the backup", mode=0o700)
    for folder in (to / "tables", to / "blobs", to / "keys"):
        folder.mkdir(mode=0o700)
    to.chmod(0o700)


def _dump(conn: Connection, folder: Path) -> dict[str, TableFile]:
    dump.begin_snapshot(conn)
    files = {}
    for name in dump.names():
        digest, count = hashlib.sha256(), 0
        with storage_errors(), _private(folder / f"{name}.jsonl") as file:
            for row in dump.rows(conn, name):
                line = msgspec.json.encode(row) + b"\n"
                digest.update(line)
                file.write(line)
                count += 1
            file.flush()
            os.fsync(file.fileno())
        files[name] = TableFile(rows=count, sha256=digest.hexdigest())
    return files


def _private(path: Path) -> BinaryIO:
    delete_file(path, "replaced")
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def _registered(path: Path) -> dict[str, int]:
    return {row["sha256"]: row["size"] for batch in _batches(path) for row in batch}


async def copy_blob(blobs: BlobStore, sha256: str, target: Path) -> bool:
    """Copy one blob to a file and check its bytes; return False when it is missing or damaged."""
    try:
        stream = await blobs.open_range(sha256, 0, await blobs.size(sha256))
    except MissingBlob:
        return False
    digest = hashlib.sha256()
    part = target.with_suffix(".part")
    async with aclosing(stream):
        await in_pool(lambda: target.parent.mkdir(parents=True, exist_ok=True, mode=0o700))
        with storage_errors(), await open_in_pool(_private, part) as file:
            async for data in stream:
                await in_pool(file.write, data)
                digest.update(data)
            await in_pool(_sync, file)
    if digest.hexdigest() != sha256:
        await in_pool(delete_file, part, "scratch")
        return False
    await in_pool(part.replace, target)
    return True


def _linked(old: Path, target: Path) -> bool:
    """Hard-link a file; return False where it is missing, damaged, or cannot be linked."""
    target.parent.mkdir(exist_ok=True, mode=0o700)
    try:
        with old.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != target.name:
                return False
        os.link(old, target)
    except OSError:
        return False
    return True


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _key_files(settings: Settings) -> dict[str, Path]:
    own = {
        "signing.key": settings.signing_key_file,
        CERT_FILE: settings.directory / CERT_FILE,
        KEY_FILE: settings.directory / KEY_FILE,
    }
    return {name: path for name, path in own.items() if path.is_file()}


def _copy_keys(settings: Settings, folder: Path) -> dict[str, str]:
    hashes = {}
    for name, path in _key_files(settings).items():
        data = path.read_bytes()
        write_private(folder / name, data)
        hashes[name] = hashlib.sha256(data).hexdigest()
    return hashes


def summary(path: Path | str, listed: BackupList) -> BackupSummary:
    """Return the summary of a backup's contents."""
    return BackupSummary(
        path=str(path),
        rows=sum(table.rows for table in listed.tables.values()),
        blobs=len(listed.blobs),
        bytes=sum(listed.blobs.values()),
        created_at=listed.created_at,
        fingerprint=fingerprint(bytes.fromhex(listed.public_key)),
    )


# --- restore ---


def read_list(source: Path) -> BackupList:
    """Return a backup's verified list. Raises BadRequest, Configuration or BadSignature."""
    try:
        payload = (source / LIST).read_bytes()
        signature = bytes.fromhex((source / SIGNATURE).read_text(encoding="ascii").strip())
        listed = decode(payload, BackupList)
        public_key = bytes.fromhex(listed.public_key)
    except OSError as error:
        missing = Path(error.filename or source).name
        raise BadRequest(
            f"{source} holds no complete backup: {missing}: {why(error)}; name a folder that "
            "backup has written"
        ) from error
    except ValueError as error:
        raise Configuration(f"the backup {source} is damaged: {why(error)}") from error
    verify(public_key, payload, signature)
    if listed.format != FORMAT or listed.revision not in REVISIONS:
        raise Configuration(
            f"the backup is of revision {listed.revision}, this version reads up to "
            f"{REVISIONS[-1]}: restore it with the version that made it"
        )
    return listed


def check_one_key(place: str, names: Mapping[str, str]) -> None:
    """Raise Conflict where a place holds backups of several coordinators; `names` has one backup of
    each coordinator, by the key that signed it.
    """
    if len(names) > 1:
        shown = " and ".join(sorted(names.values()))
        raise Conflict(
            f"{place} holds backups of several coordinators, {shown}: nothing was deleted; give "
            "each coordinator a place of its own"
        )


def check_files(source: Path, listed: BackupList, checked: Container[str] = ()) -> None:
    """Check the hash of every file of a backup except the blobs `checked`, which the caller has
    just read back. Raises Configuration for the first missing or wrong file.
    """
    hashes = {source / "tables" / f"{n}.jsonl": t.sha256 for n, t in listed.tables.items()}
    hashes |= {source / "keys" / name: sha for name, sha in listed.keys.items()}
    unread = (sha for sha in listed.blobs if sha not in checked)
    hashes |= {source / "blobs" / sha[:2] / sha: sha for sha in unread}
    for path, sha in hashes.items():
        try:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise Configuration(f"the backup lacks {path}: {error.strerror}") from error
        if digest != sha:
            raise Configuration(f"the backup is damaged: {path} is not what was saved")


async def restore(settings: Settings, source: Path) -> BackupSummary:
    """Verify a backup, then fill a new data directory and an empty database with it.

    Raises the errors of `read_list` and `check_files`, Configuration if the database holds data
    already, or the keys or blobs there are not those of the backup's coordinator, StorageFull. A
    failed check changes nothing.
    """
    listed = await in_pool(read_list, source)
    await in_pool(check_files, source, listed)
    await in_pool(_check_target, settings, listed)
    blobs = open_blobs(settings.blobs_url, settings.directory / "cache")
    if mark := await stored_mark(blobs):
        owner = fingerprint(bytes.fromhex(listed.public_key))
        check_unused(without_password(settings.blobs_url), mark, owner, SystemClock().now())
    if await is_new(settings.database_url):
        await migrate(settings.database_url)
    db = await Database.open(settings.database_url, exclusive=True)
    try:
        place = without_password(settings.database_url)
        await db.read(lambda conn: dump.check_empty(conn, place))
        for sha in listed.blobs:
            await _put_blob(blobs, source / "blobs" / sha[:2] / sha, sha)
        await in_pool(_place_keys, settings, source / "keys", listed.keys)
        key, clock = SigningKey.load(settings.signing_key_file), SystemClock()

        def fill(conn: Connection) -> None:
            _load(conn, source / "tables", listed)
            _state_restore(conn, key, listed.created_at, clock.now())

        await db.write(fill)
        await StoreMarks(settings, db, blobs, key, clock).take_over(recovered=True)
        private_runs = await db.read(_private_runs)
    finally:
        await db.close()
    done = summary(settings.directory, listed)
    return msgspec.structs.replace(done, private_runs=private_runs)


def _private_runs(conn: Connection) -> tuple[str, ...]:
    """Return the names of the runs with `[privacy]`; a run whose file is damaged is left out."""
    names = []
    for run in runs.every(conn):
        with suppress(VolunteerError):
            if definition(run).file.privacy.on:
                names.append(run.name)
    return tuple(names)


def _check_target(settings: Settings, listed: BackupList) -> None:
    data_directory(settings.directory)
    for name, path in _key_files(settings).items():
        if (
            name in listed.keys
            and hashlib.sha256(path.read_bytes()).hexdigest() != listed.keys[name]
        ):
            raise Configuration(f"{path} is another coordinator's: restore into a new --data-dir")
    free = disk_bytes(settings.directory)[0]
    if free < sum(listed.blobs.values()) + settings.space_floor_bytes:
        raise StorageFull(f"{settings.directory} has too little space for this backup")


async def _put_blob(blobs: BlobStore, path: Path, sha256: str) -> None:
    copy = blobs.scratch() / f"restore-{sha256}"
    with storage_errors():
        await in_pool(shutil.copyfile, path, copy)
    await blobs.store_file(sha256, copy)
    if await blobs.hash(sha256) != sha256:
        raise Configuration(f"the blob store gave back other bytes for {sha256}: look at its disk")


def _place_keys(settings: Settings, folder: Path, keys: Iterable[str]) -> None:
    for name in keys:
        write_private(settings.directory / Path(name).name, (folder / name).read_bytes())


def _load(conn: Connection, folder: Path, listed: BackupList) -> None:
    for name in dump.names():
        if name in listed.tables:
            for batch in _batches(folder / f"{name}.jsonl"):
                dump.load(conn, name, batch)
    dump.reset_sequences(conn)


async def state_recovery(settings: Settings) -> RestorePayload:
    """Sign the state of a database that PostgreSQL recovered, as `restore` signs the state of a
    backup; return the signed payload. Running replicas send it to volunteers.
    """
    db = await Database.open(settings.database_url, exclusive=True)
    try:
        key, now = await own_key(db, settings.signing_key_file), SystemClock().now()
        statement = await db.write(
            lambda conn: _state_restore(conn, key, highest_instant(conn), now)
        )
        blobs = open_blobs(settings.blobs_url, settings.directory / "cache")
        marks = StoreMarks(settings, db, blobs, key, SystemClock())
        await marks.take_over(recovered=True)
    finally:
        await db.close()
    return statement


def _state_restore(
    conn: Connection, key: SigningKey, saved_at: float, now: float
) -> RestorePayload:
    """Sign the present state of runs and record as restored, since volunteers have seen a later
    state.
    """
    heads = {run.name: run.head for run in runs.every(conn)}
    tree = record_tree.tree_head(conn, now)
    statement = RestorePayload(heads=heads, tree=tree, saved_at=saved_at)
    payload = canonical(statement)
    signed = SignedRestore(payload=payload.decode(), signature=key.sign(payload).hex())
    key_values.put(conn, key_values.RESTORED, msgspec.json.encode(signed).decode())
    key_values.delete_key(conn, key_values.LOST, "asked")
    return statement


def _batches(path: Path) -> Iterator[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    with path.open("rb") as file:
        for line in file:
            batch.append(decode(line))
            if len(batch) == dump.BATCH_ROWS:
                yield batch
                batch = []
    if batch:
        yield batch
