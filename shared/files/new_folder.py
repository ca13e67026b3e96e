"""New folder that gets all files of a command, or none if the command fails."""

from __future__ import annotations

import errno
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.errors import BadRequest, Conflict, StorageFull, why
from shared.files.deletions import delete_empty_folder, delete_file, delete_folder
from shared.files.file_lock import locked
from shared.sentences import Sentence

UNFINISHED = ".unfinished"  # beginning of the names of the folder being filled, and of its lock
Tell = Callable[[Sentence], object]


def make_empty_folder(path: Path, purpose: str, mode: int = 0o777) -> None:
    """Make a folder, or accept an empty one. Raises BadRequest if it cannot be made, Conflict if it
    is not empty.
    """
    if _names(path, purpose, mode):
        raise _not_empty(path, purpose)


def _names(path: Path, purpose: str, mode: int) -> list[str]:
    """Make a folder if it is missing; return the names in it. Raises BadRequest."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=mode)
        return sorted(file.name for file in path.iterdir())
    except OSError as error:
        raise BadRequest(
            Sentence(
                "the folder {path} cannot be made for {purpose}: {why}; name one where you may "
                "write",
                path=path,
                purpose=purpose,
                why=why(error),
            )
        ) from error


def _not_empty(path: Path, purpose: str) -> Conflict:
    return Conflict(
        Sentence("{path} is not empty: name a new folder for {purpose}", path=path, purpose=purpose)
    )


@contextmanager
def new_folder(
    to: Path, purpose: str, mode: int = 0o777, tell: Tell = lambda sentence: None
) -> Iterator[Path]:
    """Yield a hidden folder within the new or empty folder `to`; its files move into `to` at the
    end of the block, or are deleted if the block fails. Folders that a killed process left in `to`
    are deleted first; `tell` then gets a sentence about it.

    Raises BadRequest, Conflict if `to` is not empty or another process fills it, StorageFull if the
    disk becomes full in the block.
    """
    existed = to.exists()
    try:
        with _claimed(to, purpose, mode, tell):
            unfinished = Path(tempfile.mkdtemp(prefix=f"{UNFINISHED}-", dir=to))
            try:
                yield unfinished
                for path in sorted(unfinished.iterdir()):
                    path.replace(to / path.name)
            finally:
                delete_folder(unfinished, "scratch")
    except BaseException as error:
        if not existed and to.is_dir() and not any(to.iterdir()):
            delete_empty_folder(to, "scratch")
        if _no_room(error):
            raise StorageFull(
                Sentence("no space is left for {path}: free some, then try again", path=to)
            ) from error
        raise


@contextmanager
def _claimed(to: Path, purpose: str, mode: int, tell: Tell) -> Iterator[None]:
    """Hold an empty folder for this process; leftovers of killed processes are deleted. Raises like
    `new_folder`.
    """
    if not all(name.startswith(UNFINISHED) for name in _names(to, purpose, mode)):
        raise _not_empty(to, purpose)
    lock = to / f"{UNFINISHED}.lock"
    file = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if not locked(file):
            raise Conflict(
                Sentence(
                    "another command is writing {purpose} into {path}", purpose=purpose, path=to
                )
            )
        try:
            _clear(to, purpose, mode, tell)
            yield
        finally:
            delete_file(lock, "scratch")
    finally:
        os.close(file)


def _clear(to: Path, purpose: str, mode: int, tell: Tell) -> None:
    """Delete the folders that killed processes left. Raises Conflict for other files."""
    names = _names(to, purpose, mode)
    if not all(name.startswith(UNFINISHED) for name in names):
        raise _not_empty(to, purpose)
    abandoned = [name for name in names if name.startswith(f"{UNFINISHED}-")]
    for name in abandoned:
        delete_folder(to / name, "scratch")
    if abandoned:
        tell(
            Sentence("What an earlier command had left unfinished in {path} was deleted.", path=to)
        )


def _no_room(error: BaseException) -> bool:
    """Return True if the disk was full; safetensors reports the system's error only in its text."""
    match = re.search(r"os error (\d+)", str(error))
    number = error.errno if isinstance(error, OSError) else int(match[1]) if match else None
    return number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
