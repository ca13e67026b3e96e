"""A workload of somebody else's package, through a whole coordinator and a whole volunteer: nothing
of ours knows of it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from coordinator.admin.datasets import AddDataset, add
from shared.errors import BadRequest, InvalidRunFile, NotFound
from shared.workloads.base import load
from shared.workloads.data.image_files import read_png
from tests.support.local_coordinator import local_coordinator
from tests.support.local_volunteer import LocalMachine
from tests.support.workloads import example_workload
from tests.support.workloads.tiny_dcgan import stripes
from volunteer.control import commands, events

RUN = """
name = "again"
workload = "sketch"
dataset = "stripes"
[model]
code = 4
[task]
local_steps = 10
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
    async with local_coordinator(tmp_path / "coordinator") as home:
        await home.coordinator.datasets.add(stripes)
        await home.coordinator.runs.create(RUN)
        await home.coordinator.runs.start("again")
        machine = LocalMachine(tmp_path / "machine", home)
        allowed: dict[str, Any] = {"workloads": ("gpt", "sketch")}
        await machine.engine(**allowed).control.do(commands.Join(link=machine.link, name="Ann"))
        async with home.coordinator.working():
            async with machine.working(max_tasks=6, **allowed) as process:
                assert await process.ended(60) == 0
                assert len(process.all(events.Trained)) == 6
            while await home.coordinator.evaluation.evaluate_next():
                pass
        rows = [row for row in await home.coordinator.runs.queries.versions("again") if row.loss]
        assert rows[-1].version >= 3
        assert (rows[-1].loss or 1) < 0.8 * (rows[0].loss or 0)
        picture = rows[-1].picture
        assert picture is not None
        pixels = read_png((await home.coordinator.blobs.local(picture.sha256)).read_bytes())
        assert pixels.ndim == 2
        info = await home.coordinator.runs.queries.info("again")
        assert (info.items, info.measure) == ("images", "loss")
        assert (await home.coordinator.checks.run()).breaches == ()
        assert await home.coordinator.ledger.check() == ()


@pytest.mark.usefixtures("installed")
async def test_its_own_dataset_is_built_trained_on_and_measured(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    images = np.repeat(random.integers(0, 255, (400, 4, 8), np.uint8), 2, axis=1)
    np.save(tmp_path / "some.npy", images)
    np.save(tmp_path / "again.npy", images[:9])
    np.save(tmp_path / "odd.npy", np.zeros((3, 5, 5), np.uint8))
    (tmp_path / "no.npy").write_bytes(b"no array")
    files = tuple(str(tmp_path / f"{name}.npy") for name in ("some", "again", "odd", "no"))
    ask = AddDataset(name="blocks", files=files, workload="sketch", licence="MIT", source="here")
    async with local_coordinator(tmp_path / "coordinator") as home:
        shown = await add.run(home.coordinator, ask)
        assert (shown.kind, shown.items, shown.heldout, shown.licence) == ("images", 380, 20, "MIT")
        assert len(shown.skipped) == 2
        assert "(3, 5, 5), not bytes (N, 8, 8)" in shown.skipped[0]
        run = RUN.replace('"stripes"', '"blocks"')
        await home.coordinator.runs.create(run)
        await home.coordinator.runs.start("again")
        machine = LocalMachine(tmp_path / "machine", home)
        allowed: dict[str, Any] = {"workloads": ("sketch",)}
        await machine.engine(**allowed).control.do(commands.Join(link=machine.link, name="Ann"))
        async with home.coordinator.working():
            async with machine.working(max_tasks=3, **allowed) as process:
                assert await process.ended(60) == 0
            while await home.coordinator.evaluation.evaluate_next():
                pass
        rows = [row for row in await home.coordinator.runs.queries.versions("again") if row.loss]
        assert (rows[-1].loss or 1) < (rows[0].loss or 0)
        for change, error, sentence in (
            ({"options": {"sizes": "9"}}, InvalidRunFile, 'did you mean "size"'),
            ({"options": {"size": "5"}}, InvalidRunFile, "3 different images are too few|1 diff"),
            ({"workload": "gpt"}, BadRequest, "gpt does not build datasets itself: use --text"),
            ({"workload": "sketches"}, BadRequest, '"sketches" is not installed here'),
            ({"workload": ""}, BadRequest, "--for WORKLOAD and --files PATH go together"),
        ):
            with pytest.raises(error, match=sentence):
                await add.run(home.coordinator, msgspec.structs.replace(ask, name="x", **change))


async def test_who_has_not_installed_it_is_told_its_name(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path / "coordinator") as home:
        await home.coordinator.datasets.add(stripes)
        with pytest.raises(
            InvalidRunFile, match='"sketch" is not installed here: known: causal-lm, dcgan, go'
        ):
            await home.coordinator.runs.create(RUN)
    with pytest.raises(NotFound, match='"sketch" is not enabled on this machine'):
        load("sketch", ("gpt",))
