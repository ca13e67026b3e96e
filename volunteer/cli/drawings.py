"""Pictures of an image run on the command line: shown in the terminal, or written as PNG."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from shared.errors import BadRequest, Configuration, why
from shared.sentences import Sentence
from volunteer.cli.exit_codes import remark
from volunteer.i18n.catalogue import _

if TYPE_CHECKING:
    from shared.protocol.inference import ImageReply
    from volunteer.net.api import Api

ROWS_LEFT = 3  # terminal rows left for the prompt and the price
CLEAR = "\x1b[0m"
DRAW_S = 180.0  # patience of an image request: a version may have to be loaded first


async def draw(api: Api, model: str, seed: int | None) -> ImageReply:
    """Request one sheet of pictures from an image run; not retried, or it could be paid twice."""
    from shared.protocol.endpoints import IMAGES
    from shared.protocol.inference import ImageRequest

    request = ImageRequest(model=model, seed=seed)
    return await api.call(IMAGES, body=request, patience_s=0, timeout_s=DRAW_S)


def output_picture(png: bytes, output: Path | None) -> None:
    """Write a PNG to a file or a pipe; without both, show it in the terminal.

    Raises Configuration if the file cannot be written, BadRequest for data that is not a picture.
    """
    from volunteer.files import write_whole
    from volunteer.tui.widgets.pictures import decoded, png_of

    clean = png_of(decoded(png))  # re-encoded: foreign data reaches no file or terminal unchecked
    if output is not None:
        try:
            write_whole(output, clean)
        except OSError as error:
            raise Configuration(
                Sentence("{path} cannot be written: {why}", path=output, why=why(error))
            ) from error
        remark(_("written: {path}", path=output))
    elif sys.stdout.isatty():
        _show(clean)
    else:
        sys.stdout.buffer.write(clean)
        sys.stdout.buffer.flush()


def picture_of(reply: ImageReply) -> bytes:
    """Return the picture of a reply. Raises BadRequest for a reply without a picture."""
    if not reply.data:
        raise BadRequest(Sentence("the coordinator sent no picture"))
    return reply.data[0].b64_json


def _show(png: bytes) -> None:
    import shutil

    from volunteer.tui.widgets.pictures import decoded, half_blocks

    cells, lines = shutil.get_terminal_size()
    for line in half_blocks(decoded(png), cells, max(1, lines - ROWS_LEFT)):
        print("".join(_colour_cell(text, role) for text, role in line) + CLEAR)


def _colour_cell(text: str, role: str) -> str:
    """Return a cell in its two colours, "#rrggbb/#rrggbb"."""
    ink, _, paper = role.partition("/")
    inks, papers = (
        ";".join(str(channel) for channel in bytes.fromhex(c[1:])) for c in (ink, paper)
    )
    return f"\x1b[38;2;{inks};48;2;{papers}m{text}"
