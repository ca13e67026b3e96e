"""Lock of an open file between processes; the system frees the lock when the process ends."""

from __future__ import annotations

import os
import sys


def locked(file: int, offset: int = 0) -> bool:
    """Lock an open file, given by its descriptor; return False if another process holds the lock.

    Windows locks the byte at `offset`, which nobody else can read.
    """
    try:
        if sys.platform == "win32":
            import msvcrt

            position = os.lseek(file, 0, os.SEEK_CUR)
            os.lseek(file, offset, os.SEEK_SET)
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
            os.lseek(file, position, os.SEEK_SET)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
