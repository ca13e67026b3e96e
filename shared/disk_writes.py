"""Writes to the disk: the sentence for a full one, and renames that survive a power cut."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.errors import StorageFull
from shared.sentences import Sentence

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """Convert the errors of a full disk into a sentence. Raises StorageFull, OSError."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise StorageFull(
                Sentence("no space is left for {path}: free some and try again", path=path)
            ) from error
        raise


def sync_directory(directory: Path) -> None:
    """Make a rename in `directory` survive a power cut (on Windows the file's own sync does)."""
    if os.name == "posix":
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
