"""A workload of somebody else's package, through a whole coordinator and a whole volunteer: nothing
of ours knows of it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coordinator.admin.datasets import AddDataset, add
from shared.errors import BadRequest, InvalidRunFile, NotFound
from shared.workloads.base import load
from shared.workloads.data.image_files import read_png
from tests.support.local_coordinator import local_coordinator
from tests.support.local_volunteer import LocalMachine
from tests.support.workloads import example_workload
from tests.support.workloads.example_workload import write_digits
from tests.support.workloads.tiny_dcgan import stripes
from volunteer.control import commands, events

RUN = """
name = "digits"
workload = "cnn"
dataset = "digits"
[model]
width = 8
[task]
local_steps = 15
batch_size = 16
[train]
lr = 1e-2
[plan]
preset = "fedavg"
quorum = 1
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the installed package, which stays imported."""
    return example_workload.install(tmp_path_factory.mktemp("package"))


@pytest.fixture
def installed(package: Path) -> Iterator[None]:
    before = list(sys.path)
    sys.path.insert(0, str(package))
    yield
    sys.path[:] = before


@pytest.mark.usefixtures("installed")
async def test_it_is_trained_measured_and_shown(tmp_path: Path) -> None:
    folder = write_digits(tmp_path / "digits", 500)
    (folder / "3" / "no.png").write_bytes(b"no picture")
    ask = AddDataset(
        name="digits", files=(str(folder),), workload="cnn", licence="MIT", source="here"
    )
    async with local_coordinator(tmp_path / "coordinator") as home:
        shown = await add.run(home.coordinator, ask)
        assert (shown.kind, shown.items, shown.heldout) == ("samples", 475, 25)
        assert shown.skipped == (
            "3/no.png: cannot be decoded (not a PNG or JPEG or WEBP or GIF or BMP or TIFF image)",
        )
        await home.coordinator.runs.create(RUN)
        await home.coordinator.runs.start("digits")
        machine = LocalMachine(tmp_path / "machine", home)
        allowed: dict[str, Any] = {"workloads": ("gpt", "cnn")}
        await machine.engine(**allowed).control.do(commands.Join(link=machine.link, name="Ann"))
        async with home.coordinator.working():
            async with machine.working(max_tasks=6, **allowed) as process:
                assert await process.ended(60) == 0
                assert len(process.all(events.Trained)) == 6
            while await home.coordinator.evaluation.evaluate_next():
                pass
        rows = [row for row in await home.coordinator.runs.queries.versions("digits") if row.loss]
        assert rows[-1].version >= 3
        assert (rows[-1].loss or 9) < 0.5 * (rows[0].loss or 0)
        picture = rows[-1].picture
        assert picture is not None
        pixels = read_png((await home.coordinator.blobs.local(picture.sha256)).read_bytes())
        assert pixels.ndim == 2
        info = await home.coordinator.runs.queries.info("digits")
        assert (info.items, info.measure) == ("samples", "loss")
        assert (await home.coordinator.checks.run()).breaches == ()
        assert await home.coordinator.ledger.check() == ()


@pytest.mark.usefixtures("installed")
async def test_a_wrong_dataset_or_table_is_refused_with_the_next_step(tmp_path: Path) -> None:
    files = (str(write_digits(tmp_path / "digits", 60)),)
    ask = AddDataset(name="digits", files=files, workload="cnn")
    async with local_coordinator(tmp_path / "coordinator") as home:
        await add.run(home.coordinator, ask)
        await home.coordinator.datasets.add(stripes)
        for change, error, sentence in (
            ({"options": {"sizes": "9"}}, InvalidRunFile, 'unknown key "sizes" in --set'),
            ({"files": (f"{files[0]}/1",)}, InvalidRunFile, "different samples are too few"),
            ({"workload": "gpt"}, BadRequest, "gpt does not build datasets itself: use --text"),
            ({"workload": "cnns"}, BadRequest, '"cnns" is not installed here'),
            ({"workload": ""}, BadRequest, "--for WORKLOAD and --files PATH go together"),
        ):
            with pytest.raises(error, match=sentence):
                await add.run(home.coordinator, msgspec.structs.replace(ask, name="x", **change))
        for old, new, sentence in (
            ("width", "widht", 'unknown key "widht" in .model.: did you mean "width"'),
            ('dataset = "digits"', 'dataset = "stripes"', "needs samples|cnn.*samples"),
        ):
            with pytest.raises(InvalidRunFile, match=sentence):
                await home.coordinator.runs.create(RUN.replace(old, new))


async def test_who_has_not_installed_it_is_told_its_name(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path / "coordinator") as home:
        await home.coordinator.datasets.add(stripes)
        with pytest.raises(
            InvalidRunFile, match='"cnn" is not installed here: known: causal-lm, dcgan, go'
        ):
            await home.coordinator.runs.create(RUN.replace('"digits"', '"stripes"'))
    with pytest.raises(NotFound, match='"cnn" is not enabled on this machine'):
        load("cnn", ("gpt",))
