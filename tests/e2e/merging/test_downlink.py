"""Versions as a chain of links and snapshots: over HTTP, on both databases, with real volunteers,
through crashes.
"""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

from coordinator.admin import runs as run_commands
from coordinator.admin.command import NameRequest
from coordinator.database import datasets, evaluations, runs, versions
from coordinator.database.versions import VersionRow
from coordinator.rules import run_file
from coordinator.runs.definition import definition, of_file
from coordinator.upkeep.upkeep import ORPHAN_AGE_S
from shared.clock import SystemClock
from shared.decoding import decode
from shared.proofs.signing import digest
from shared.protocol.accounts import RunInfo
from shared.protocol.versions import BlobRef, SignedManifest, VersionManifest
from shared.tensors.slices import Array
from shared.tensors.spec import Schema
from tests.support.failpoints import fail, faults
from tests.support.local_coordinator import (
    RUN,
    LocalCoordinator,
    Worker,
    local_coordinator,
    refused,
)
from tests.support.local_coordinator import decode as body_of
from tests.support.local_volunteer import LocalMachine, Process
from tests.support.parsed_frames import parse_frame
from volunteer.net.api import Api
from volunteer.net.client import Client
from volunteer.net.tls import Address
from volunteer.net.transfers import Transfers
from volunteer.net.weights import Weights
from volunteer.storage.blob_cache import Cache

CHAIN = RUN.replace("quorum = 2", 'quorum = 1\ndownlink = "chain"\nsnapshot_every = 3')
KEEPS = CHAIN + "[retention]\nlatest = 1\nevery = 0\n[evaluation]\nevery = 0\n"
# Large enough for weights to be most of what travels.
WIDE = RUN.replace("n_embd = 8", "n_embd = 48") + "[stop]\nversions = 5\n[train]\nlr = 0.01\n"


@pytest.fixture
async def home(tmp_path: Path, database_url: str) -> AsyncIterator[LocalCoordinator]:
    async with local_coordinator(tmp_path, database=database_url) as made:
        yield made


async def row_of(home: LocalCoordinator, version: int) -> VersionRow:
    return await home.coordinator.db.read(lambda conn: versions.get(conn, 1, version))


async def weights(home: LocalCoordinator, sha256: str) -> dict[str, Array]:
    row = await home.coordinator.db.read(lambda conn: runs.by_id(conn, 1))
    frame = parse_frame(await bytes_of(home, sha256), definition(row).schema)
    return {name: frame.array(name) for name in frame}


async def bytes_of(home: LocalCoordinator, sha256: str) -> bytes:
    return (await home.coordinator.blobs.local(sha256)).read_bytes()


async def advance(home: LocalCoordinator, worker: Worker, versions_: int) -> None:
    """So many merges of one contribution each."""
    for _ in range(versions_):
        head = (await home.coordinator.runs.queries.info("tiny")).version
        assert (await worker.work(seed=head)).state == "accepted"
        assert await home.coordinator.merger.merge_if_due(1)


async def manifest(worker: Worker, version: str = "latest") -> VersionManifest:
    signed = body_of(await worker.get(f"/runs/tiny/versions/{version}"), SignedManifest)
    return decode(signed.payload, VersionManifest)


def blobs_of(found: VersionManifest) -> list[BlobRef]:
    """Return the blobs of the links and snapshots of a version."""
    links, snapshots = found.downlink.links, found.downlink.snapshots
    return [*(link.blob for link in links), *(each.blob for each in snapshots)]


def downloads(worker: Worker, path: Path) -> Weights:
    """Return the downloader of weights of a worker's machine."""
    client = Client(
        Address(url="http://127.0.0.1:1"),
        clock=SystemClock(),
        rng=random.Random(1),
        token=f"{worker.worker_id}.{worker.secret}",
        transport=worker.house.transport,
    )
    cache = Cache(path, 1 << 30)
    return Weights(Transfers(Api(client), cache), cache, lambda message: None)


async def fetched(getting: Weights, wanted: VersionManifest) -> bytes:
    return (await getting.fetch(wanted, lambda total: lambda done: None)).read_bytes()


@pytest.mark.parametrize(
    ("model", "plan", "stored"),
    [
        ("n_embd = 8", "", "float32"),
        ("n_embd = 8", 'downlink = "auto"', "float32"),
        ("n_embd = 8", 'downlink = "chain"', "chain"),
        ("n_embd = 160", "", "chain"),  # 1.4 MiB
        ("n_embd = 160", 'downlink = "auto"', "chain"),
        ("n_embd = 160", 'downlink = "float32"', "float32"),
    ],
)
async def test_how_versions_travel_is_settled_by_the_size_of_the_model_and_shown(
    home: LocalCoordinator, model: str, plan: str, stored: str
) -> None:
    await home.start_run()
    text = RUN.replace('"tiny"', '"other"').replace("n_embd = 8", model)
    await home.coordinator.runs.create(text.replace("quorum = 2", f"quorum = 2\n{plan}"))
    row = await home.coordinator.db.read(lambda conn: runs.by_name(conn, "other"))
    assert definition(row).file.plan["downlink"] == stored
    shown = await run_commands.show.run(home.coordinator, NameRequest(name="other"))
    assert (shown.codec, shown.downlink) == ("float32", stored)


