"""Paths of sources that a person names: files and folders that exist."""

from __future__ import annotations

import re
from pathlib import Path

from shared.errors import BadRequest
from shared.sentences import Sentence

_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]+):/+(.*)", re.IGNORECASE | re.DOTALL)


def existing_path(path: Path) -> Path:
    """Return the absolute path of a file or folder. Raises BadRequest if it does not exist, or is
    an address such as https://...
    """
    absolute = path.expanduser().absolute()
    if absolute.exists():
        return absolute
    if address := _ADDRESS.fullmatch(str(path)):
        raise BadRequest(
            Sentence(
                "{address} is an address: download what is there, and name the file",
                address=f"{address[1]}://{address[2]}",
            )
        )
    raise BadRequest(Sentence("there is no file or folder {path}", path=absolute))
