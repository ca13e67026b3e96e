"""QR codes (ISO/IEC 18004) of links, drawn in half blocks on a terminal for a camera."""

from __future__ import annotations

QUIET = 2  # light modules around the code
# The light modules are drawn, two to a cell, so that the code stands out on a dark ground.
_BLOCKS = {(0, 0): "█", (0, 1): "▀", (1, 0): "▄", (1, 1): " "}
# White light modules on black, whatever the terminal's colours: most cameras refuse an inverted
# code.
_COLOURS, _PLAIN = "\x1b[38;5;231;48;5;16m", "\x1b[0m"


def qr_rows(text: str) -> tuple[str, ...]:
    """Return a text as a QR code, to be drawn white on black: a string for each row of cells, which
    is two modules high.

    A join link takes 37 to 57 cells and half as many rows.
    """
    import segno  # imported only where a code is shown

    code = segno.make_qr(text, error="l", boost_error=False)
    modules = [tuple(row) for row in code.matrix_iter(border=QUIET)]
    if len(modules) % 2:
        modules.append((0,) * len(modules[0]))
    return tuple(
        "".join(_BLOCKS[pair] for pair in zip(above, below, strict=True))
        for above, below in zip(modules[::2], modules[1::2], strict=True)
    )


def qr_coloured(text: str, margin: str = "") -> str:
    """Return a text as a QR code with the colours it needs, to be printed in a terminal."""
    return "\n".join(f"{margin}{_COLOURS}{row}{_PLAIN}" for row in qr_rows(text))
