"""Time-lapses: every picture a frame, one size, for ever; and what the demo shows of pictures."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from coordinator.demo.demo_report import DemoPictures
from coordinator.demo.demo_view import PICTURE_CELLS, beside
from coordinator.demo.runs import DEMOS, demo_run
from coordinator.rules.run_file import parse
from coordinator.runs.samples import SIDE_MAX, Kind, film
from shared.errors import InvalidRunFile
from shared.workloads.base import load
from shared.workloads.data.image_files import write_png


def frames(path: Path, count: int, shape: tuple[int, ...]) -> list[Path]:
    paths = []
    for index in range(count):
        pixels = np.random.default_rng(index).integers(0, 256, shape, dtype=np.uint8)
        paths.append(path / f"{index}.png")
        paths[-1].write_bytes(write_png(pixels))
    return paths


@pytest.mark.parametrize("kind", ["gif", "webp"])
@pytest.mark.parametrize("shape", [(40, 30), (40, 30, 3)])
def test_every_picture_is_a_frame(tmp_path: Path, kind: Kind, shape: tuple[int, ...]) -> None:
    data = film(frames(tmp_path, 5, shape), kind)
    with Image.open(io.BytesIO(data)) as image:
        assert (getattr(image, "n_frames", 1), image.size) == (5, (30, 40))
        assert image.info["loop"] == 0


def test_frames_are_made_smaller_and_alike(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    paths = frames(tmp_path, 1, (2000, 1000)) + frames(tmp_path / "small", 2, (50, 50))[1:]
    with Image.open(io.BytesIO(film(paths, "gif"))) as image:
        assert (getattr(image, "n_frames", 1), max(image.size)) == (2, SIDE_MAX)


def test_two_pictures_stand_side_by_side_in_dots() -> None:
    white, black = (write_png(np.full((64, 64), value, np.uint8)) for value in (255, 0))
    title, *dots = beside(7, DemoPictures(first=white, last=black))
    assert title.split() == ["version", "0", "version", "7"]
    assert set("".join(dots)) == {" ", "\u28ff", "\u2800"}
    assert {len(line) for line in dots} == {2 * PICTURE_CELLS + 4}


@pytest.mark.parametrize("workload", DEMOS)
@pytest.mark.parametrize("volunteers", [0, 1, 2, 5])
def test_the_demos_are_valid_run_files(workload: str, volunteers: int) -> None:
    plan = demo_run(workload, volunteers)
    run = parse(plan.toml, load(workload).defaults({}))
    assert (run.name, run.workload) == (plan.name, workload)
    assert plan.preparing


def test_a_demo_that_does_not_exist_names_those_that_do() -> None:
    with pytest.raises(InvalidRunFile, match="one of: gpt, dcgan"):
        demo_run("chess", 2)
