"""Repair of a command's standard streams, which a shell may have closed."""

from __future__ import annotations

import os
import sys

COLUMNS_MIN = 20  # help that is narrower has one letter a line; the command library fails at 0


def make_usable() -> None:
    """Replace a closed stdout or stderr by the null device; unset COLUMNS if it is too small."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    width = os.environ.get("COLUMNS", "")
    if width.isdecimal() and int(width) < COLUMNS_MIN:
        del os.environ["COLUMNS"]
