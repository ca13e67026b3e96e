"""Deletions of files, each with the reason that permits it.

Nothing is deleted because a reference to it is absent. `python -m tests.support.deletions` prints
the table of every deletion of the product; tests/test_deletions.py finds those outside it.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

Reason = Literal[
    "scratch", "moved", "copy", "let go", "settled", "replaced", "expired", "ended", "asked"
]

REASONS: dict[Reason, str] = {
    "scratch": "its writer handed it to nobody, or died before it was whole",
    "moved": "its bytes are stored, durably, under the name that others use",
    "copy": "its origin still has the bytes, or they can be made again",
    "let go": "this database knew the name, and took every reference away on purpose",
    "settled": "its work has had its final answer, or its credits are posted",
    "replaced": "the same transaction, or the next line, puts the newer one in its place",
    "expired": "its time is over by the clock that set it",
    "ended": "it speaks for a process that has ended",
    "asked": "a person asked for it by a command, which said what goes",
}


def delete_file(path: Path, reason: Reason) -> None:
    """Delete a file; a missing file is no error."""
    path.unlink(missing_ok=True)


def delete_folder(path: Path, reason: Reason, *, strict: bool = False) -> None:
    """Delete a folder with everything in it. Raises OSError only if `strict`."""
    shutil.rmtree(path, ignore_errors=not strict)


def delete_empty_folder(path: Path, reason: Reason) -> None:
    """Delete an empty folder. Raises OSError for a folder that is missing or not empty."""
    path.rmdir()
