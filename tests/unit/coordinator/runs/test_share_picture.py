"""Picture for shared links: small, of any name and any curve."""

from __future__ import annotations

import numpy as np
import pytest

from coordinator.runs.share_picture import SharedRun, share_picture
from shared.workloads.data.image_files import read_png


@pytest.mark.parametrize("points", [(), ((0.0, 0.5),), ((0.0, 0.0), (1.0, 1.0))], ids=len)
@pytest.mark.parametrize("name", ["tiny", "Größe", "模型", "x" * 300, "\u202e\x1b[2J"])
def test_a_picture_is_drawn_of_any_name_and_curve(
    name: str, points: tuple[tuple[float, float], ...]
) -> None:
    figures = ("version 3, 1 machine at work",)
    drawn = share_picture(SharedRun(name=name, server=name, figures=figures, points=points))
    assert len(drawn) < 100_000
    pixels = read_png(drawn).reshape(-1, 3).astype(np.int32)
    assert len(np.unique(pixels @ (1, 256, 65536))) > 2  # words stand on the ground
