"""Merges of a run with `[privacy]`: clipped updates, noise that nobody can take off, a budget."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
import sqlalchemy as sa

from coordinator.admin import upkeep_commands
from coordinator.database import runs, versions
from coordinator.database.runs import RunRow
from coordinator.database.tables.merges import merges
from coordinator.database.tables.versions import heldout_sums
from coordinator.http.routes.operations import COMMANDS
from coordinator.rules.run_file import StopSettings
from coordinator.runs.definition import definition
from shared.errors import BadRequest
from shared.protocol.accounts import RunInfo
from shared.protocol.members import HeldoutSums
from shared.tensors.frame import open_frame
from tests.support.command_line import Run
from tests.support.local_coordinator import (
    RUN,
    LocalCoordinator,
    Worker,
    decode,
    local_coordinator,
)
from tests.support.members import TRAINED, contribute, declare

CLIP, QUORUM = 0.01, 2
PRIVATE = f"""{RUN}
[data]
at = "members"
[privacy]
epsilon = 8.0
clip = {CLIP}
[stop]
versions = 2
"""


async def member(home: LocalCoordinator, name: str) -> Worker:
    worker = await home.join(name)
    await declare(worker, 64)
    return worker


async def run_row(home: LocalCoordinator) -> RunRow:
    return await home.coordinator.db.read(lambda conn: runs.by_name(conn, "tiny"))


async def merge(home: LocalCoordinator) -> bool:
    return await home.coordinator.merger.merge_if_due((await run_row(home)).id)


async def weights(home: LocalCoordinator, version: int) -> np.ndarray[tuple[int], np.dtype]:
    row = await run_row(home)
    stored = await home.coordinator.db.read(partial(versions.get, run_id=row.id, version=version))
    path = await home.coordinator.blobs.local(stored.master_sha256)
    with open_frame(path, definition(row).schema) as frame:
        return np.concatenate([frame.array(name).reshape(-1).copy() for name in frame])


@pytest.mark.parametrize("shards", [1, 3])
async def test_a_version_is_a_clipped_sum_with_noise_whose_key_is_gone(
    tmp_path: Path, shards: int
) -> None:
    text = PRIVATE.replace('"float32"\n', f'"float32"\nshards = {shards}\n', 1)
    async with local_coordinator(tmp_path) as home:
        await home.start_run(text)
        settings = definition(await run_row(home)).file.privacy
        for name, seed in (("Ann", 1), ("Ben", 2)):
            await contribute(await member(home, name), seed, scale=2e-3)
        assert await merge(home)
        moved = await weights(home, 1) - await weights(home, 0)
        sigma = settings.noise * CLIP / QUORUM
        noise = float(np.linalg.norm(moved))  # the sum itself is at most the clip
        expected = sigma * np.sqrt(moved.size)
        assert abs(noise - expected) < CLIP + 5 * sigma
        terms = await home.coordinator.db.read(
            lambda conn: conn.execute(sa.select(merges.c.terms)).scalar_one()
        )
        assert json.loads(terms)["noise_key"] == ""


async def test_a_huge_update_of_one_member_moves_the_model_by_the_clip(tmp_path: Path) -> None:
    """No other member's size refuses it, and none is scaled down because of it."""
    text = PRIVATE.replace("epsilon = 8.0", "epsilon = 1000.0\nnoise = 0.05")
    async with local_coordinator(tmp_path) as home:
        await home.start_run(text)
        for name, seed, scale in (("Ann", 1, 2e-4), ("Ben", 2, 2e-3)):
            await contribute(await member(home, name), seed, scale=scale)
        assert await merge(home)
        moved = await weights(home, 1) - await weights(home, 0)
        noise = 0.05 * CLIP / QUORUM * np.sqrt(moved.size)
        assert np.linalg.norm(moved) < CLIP + 2 * noise