async def test_a_run_from_before_goes_on_as_it_began(home: LocalCoordinator) -> None:
    await home.start_run()
    text = RUN.replace('"tiny"', '"other"').replace("n_embd = 8", "n_embd = 160")
    await home.coordinator.runs.create(text)
    row = await home.coordinator.db.read(lambda conn: runs.by_name(conn, "other"))
    file = run_file.decode(row.file)
    without = {key: value for key, value in file.plan.items() if key != "downlink"}
    before = run_file.encode(msgspec.structs.replace(file, plan=without))
    assert of_file(before).plan.downlink == "float32"


async def test_whoever_follows_holds_the_published_bits_and_the_master_stays_exact(
    home: LocalCoordinator, tmp_path: Path
) -> None:
    await home.start_run(CHAIN)
    ann = await home.join("Ann")
    getting = downloads(ann, tmp_path / "ann")
    master = await weights(home, (await row_of(home, 0)).master_sha256)
    for version in range(1, 8):
        await advance(home, ann, 1)
        row, found = await row_of(home, version), await manifest(ann)
        assert await fetched(getting, found) == await bytes_of(home, row.published_sha256)
        assert (found.weights.sha256, found.master_sha256) == (
            row.published_sha256,
            row.master_sha256,
        )
        stepped = await weights(home, row.master_sha256)
        for name, update in await update_of(home, version - 1):
            assert stepped[name].tobytes() == (master[name] - update).tobytes()
        master = stepped
        published = await weights(home, row.published_sha256)
        assert any((published[name] != master[name]).any() for name in master)
    report = await home.coordinator.checks.run()
    assert report.breaches == ()


async def update_of(home: LocalCoordinator, seed: int) -> list[tuple[str, Array]]:
    """Return the update that `Worker.work` submits with a seed."""
    row = await home.coordinator.db.read(lambda conn: runs.by_id(conn, 1))
    schema: Schema = definition(row).schema
    rng = np.random.default_rng(seed)
    return [(s.name, (rng.standard_normal(s.shape) * 1e-3).astype("f4")) for s in schema]


async def test_volunteers_may_have_the_ways_to_a_version_and_not_its_master(
    home: LocalCoordinator,
) -> None:
    await home.start_run(CHAIN)
    ann = await home.join("Ann")
    await advance(home, ann, 3)
    found = await manifest(ann)
    ways = blobs_of(found)
    assert len(ways) == 2  # a link and a snapshot: more links are more bytes than the snapshot
    for ref in [*ways, found.weights]:
        reply = await ann.get(f"/blobs/{ref.sha256}")
        assert digest(reply.content) == ref.sha256
        assert len(reply.content) == ref.size
    refused(await ann.get(f"/blobs/{found.master_sha256}"), 404)
    tag = {"If-None-Match": f'"{found.weights.sha256}"'}
    assert (await ann.get("/runs/tiny/versions/latest", **tag)).status_code == 304


async def test_what_is_exported_is_the_master_and_what_is_measured_is_published(
    home: LocalCoordinator, tmp_path: Path
) -> None:
    await home.start_run(CHAIN)
    ann = await home.join("Ann")
    await advance(home, ann, 2)
    row, whole = await row_of(home, 2), home.coordinator
    published = await bytes_of(home, row.published_sha256)
    await whole.blobs.delete(row.published_sha256, "asked")
    await whole.export.export("tiny", tmp_path / "out", 2)
    master = await weights(home, row.master_sha256)
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert all(exported[name].tobytes() == master[name].tobytes() for name in master)
    await whole.blobs.put_bytes(published)
    await whole.blobs.delete(row.master_sha256, "asked")
    while await whole.evaluation.evaluate_next():
        pass
    seen = await whole.db.read(lambda conn: evaluations.evaluation(conn, 1, 2))
    assert seen.state == "done"


async def test_what_the_newest_version_needs_is_kept_when_older_ones_are_pruned(
    home: LocalCoordinator, tmp_path: Path
) -> None:
    await home.start_run(KEEPS)
    ann = await home.join("Ann")
    getting = downloads(ann, tmp_path / "ann")
    await advance(home, ann, 4)
    await fetched(getting, await manifest(ann))
    old = await manifest(ann)
    await advance(home, ann, 1)
    assert await home.coordinator.upkeep.prune() == 4
    await home.clock.advance(ORPHAN_AGE_S + 1)
    assert await home.coordinator.upkeep.sweep() > 0
    found = await manifest(ann)
    assert found.downlink.links[1] == old.downlink.links[0]  # made for a version that is gone
    for ref in blobs_of(found):
        assert (await ann.get(f"/blobs/{ref.sha256}")).status_code == 200
    refused(await ann.get(f"/blobs/{old.weights.sha256}"), 404)
    await fetched(getting, found)
    await fetched(downloads(ann, tmp_path / "new"), found)
    assert (await home.coordinator.checks.run()).breaches == ()


