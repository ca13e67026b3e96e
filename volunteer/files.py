"""Small files of the volunteer: written atomically, read back with a size limit.

Files are private (0600). A `durable` write also survives a power cut; any other survives the end of
the process.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from shared.decoding import MALFORMED, decode
from shared.errors import Configuration, why
from shared.files.disk_writes import full_disk_errors, sync_directory, write_private
from shared.files.text_file import unmarked
from shared.sentences import Sentence, encode_english

RECORD_BYTES_MAX = 4 << 20

T = TypeVar("T")


def exports() -> Path:
    """Return the folder for the owner's exports: tables, keys, screenshots."""
    return Path.home() / "volunteer"


def export(path: Path, data: bytes) -> None:
    """Write a file into the folder of exports, which is made if missing. Raises OSError."""
    path.parent.mkdir(exist_ok=True)
    write_whole(path, data)


def private_directory(path: Path) -> Path:
    """Return the directory `path`, made if missing, closed to other users. Raises Configuration."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise Configuration(
            Sentence(
                "the directory {path} cannot be made: {why}; VOLUNTEER_HOME names another place",
                path=path,
                why=why(error),
            )
        ) from error
    return path


def write_whole(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Replace `path` by `data` atomically. Raises StorageFull, OSError."""
    with full_disk_errors(path):
        write_private(path, data, durable=durable)
        if durable:
            sync_directory(path.parent)


def write_record(path: Path, record: msgspec.Struct, *, durable: bool = False) -> None:
    """Store a struct as JSON. Raises StorageFull, OSError."""
    write_whole(path, msgspec.json.encode(record, enc_hook=encode_english), durable=durable)


def read_record(path: Path, kind: type[T]) -> T | None:
    """Return the struct stored in `path`, None if there is no file. Raises Configuration if
    damaged.
    """
    try:
        with path.open("rb") as file:
            data = file.read(RECORD_BYTES_MAX + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Configuration(
            Sentence("{path} cannot be read: {why}", path=path, why=why(error))
        ) from error
    try:
        if len(data) > RECORD_BYTES_MAX:
            raise msgspec.ValidationError("it is too large")
        return decode(unmarked(data), kind)
    except MALFORMED as error:
        raise Configuration(
            Sentence("{path} is damaged: {error}", path=path, error=error)
        ) from error


def set_aside(path: Path) -> Path:
    """Rename a damaged file, so that it can still be examined; return its new path."""
    aside = path.with_name(f"{path.name}.damaged")
    path.replace(aside)
    return aside
