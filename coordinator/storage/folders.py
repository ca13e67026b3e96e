"""Places that the organiser names: the data directory, and addresses of other stores."""

from __future__ import annotations

import re
from pathlib import Path

from shared.errors import Configuration, why


def is_address(place: str) -> bool:
    """Return True for an address such as s3://bucket, also a misspelt one such as s3:/bucket, but
    not for a path on a drive of Windows, whose name is one letter.
    """
    return re.match(r"[A-Za-z][\w+.-]+:", place) is not None


def data_directory(path: Path) -> Path:
    """Make the directory of a coordinator, closed to other users. Raises Configuration."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise Configuration(
            f"the data directory {path} cannot be made: {why(error)}; name another one with "
            "--data-dir"
        ) from error
    return path