async def test_a_rollback_leads_to_the_old_bits_and_the_chain_goes_on_from_them(
    home: LocalCoordinator, tmp_path: Path
) -> None:
    await home.start_run(CHAIN)
    ann = await home.join("Ann")
    getting = downloads(ann, tmp_path / "ann")
    await advance(home, ann, 4)
    await fetched(getting, await manifest(ann))
    await home.coordinator.runs.rollback("tiny", 2)
    back = await manifest(ann)
    assert back.version == 5
    assert back.weights.sha256 == (await row_of(home, 2)).published_sha256
    await fetched(getting, back)
    await advance(home, ann, 1)
    found = await manifest(ann)
    assert found.downlink.links[0].base == back.weights.sha256
    await fetched(getting, found)
    assert (await home.coordinator.checks.run()).breaches == ()


@pytest.mark.parametrize(
    "point",
    ["before put_file", "after put_file", "amid write _commit"],
)
async def test_a_coordinator_that_dies_between_link_and_commit_leaves_nothing(
    home: LocalCoordinator, point: str
) -> None:
    await home.start_run(CHAIN)
    ann, whole = await home.join("Ann"), home.coordinator
    assert (await ann.work(0)).state == "accepted"
    when, _, where = point.partition(" ")
    order = fail(RuntimeError("the process is gone")).on_the(2 if "put" in where else 1)
    order = getattr(order, when)(where)
    before = await stored(home)
    with faults(order).installed(), pytest.raises(RuntimeError):
        await whole.merger.merge_if_due(1)
    assert not [path for path in whole.blobs.scratch().iterdir() if path.is_file()]
    await home.clock.advance(ORPHAN_AGE_S + 1)
    await whole.upkeep.sweep()
    assert await stored(home) == before
    await home.clock.advance(60)  # the lease of the dead one is over
    assert await whole.merger.merge_if_due(1)
    found = await manifest(ann)
    assert found.version == 1
    assert all([await bytes_of(home, ref.sha256) for ref in blobs_of(found)])
    assert (await whole.checks.run()).breaches == ()


async def test_what_a_killed_coordinator_left_half_written_goes_with_the_orphans(
    home: LocalCoordinator,
) -> None:
    scratch = home.coordinator.blobs.scratch()
    old, new, upload = scratch / "merge-1-link", scratch / "merge-2-link", scratch / "uploads" / "u"
    for path in (old, new, upload):
        path.write_bytes(b"half")
    now = home.clock.now()
    for path, age in ((old, 7200), (new, 60), (upload, 7200)):
        os.utime(path, (now - age, now - age))
    await home.coordinator.upkeep.sweep()
    assert [path.exists() for path in (old, new, upload)] == [False, True, True]


async def stored(home: LocalCoordinator) -> set[str]:
    return {entry.sha256 async for entry in home.coordinator.blobs.entries()}


# --- with real volunteers ---


async def learned(path: Path, text: str) -> tuple[RunInfo, int]:
    """Two volunteers do a whole run: what became of it, and the bytes of weights that they
    fetched.
    """
    async with local_coordinator(path / "coordinator") as home:
        await home.start_run(text)
        async with home.coordinator.working():
            ann, bob = LocalMachine(path / "ann", home), LocalMachine(path / "bob", home)
            await ann.join("Ann")
            await bob.join("Bob")
            async with ann.working() as one, bob.working() as other, one.eventually(90):
                while (await home.coordinator.runs.queries.info("tiny")).state != "completed":
                    await one.tick()
        while await home.coordinator.evaluation.evaluate_next():
            pass
        taken = await down_bytes(home, one) + await down_bytes(home, other)
        return await home.coordinator.runs.queries.info("tiny"), taken


async def down_bytes(home: LocalCoordinator, process: Process) -> int:
    sizes = await home.coordinator.db.read(datasets.all_registered)
    served = await home.coordinator.db.read(
        lambda conn: {sha for sha in sizes if versions.is_published(conn, sha)}
    )
    asked = [path.rpartition("/")[2] for path in process.network.seen if "GET" in path]
    return sum(sizes[sha] for sha in asked if sha in served)


@pytest.mark.slow
async def test_two_volunteers_learn_over_a_chain_with_less_than_half_the_bytes(
    tmp_path: Path,
) -> None:
    _, whole = await learned(tmp_path / "plain", WIDE)
    chained = WIDE.replace("quorum = 2", 'quorum = 2\ndownlink = "chain"\nsnapshot_every = 2')
    info, short = await learned(tmp_path / "chain", chained)
    assert info.loss is not None
    assert info.loss_first is not None
    assert info.loss < info.loss_first - 0.05
    assert short < 0.45 * whole
