"""Reading of a secret from a file of the organiser: a token, or the key of another server."""

from __future__ import annotations

import os
from pathlib import Path

from shared.errors import Configuration, why
from shared.files.text_file import unmarked

BYTES_MAX = 4096


def read_secret(path: Path, label: str) -> str:
    """Return the one line of a file; "" if there is no file. Errors call the secret `label`.

    Raises Configuration when others can read the file, or a request header cannot carry its text.
    """
    try:
        with path.open("rb") as file:
            if os.name == "posix" and os.fstat(file.fileno()).st_mode & 0o077:
                raise Configuration(f"others can read {label}: chmod 600 {path}")
            data = file.read(BYTES_MAX + 1)
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise Configuration(f"{path} cannot be read: {why(error)}") from error
    secret = unmarked(data).decode("ascii", errors="replace").strip()
    if not is_secret(secret) or len(data) > BYTES_MAX:
        raise Configuration(f"{path} must hold one line of printable characters: {label}")
    return secret


def is_secret(text: str) -> bool:
    """Return True if a request header may carry the text. For another text the HTTP library would
    raise an error that quotes the secret.
    """
    return text.isascii() and text.isprintable() and " " not in text
