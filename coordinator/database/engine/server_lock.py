"""Lock of a data directory for one server; the system frees it when the process dies."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self

from shared.errors import Configuration
from shared.files.file_lock import locked

LOCK_FILE = "serve.lock"


class DirectoryLock:
    """Lock of one data directory, until `release` or the end of the process."""

    def __init__(self, directory: Path, file: int) -> None:
        self.directory = directory
        self._file = file

    @classmethod
    def take(cls, directory: Path) -> Self:
        """Lock a directory. Raises Configuration if it is unusable or another server holds it."""
        path = directory / LOCK_FILE
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise Configuration(f"{directory} cannot be used: {error.strerror}") from error
        if not locked(file):
            holder = _holder(file)
            os.close(file)
            who = f"process {holder}" if holder else "another process"
            raise Configuration(
                f"a coordinator ({who}) already serves {directory}: stop it, or choose another "
                "--data-dir"
            )
        try:
            os.ftruncate(file, 0)
            os.write(file, b" " + str(os.getpid()).encode())  # Windows locks the first byte
        except OSError as error:
            error.filename = str(path)  # an open file has no name in its errors
            os.close(file)
            raise
        return cls(directory, file)

    def release(self) -> None:
        """Release the directory for another server."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def _holder(file: int) -> str:
    """Return the process id in the lock file; "" if it cannot be read."""
    try:
        os.lseek(file, 1, os.SEEK_SET)
        return os.read(file, 32).decode("ascii", "replace").strip()
    except OSError:
        return ""
