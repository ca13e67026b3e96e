"""Reading of a person's text file, without the byte order mark that Notepad, Excel and PowerShell
write.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
from pathlib import Path

from shared.decoding import MALFORMED, decode
from shared.errors import InvalidRunFile
from shared.text import escaped

UTF8 = "utf-8-sig"  # UTF-8 whose decoder skips a byte order mark
UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # marks at the beginning of a file
BYTES_MAX = 16 << 20  # largest text file that is read


def unmarked(data: bytes) -> bytes:
    """Return UTF-8 without its byte order mark."""
    return data.removeprefix(codecs.BOM_UTF8)


def json_object(path: Path) -> dict[str, object]:
    """Return the fields of a file that holds one JSON object. Raises InvalidRunFile, OSError."""
    try:
        return decode(unmarked(path.read_bytes()), dict[str, object])
    except MALFORMED as error:
        raise InvalidRunFile(f"{path} is not a JSON object: {escaped(error, 200)}") from error


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file, with every line ending as a line feed; a pipe that nobody
    writes into is empty.

    Raises OSError, also for more than BYTES_MAX bytes, and UnicodeDecodeError.
    """
    with open(path, "rb", opener=_without_waiting) as file:
        data = file.read(BYTES_MAX + 1)
    if len(data) > BYTES_MAX:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return io.StringIO(data.decode(UTF8), newline=None).read()


def _without_waiting(path: str, flags: int) -> int:
    """Open a file without waiting, even a pipe that has no writer."""
    at_once = getattr(os, "O_NONBLOCK", 0)  # Windows has no such flag
    handle = os.open(path, flags | at_once)
    if at_once:
        os.set_blocking(handle, True)
    return handle
