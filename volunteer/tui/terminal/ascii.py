"""`--ascii`: all output, also of libraries, reaches the terminal in 7 bits."""

from __future__ import annotations

from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter
from typing_extensions import override

from volunteer.tui.text import ascii_only

# Lines and blocks drawn by Textual's own widgets.
_LINES = {
    **dict.fromkeys("─━═╌╍┄┅╴╶╸╺▔▁", "-"),
    **dict.fromkeys("│┃║╎╏▏▕▎▊", "|"),
    **dict.fromkeys("╭╮╰╯┌┐└┘├┤┬┴┼╔╗╚╝┏┓┗┛▛▜▙▟▗▖▘▝", "+"),
    **dict.fromkeys("█▉▇▆▅▄▃▂▀▌▐", "#"),
}
_TABLE = {ord(sign): plain for sign, plain in _LINES.items()}


class AsciiFilter(LineFilter):
    """Replaces every sign by an ASCII one of the same width."""

    @override
    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [
            segment
            if segment.text.isascii()
            else Segment(ascii_only(segment.text.translate(_TABLE)), segment.style, segment.control)
            for segment in segments
        ]
