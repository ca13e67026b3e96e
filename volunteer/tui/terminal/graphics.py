"""Pictures by the terminal's own protocol: Kitty's, or Sixel, which iTerm2 and many others support.

The library asks the terminal while it is imported, and reads the reply from standard input. The
library is imported before the screen starts, and only where the terminal's name promises a reply:
one that comes late would be taken for keys.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BytesIO
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from textual_image.widget import SixelImage, TGPImage

Protocol = Literal["kitty", "sixel", "blocks"]
Wanted = Literal["auto", "kitty", "sixel", "blocks"]

# Terminals that draw pictures, by what they put into the environment.
_VARIABLES = ("KITTY_WINDOW_ID", "KONSOLE_VERSION", "WT_SESSION", "XTERM_VERSION")
_TERMS = ("xterm-kitty", "xterm-ghostty", "foot", "mlterm", "contour", "wezterm", "yaft", "rio")
_PROGRAMS = ("ghostty", "wezterm", "iterm.app", "mintty", "contour", "rio", "vscode")
# Replies come over the network, later than the library waits for them.
_REMOTE = ("SSH_CONNECTION", "SSH_CLIENT", "SSH_TTY")


def protocol(wanted: Wanted = "auto", environ: Mapping[str, str] = os.environ) -> Protocol:
    """Return how this terminal draws pictures; to be called before the screen starts."""
    if wanted == "blocks" or not _terminals():
        return "blocks"
    if wanted == "auto" and not _promising(environ):
        return "blocks"
    try:
        with _unasked(wanted != "auto"):
            from textual_image import renderable
        names: dict[object, Protocol] = {
            renderable.SixelImage: "sixel",
            renderable.TGPImage: "kitty",
        }
        found = names.get(renderable.Image, "blocks") if wanted == "auto" else wanted
        if found != "blocks":
            import textual_image.widget  # noqa: F401 # measures the cells of the terminal
    except Exception:  # whatever a terminal replies: there are half blocks
        return "blocks"
    return found


def widget(how: Protocol) -> SixelImage | TGPImage:
    """Return a widget without a picture, for a protocol that was found before."""
    from textual_image.widget import SixelImage, TGPImage

    return SixelImage() if how == "sixel" else TGPImage()


def cell_size() -> tuple[int, int]:
    """Return how many pixels a cell of this terminal is wide and high."""
    from textual_image._terminal import get_cell_size

    wide, high = get_cell_size()
    return wide, high


def print_picture(png: bytes, how: Protocol, size: tuple[int, int]) -> None:
    """Print a picture of `size` in cells, by a protocol that was found before."""
    from rich.console import Console
    from textual_image.renderable import SixelImage, TGPImage

    kind = SixelImage if how == "sixel" else TGPImage
    Console().print(kind(BytesIO(png), *size))


def _promising(environ: Mapping[str, str]) -> bool:
    """Return True if a terminal is here and its name promises pictures."""
    if any(environ.get(name) for name in _REMOTE):
        return False
    term, program = environ.get("TERM", "").lower(), environ.get("TERM_PROGRAM", "").lower()
    named = any(environ.get(name) for name in _VARIABLES)
    return named or term.startswith(_TERMS) or program in _PROGRAMS


def _terminals() -> bool:
    """Return True if standard input and output are terminals."""
    with suppress(AttributeError, ValueError):
        return sys.__stdin__.isatty() and sys.__stdout__.isatty()  # type: ignore[union-attr]
    return False


@contextmanager
def _unasked(quiet: bool) -> Iterator[None]:
    """Hide the terminal from the library, where `quiet`, so that it asks none."""
    there = sys.__stdout__
    try:
        vars(sys)["__stdout__"] = None if quiet else there
        yield
    finally:
        vars(sys)["__stdout__"] = there
