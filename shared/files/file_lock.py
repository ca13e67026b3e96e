"""Lock of an open file between processes; the system frees the lock when the process ends."""

from __future__ import annotations

import errno
import os
import sys

from shared.errors import Configuration, why
from shared.sentences import Sentence

# errors of a lock that another process holds: of flock, and of Windows
HELD = {errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK}


def locked(file: int, offset: int = 0) -> bool:
    """Lock an open file, given by its descriptor; return False if another process holds the lock.

    Windows locks the byte at `offset`, which nobody else can read. Raises Configuration if the disk
    has no locks.
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
    except OSError as error:
        if error.errno in HELD:
            return False
        raise Configuration(
            Sentence(
                "files of this disk cannot be locked ({why}): use a folder on another disk",
                why=why(error),
            )
        ) from error
    return True
