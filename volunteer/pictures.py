"""What a version drew, made small enough for an event and a terminal."""

from __future__ import annotations

from pathlib import Path

from volunteer.events import Picture

FILE_BYTES_MAX = 8 << 20
SIDE = 72  # pixels, the longer one


def thumbnail(path: Path) -> Picture:
    """The upper left part of a PNG file, at most 72 pixels wide and high. Raises BadRequest for what is no picture."""
    import numpy as np

    from shared.workloads.data.png import read_png
    from shared.workloads.data.resize import corner, resize

    part = corner(read_png(path.read_bytes()))
    scale = min(1.0, SIDE / max(part.shape[:2]))
    height, width = (max(1, round(side * scale)) for side in part.shape[:2])
    small = resize(part, height, width)
    colour = np.repeat(small[..., None], 3, axis=-1) if small.ndim == 2 else small
    return Picture(width=width, height=height, pixels=colour.tobytes())
