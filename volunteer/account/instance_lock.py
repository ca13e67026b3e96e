"""Lock of the running instance of a profile: the file `<profile>/lock`, which names its process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.errors import Unavailable
from shared.files.disk_writes import full_disk_errors
from shared.files.file_lock import locked
from shared.sentences import Sentence

PAST_TEXT = 1 << 20  # position of the locked byte, behind the process id, which stays readable


class ProfileAtWork(Unavailable):
    """Another instance holds the lock of the profile, until it ends."""


@contextmanager
def instance_lock(profile: Path) -> Iterator[None]:
    """Hold the lock of a profile's running instance. Raises ProfileAtWork if another instance holds
    it, StorageFull.
    """
    path = profile / "lock"
    with full_disk_errors(path):  # unbuffered, since a buffer would fail a second time on close
        opened = path.open("a+b", buffering=0)
    with opened as file:
        if not locked(file.fileno(), PAST_TEXT):
            file.seek(0)
            pid = (file.read(32) or b"").decode(errors="replace").strip() or "unknown"
            raise ProfileAtWork(
                Sentence(
                    "this profile is already at work (process {pid}): `volunteer status` "
                    "shows it, "
                    "`volunteer stop` ends it, and --profile NAME starts a second one",
                    pid=pid,
                )
            )
        file.truncate(0)
        with full_disk_errors(path):
            file.write(str(os.getpid()).encode())
        try:
            yield
        finally:
            file.truncate(0)