async def test_the_run_ends_before_it_exceeds_its_budget(tmp_path: Path) -> None:
    """Work that waits is not merged, and the run cannot be extended."""
    async with local_coordinator(tmp_path) as home:
        await home.start_run(PRIVATE)
        members = [await member(home, name) for name in ("Ann", "Ben")]
        for version in range(2):
            for at, worker in enumerate(members):
                await contribute(worker, 10 * version + at)
            assert await merge(home)
        row = await run_row(home)
        assert definition(row).file.privacy.merges == 2
        for at, worker in enumerate(members):
            await contribute(worker, 100 + at)
        assert not await merge(home)
        assert await home.coordinator.upkeep.end_runs() == 1
        with pytest.raises(BadRequest, match="privacy budget"):
            await home.coordinator.wind_down.extend("tiny", StopSettings(versions=9), yes=True)
        row = await run_row(home)
        assert (row.state, row.head) == ("completed", 2)
        info = decode(await members[0].get("/runs/tiny"), RunInfo)
        assert info.privacy is not None
        assert info.privacy.merges == info.privacy.merges_max == 2
        assert info.privacy.epsilon == info.privacy.planned
        assert 7.9 < (info.privacy.epsilon or 0.0) <= 8.0


async def test_versions_that_were_rolled_back_stay_spent(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home:
        await home.start_run(PRIVATE)
        for name, seed in (("Ann", 1), ("Ben", 2)):
            await contribute(await member(home, name), seed)
        assert await merge(home)
        await home.coordinator.runs.rollback("tiny", 0)
        info = await home.coordinator.runs.queries.info("tiny")
        assert info.version == 2
        assert info.privacy is not None
        assert info.privacy.merges == 1


@pytest.mark.parametrize("private", [True, False])
def test_an_organiser_hears_where_a_budget_begins_anew(
    tmp_path: Path, run: Run, private: bool
) -> None:
    """A fork publishes more about the same data, and a backup does not know later versions."""

    async def fork_and_save() -> tuple[str, ...]:
        async with local_coordinator(tmp_path / "data") as home:
            await home.start_run(PRIVATE if private else PRIVATE.partition("[privacy]")[0])
            for name, seed in (("Ann", 1), ("Ben", 2)):
                await contribute(await member(home, name), seed)
            assert await merge(home)
            deed = await home.coordinator.wind_down.fork("tiny@1", "again", yes=True)
            ask = upkeep_commands.Backup(to=str(tmp_path / "saved"))
            await upkeep_commands.backup.run(home.coordinator, ask)
        return deed.says

    sentences = asyncio.run(fork_and_save())
    told = [sentence for sentence in sentences if "epsilon of both runs adds up" in sentence]
    assert len(told) == private
    assert not private or "after 1 of 2 merges" in told[0]
    restored = run("restore", tmp_path / "saved", "--data-dir", tmp_path / "new")
    assert restored.code == 0, restored.err
    for name in ("tiny", "again"):
        sentence = f'"{name}" does not count versions that were published after the backup'
        assert (sentence in restored.out) == private


@pytest.mark.parametrize("private", [True, False])
async def test_nothing_shows_the_losses_that_members_measured(
    tmp_path: Path, private: bool
) -> None:
    """No noise was added to them, so that a private run shows none, nor chooses a version by them;
    another shows them, and never those of the training.
    """
    async with local_coordinator(tmp_path, public_page=True) as home:
        await home.start_run(PRIVATE if private else PRIVATE.partition("[privacy]")[0])
        while await home.coordinator.evaluation.evaluate_next():
            pass
        for seed, name in enumerate(("Ann", "Ben"), 1):
            heldout = HeldoutSums(version=0, loss_sum=31337.25 * seed, items=1)
            await contribute(await member(home, name), seed, heldout=heldout)
        replies = [
            await COMMANDS[command].run(home.coordinator, COMMANDS[command].request(**request))
            for command, request in (("run.list", {}), ("run.show", {"name": "tiny"}), ("top", {}))
        ]
        pages = [
            (await home.client().get(path)).text
            for path in ("/", "/runs/tiny", "/figures.json", "/metrics")
        ]
        stored = await home.coordinator.db.read(
            lambda conn: conn.execute(heldout_sums.select()).all()
        )
    shown = [*pages, *(msgspec.json.encode(reply).decode() for reply in replies)]
    assert all("tiny" in text for text in shown)
    assert not any(str(TRAINED) in text for text in shown)
    assert (bool(stored), any("47005.8" in text for text in shown)) == (not private, not private)
    assert ("epsilon 0 after 0 of 2 merges" in pages[1]) == private
