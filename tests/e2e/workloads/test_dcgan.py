"""A GAN trained by a whole volunteer through a whole coordinator: both ways of merging, its
statistics, its pictures.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

import msgspec
import pytest

from coordinator.database import runs
from coordinator.runs.definition import definition
from coordinator.runs.version_files import read_weights
from shared.protocol.accounts import RunInfo
from shared.protocol.versions import SignedManifest, VersionInfo, VersionManifest
from shared.workloads.base import DatasetManifest
from shared.workloads.data.image_dataset import build_images
from shared.workloads.data.image_files import read_png
from shared.workloads.data.image_sources import digit_pictures
from tests.support.local_coordinator import LocalCoordinator, decode, local_coordinator, refused
from tests.support.local_volunteer import LocalMachine
from volunteer.control import events

RUN = """
name = "digits"
workload = "dcgan"
dataset = "digits"
[model]
generator_width = 8
discriminator_width = 8
latent = 16
[task]
batch_size = 32
local_steps = 4
[plan]
quorum = 2
deadline_seconds = 30
codec = "int8"
"""
PRESETS = {
    "fedavg": 'preset = "fedavg"\n',
    "diloco": 'preset = "diloco"\n',  # without its warm-up
    "gradient-average": 'preset = "gradient-average"\n',
    "async-sgd": 'preset = "async-sgd"\ngradient_every = 2\npull_every = 3\n',  # leases in parts
    "sync-sgd": 'preset = "sync-sgd"\n',  # ... of one mini-batch each
}


@cache
def digits() -> tuple[DatasetManifest, tuple[bytes, ...]]:
    """The dataset and its blobs, built once."""
    blobs: list[bytes] = []

    def put(data: bytes) -> str:
        blobs.append(data)
        return hashlib.sha256(data).hexdigest()

    return build_images("digits", digit_pictures(), put, size=8, channels=1), tuple(blobs)


def copied(put: Callable[[bytes], str]) -> DatasetManifest:
    manifest, blobs = digits()
    for blob in blobs:
        put(blob)
    return manifest


@asynccontextmanager
async def drawing(path: Path, preset: str) -> AsyncIterator[LocalMachine]:
    """A run on real digits, and a machine that has joined it."""
    async with local_coordinator(path / "coordinator") as home:
        await home.coordinator.datasets.add(copied)
        await home.coordinator.runs.create(RUN.replace("[plan]\n", "[plan]\n" + PRESETS[preset]))
        await home.coordinator.runs.start("digits")
        async with home.coordinator.working():
            machine = LocalMachine(path / "machine", home)
            await machine.join()
            yield machine


async def history(home: LocalCoordinator) -> tuple[VersionInfo, ...]:
    return await home.coordinator.runs.queries.versions("digits")


async def drawn(home: LocalCoordinator) -> list[VersionInfo]:
    return [row for row in await history(home) if row.picture]


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
async def test_a_volunteer_trains_it_and_its_statistics_travel(tmp_path: Path, preset: str) -> None:
    async with drawing(tmp_path, preset) as machine:
        async with machine.working(max_tasks=4) as process:
            assert await process.ended(60) == 0
            metrics = [event.metrics for event in process.all(events.Training) if event.metrics]
            assert {"loss_d", "loss_g", "real_known", "fakes_known"} <= set(metrics[-1])
            verdicts = [event.verdict for event in process.all(events.Judged)]
            # What is computed again does not count: its version was not the newest any more.
            assert {verdict.state for verdict in verdicts if not verdict.redo} <= {
                "accepted",
                "merged",
                "superseded",
            }
        home = machine.home
        versions = await history(home)
        assert versions[-1].version >= 1
        coordinator = home.coordinator
        signed = await coordinator.runs.queries.manifest("digits")
        weights = msgspec.json.decode(signed.payload, type=VersionManifest).weights
        row = await coordinator.db.read(lambda conn: runs.by_name(conn, "digits"))
        tensors = read_weights(await coordinator.blobs.local(weights.sha256), definition(row))
        assert int(tensors["generator.norm0.num_batches_tracked"]) >= 4
        assert float(tensors["generator.norm0.running_mean"].abs().max()) > 0
        assert float(tensors["generator.norm0.running_var"].min()) > 0
        assert (await coordinator.checks.run()).breaches == ()
        assert await coordinator.ledger.check() == ()


@pytest.mark.slow
async def test_what_it_draws_is_shown_to_everybody(tmp_path: Path) -> None:
    async with drawing(tmp_path, "fedavg") as machine:
        async with machine.working() as process, process.eventually(60):
            while len(await drawn(machine.home)) < 2:
                await process.tick()
        home, client = machine.home, machine.home.client()
        measured = await drawn(home)
        assert {"coverage", "class_overlap"} <= set(measured[-1].metrics)
        page = "/runs/digits/versions"
        newest = await client.get(f"{page}/{measured[-1].version}/sample.png")
        assert newest.headers["content-type"] == "image/png"
        assert read_png(newest.content).shape == (8 * 10 + 2, 8 * 10 + 2)
        tag = {"If-None-Match": newest.headers["etag"]}
        assert (await client.get(str(newest.url), headers=tag)).status_code == 304
        first = await client.get(f"{page}/0/sample.png")
        assert first.content != newest.content
        assert (await client.get(f"{page}/9999/sample.png")).status_code == 404
        assert (await client.get("/runs/other/versions/0/sample.png")).status_code == 404
        ann = await home.join("Bob")
        picture = measured[0].picture
        assert picture is not None
        assert picture.size == len(first.content)
        assert (await ann.get(f"/blobs/{picture.sha256}")).content == first.content
        info = decode(await ann.get("/runs/digits"), RunInfo)
        assert (info.items, info.measure) == ("images", "distance")
        assert decode(await ann.get("/runs/digits/versions/latest"), SignedManifest).signature


async def test_who_shows_nothing_in_public_shows_no_pictures(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path, public_page=False) as home:
        refused(await home.client().get("/runs/digits/versions/0/sample.png"), 404)
