"""Writes to the disk: whole files, renames that survive a power cut, errors of a full disk."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.errors import StorageFull
from shared.files.deletions import delete_file
from shared.sentences import Sentence

PARTIAL_SUFFIX = ".part"  # suffix of an incomplete file, whose writer may have died
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}


@contextmanager
def full_disk_errors(path: Path) -> Iterator[None]:
    """Turn the block's errors of a full disk into StorageFull, which names `path`."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise StorageFull(
                Sentence("no space is left for {path}: free some and try again", path=path)
            ) from error
        raise


def write_private(
    path: Path,
    data: bytes,
    *,
    durable: bool = True,
    publish: Callable[[Path, Path], object] = Path.replace,
) -> None:
    """Write a file that only its owner can read, whole or not at all; `publish` gives the complete
    file its name. Raises OSError.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL_SUFFIX}")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        publish(temporary, path)
    finally:
        delete_file(temporary, "scratch")


def sync_directory(directory: Path) -> None:
    """Sync a directory, so that a rename in it survives a power cut. Do nothing on Windows, which
    cannot sync a directory.
    """
    if os.name == "posix":
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
