"""Standard streams of a command's process, made usable in whatever state the shell left them."""

from __future__ import annotations

import os
import sys

COLUMNS_MIN = 20  # narrower help has one letter a line, and at 0 the command library fails


def make_usable() -> None:
    """Replace a closed stdout or stderr by the null device; unset COLUMNS if it is too small."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    width = os.environ.get("COLUMNS", "")
    if width.isdecimal() and int(width) < COLUMNS_MIN:
        del os.environ["COLUMNS"]
