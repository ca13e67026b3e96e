"""Cache of downloaded blobs by hash: verified before use, evicted least recently used first.

Most calls block on the disk, so the agent uses threads. Blobs that are deleted while the volunteer
runs are downloaded again; missing folders are made again, the root only by an unconfined process.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import secrets
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from shared.errors import BadRequest, InvalidFrame, StorageFull, why
from shared.files.deletions import delete_file
from shared.programs.machine_limits import disk_bytes
from shared.sentences import Sentence, figure
from shared.text import size as bytes_in_words
from shared.units import GIB
from volunteer.files import private_directory

READ_BYTES = 4 << 20
SPARE_BYTES = 64 << 20  # disk space that downloads leave free
_NAME = re.compile(r"[0-9a-f]{64}")


class Cache:
    """Cache of blobs within `limit_bytes`: it evicts unused blobs, then refuses new blobs."""

    def __init__(self, root: Path, limit_bytes: int) -> None:
        self.root = private_directory(root)
        self.limit_bytes = limit_bytes
        self._guard = threading.Lock()
        self._holds: Counter[str] = Counter()
        self._downloads: dict[str, int] = {}  # hash -> size of running downloads
        self._verified: dict[str, tuple[int, int]] = {}  # hash -> inode and mtime when verified

    def find(self, sha256: str, size: int) -> Path | None:
        """Return the file of a complete blob, None without one; a damaged file is removed."""
        path = self._path(sha256)
        try:
            stat = path.stat()
        except FileNotFoundError:
            return None
        if stat.st_size != size or not (self._is_verified(sha256, stat) or hash_of(path) == sha256):
            delete_file(path, "copy")
            return None
        self._touch(sha256, path)
        return path

    def partial(self, sha256: str, size: int) -> Partial:
        """Return a blob's partial file, to be closed by the caller. Raises StorageFull."""
        self._name(sha256)
        self._make_room(size, sha256)
        try:
            return Partial(self, sha256, size)
        except BaseException:
            self.end_download(sha256)
            raise

    def end_download(self, sha256: str) -> None:
        """Forget a finished download."""
        with self._guard:
            self._downloads.pop(sha256, None)

    def scratch_file(self, size: int) -> Path:
        """Return the path for a new file of `size` bytes, to be adopted when it is built. Raises
        StorageFull.
        """
        self._make_room(size)
        return self._file("partial", f"built-{secrets.token_hex(8)}")

    def partial_path(self, sha256: str) -> Path:
        """Return the path of a blob while it is downloaded."""
        return self._file("partial", self._name(sha256))

    def adopt(self, partial: Path, sha256: str) -> Path:
        """Move a verified file into the cache; return its new path. Raises FileNotFoundError."""
        path = self._path(sha256)
        partial.replace(path)
        self._touch(sha256, path)
        return path

    @contextmanager
    def hold(self, hashes: Iterable[str]) -> Iterator[None]:
        """Protect blobs in use from eviction."""
        names = list(hashes)
        with self._guard:
            self._holds.update(names)
        try:
            yield
        finally:
            with self._guard:
                self._holds -= Counter(names)  # drops hashes that no user holds any more

    def fits(self, need: int) -> bool:
        """Return True if `need` bytes have room next to the blobs in use."""
        with self._guard:
            used, _ = self._sizes()
        return used + need <= self.limit_bytes

    def trim(self) -> None:
        """Evict the least recently used blobs down to the limit."""
        with self._guard:
            used, idle = self._sizes()
            self._evict(idle, self.limit_bytes - used)

    def _make_room(self, size: int, coming: str = "") -> None:
        """Evict blobs until `size` bytes fit: the blob `coming`, whose download begins, or a new
        file if `coming` is "". Raises StorageFull.
        """
        with self._guard:
            used, idle = self._sizes(but=coming)
            if used + size > self.limit_bytes:
                raise StorageFull(self._too_much(used + size))
            self._evict(idle, self.limit_bytes - used - size)
            if coming:
                self._downloads[coming] = size
        path = self._file("partial", coming)
        need = size - (path.stat().st_size if coming and path.exists() else 0)
        if disk_bytes(path.parent)[0] < need + SPARE_BYTES:
            self.end_download(coming)
            raise StorageFull(
                Sentence(
                    "{size} more do not fit on the disk of {root}: free some space",
                    size=figure(bytes_in_words(need)),
                    root=self.root,
                )
            )

    def _too_much(self, need: int) -> str:
        enough = math.ceil(need / GIB * 10) / 10
        return Sentence(
            "the work in hand needs {size} of weights and data at once, cache_gb "
            "allows {allowed}: set cache_gb to {enough} or more, or help a "
            "smaller run",
            size=figure(bytes_in_words(need)),
            allowed=figure(bytes_in_words(self.limit_bytes)),
            enough=figure(f"{enough:g}"),
        )

    def _sizes(self, but: str = "") -> tuple[int, list[tuple[float, int, Path]]]:
        """Return the bytes in use, and the evictable files (time, size, path), oldest first; both
        without the blob `but`.
        """
        used, idle, coming = 0, [], dict(self._downloads)
        for at, size, path in self._blobs():
            if path.name == but:
                continue
            if self._holds[path.name] > 0 or path.name in coming:
                used += max(size, coming.pop(path.name, 0))
            else:
                idle.append((at, size, path))
        coming.pop(but, None)
        return used + sum(coming.values()), sorted(idle)

    def _evict(self, idle: list[tuple[float, int, Path]], room: int) -> None:
        """Delete the oldest idle blobs until the others fit into `room` bytes."""
        total = sum(size for _, size, _ in idle)
        for _, size, path in idle:
            if total <= room:
                return
            delete_file(path, "copy")
            self._verified.pop(path.name, None)
            total -= size

    def _blobs(self) -> Iterator[tuple[float, int, Path]]:
        for path in (*self.root.glob("??/*"), *self.root.glob("partial/*")):
            try:
                stat = path.stat()
            except FileNotFoundError:  # another download finished, or made room, meanwhile
                continue
            yield stat.st_mtime, stat.st_size, path

    def _is_verified(self, sha256: str, stat: os.stat_result) -> bool:
        return self._verified.get(sha256) == (stat.st_ino, stat.st_mtime_ns)

    def _touch(self, sha256: str, path: Path) -> None:
        by_name = os.utime not in os.supports_fd
        with path.open("rb") as file:  # the sandbox changes times of open files only
            os.utime(path if by_name else file.fileno())
        stat = path.stat()
        self._verified[sha256] = (stat.st_ino, stat.st_mtime_ns)

    def _path(self, sha256: str) -> Path:
        name = self._name(sha256)
        return self._file(name[:2], name)

    def _file(self, folder: str, name: str) -> Path:
        """Return the path of a file, whose folder is made if it is missing. Raises
        Configuration.
        """
        return private_directory(self.root / folder) / name

    def _name(self, sha256: str) -> str:
        """Return the hash if it is valid, since it becomes a file name. Raises BadRequest for an
        invalid hash.
        """
        if not _NAME.fullmatch(sha256):
            raise BadRequest(Sentence("the coordinator named a blob that is not a SHA-256"))
        return sha256


