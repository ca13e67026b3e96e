"""New folder that gets all files of a command, or none if the command fails."""

from __future__ import annotations

import errno
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.errors import BadRequest, Conflict, StorageFull, why
from shared.files.deletions import delete_empty_folder, delete_folder
from shared.sentences import Sentence


def make_empty_folder(path: Path, purpose: str, mode: int = 0o777) -> None:
    """Make a folder, or accept an empty one. Raises BadRequest if it cannot be made, Conflict if it
    is not empty.
    """
    try:
        path.mkdir(parents=True, exist_ok=True, mode=mode)
        filled = any(path.iterdir())
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
    if filled:
        raise Conflict(
            Sentence(
                "{path} is not empty: name a new folder for {purpose}", path=path, purpose=purpose
            )
        )


@contextmanager
def new_folder(to: Path, purpose: str, mode: int = 0o777) -> Iterator[Path]:
    """Yield a hidden folder within the new or empty folder `to`; its files move into `to` at the
    end of the block, or are deleted if the block fails.

    Raises as `make_empty_folder` does, and StorageFull if the disk becomes full in the block.
    """
    existed = to.exists()
    make_empty_folder(to, purpose, mode)
    unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=to))
    try:
        yield unfinished
        for path in sorted(unfinished.iterdir()):
            path.replace(to / path.name)
        delete_empty_folder(unfinished, "scratch")
    except BaseException as error:
        delete_folder(unfinished, "scratch")
        if not existed and not any(to.iterdir()):
            delete_empty_folder(to, "scratch")
        if _no_room(error):
            raise StorageFull(
                Sentence("no space is left for {path}: free some, then try again", path=to)
            ) from error
        raise


def _no_room(error: BaseException) -> bool:
    """Return True if the disk was full; safetensors reports the system's error only in its text."""
    match = re.search(r"os error (\d+)", str(error))
    number = error.errno if isinstance(error, OSError) else int(match[1]) if match else None
    return number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
