"""Uploads that no submission takes: they go with their lease and share the disk, the same on SQLite
and PostgreSQL.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from shared.units import DAY_S
from tests.support.local_coordinator import LocalCoordinator, local_coordinator, refused

ALONE = {"open": True, "proof_of_work_bits": 0}


@pytest.fixture
async def home(tmp_path: Path, database_url: str) -> AsyncIterator[LocalCoordinator]:
    async with local_coordinator(tmp_path, database=database_url, **ALONE) as made:
        await made.start_run()
        yield made


async def test_an_upload_stays_while_it_can_be_submitted_and_goes_at_once_when_it_cannot(
    home: LocalCoordinator,
) -> None:
    """A holder whose time ran out may still submit, until somebody else has its task."""
    expire = home.coordinator.uploads.expire
    ann, bob = [await home.join(name) for name in ("Ann", "Bob")]
    lease, data = await ann.claim(), await ann.update("tiny")
    begun = await ann.begin(lease)
    assert (await ann.upload(lease, data)).complete
    assert await expire() == 0
    await home.clock.advance(DAY_S / 2)
    assert await home.coordinator.queue.expire() == 1
    assert await expire() == 0
    other = await bob.claim()
    assert other.task == lease.task
    assert await expire() == 1
    assert (
        "given to somebody else"
        in refused(
            await ann.post(f"/tasks/{lease.task}/submit", ann.submission(lease, begun, data)), 410
        ).message
    )
    await bob.upload(other, data)
    assert await expire() == 0
    await bob.post(f"/tasks/{other.task}/release", {"attempt": other.attempt})
    assert await expire() == 1
    assert (await home.coordinator.checks.run()).breaches == ()


async def test_newcomers_that_come_together_fill_no_more_of_the_disk_than_one_after_the_other(
    home: LocalCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    strangers = [await home.stranger(name) for name in ("Eve", "Mallory", "Trudy")]
    leases = [await stranger.claim() for stranger in strangers]
    updates = [await stranger.update("tiny", seed) for seed, stranger in enumerate(strangers)]
    uploads, db = home.coordinator.uploads, home.coordinator.db
    monkeypatch.setattr(uploads, "_check_space", lambda size: 3.1 * len(updates[0]))
    write, first, others = db.write, asyncio.Event(), asyncio.Event()

    async def held(transaction: Any) -> Any:
        """Hold the first grant until both others were asked for."""
        if "_grant" in transaction.__code__.co_names:
            first.set()
            await others.wait()
        return await write(transaction)

    monkeypatch.setattr(db, "write", held)
    asks = [
        stranger.announce(lease, data)
        for stranger, lease, data in zip(strangers, leases, updates, strict=True)
    ]
    async with asyncio.timeout(30):
        asked = [asyncio.ensure_future(asks[0])]
        await first.wait()
        asked += [asyncio.ensure_future(ask) for ask in asks[1:]]
        while len(uploads._granting._waiting) < 2:
            await asyncio.sleep(0.001)
        others.set()
        replies = await asyncio.gather(*asked)
    assert sorted(reply.status_code for reply in replies) == [200, 200, 507]
    (late,) = [reply for reply in replies if reply.status_code == 507]
    assert "newcomers" in refused(late, 507).message