class Partial:
    """Blob being downloaded: bytes in order, hashed as they arrive. The caller must `close` it."""

    def __init__(self, cache: Cache, sha256: str, size: int) -> None:
        self.sha256 = sha256
        self.size = size
        self._cache = cache
        self._file = self._open()

    def _open(self) -> FileIO:
        self.offset = 0  # bytes received so far
        self._hash = hashlib.sha256()
        self._path = self._cache.partial_path(self.sha256)
        file = FileIO(self._path, "r+", opener=_open_or_make)
        try:
            while piece := file.read(READ_BYTES):
                self._hash.update(piece)
                self.offset += len(piece)
            if self.offset > self.size:
                self._empty(file)
        except BaseException:
            file.close()
            raise
        return file

    def write(self, piece: bytes | bytearray) -> None:
        """Store the next bytes. Raises InvalidFrame for more than the blob has, StorageFull; after
        an error the same bytes may be written again.
        """
        if self.offset + len(piece) > self.size:
            raise InvalidFrame(
                Sentence("more bytes arrived than the {size} announced", size=self.size)
            )
        try:
            self._file.seek(self.offset)  # a failed write may have stored a part of its bytes
            left = memoryview(piece)
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            raise StorageFull(
                Sentence(
                    "{path} cannot be written: {why}",
                    path=self._path,
                    why=why(error),
                )
            ) from error
        self._hash.update(piece)
        self.offset += len(piece)

    def restart(self) -> None:
        """Drop the bytes received so far, because the other side sends everything again."""
        self._empty(self._file)

    def finish(self) -> Path:
        """Return the complete file, now in the cache.

        Raises InvalidFrame and keeps nothing when the hash is wrong or the file was deleted. The
        file is not synced to the disk, since each new process hashes a file before its first use.
        """
        if self._hash.hexdigest() != self.sha256:
            self.restart()
            raise InvalidFrame(Sentence("a download arrived damaged: its hash is wrong"))
        self._file.close()
        try:
            path = self._cache.adopt(self._path, self.sha256)
        except FileNotFoundError as error:
            self._file = self._open()
            raise InvalidFrame(Sentence("a download was deleted before its end")) from error
        self._cache.end_download(self.sha256)
        return path

    def close(self) -> None:
        self._file.close()
        self._cache.end_download(self.sha256)

    def _empty(self, file: FileIO) -> None:
        file.truncate(0)
        self._hash = hashlib.sha256()
        self.offset = 0


def _open_or_make(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT, 0o600)


def hash_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
