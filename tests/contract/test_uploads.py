"""Uploads that wait for their submission: who writes them, how long they stay and how much room they
take, the same on SQLite and PostgreSQL.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import update

from coordinator.database.tables.accounts import workers
from coordinator.intake import uploads
from coordinator.intake.uploads import UPLOAD_TTL_S
from shared.protocol.contributions import UploadInfo
from shared.units import DAY_S
from tests.support.local_coordinator import LocalCoordinator, decode, local_coordinator, refused

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
    assert await home.coordinator.task_leases.expire() == 1
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


async def together(
    home: LocalCoordinator,
    monkeypatch: pytest.MonkeyPatch,
    asks: Sequence[Awaitable[httpx.Response]],
) -> list[httpx.Response]:
    """Hold the first grant until all others were asked for; return the replies."""
    service, db = home.coordinator.uploads, home.coordinator.db
    write, first, others = db.write, asyncio.Event(), asyncio.Event()

    async def held(transaction: Any) -> Any:
        if "_grant" in transaction.__code__.co_names:
            first.set()
            await others.wait()
        return await write(transaction)

    monkeypatch.setattr(db, "write", held)
    async with asyncio.timeout(30):
        asked = [asyncio.ensure_future(asks[0])]
        await first.wait()
        asked += [asyncio.ensure_future(ask) for ask in asks[1:]]
        while len(service._granting._waiting) < len(asks) - 1:
            await asyncio.sleep(0.001)
        others.set()
        return await asyncio.gather(*asked)


async def test_machines_of_one_account_that_come_together_have_one_quota(
    home: LocalCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "WAITING_MAX", 1)
    crew = [await home.join(name) for name in ("Ann", "Eve", "Eve's other machine")]
    _, eve, other = crew
    move = update(workers).where(workers.c.id == other.worker_id)
    account = {"volunteer_id": eve.volunteer_id}
    await home.coordinator.db.write(lambda conn: conn.execute(move.values(account)))
    leases = [await worker.claim() for worker in crew]
    asks = [worker.announce(lease, b"small") for worker, lease in zip(crew, leases, strict=True)]
    replies = await together(home, monkeypatch, asks)
    assert [reply.status_code for reply in replies] == [200, 200, 429]


async def test_newcomers_that_come_together_fill_no_more_of_the_disk_than_one_after_the_other(
    home: LocalCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    strangers = [await home.stranger(name) for name in ("Eve", "Mallory", "Trudy")]
    leases = [await stranger.claim() for stranger in strangers]
    updates = [await stranger.update("tiny", seed) for seed, stranger in enumerate(strangers)]
    free_bytes = 3.1 * len(updates[0])
    monkeypatch.setattr(uploads, "disk_bytes", lambda path: (free_bytes, free_bytes))
    asks = [
        stranger.announce(lease, data)
        for stranger, lease, data in zip(strangers, leases, updates, strict=True)
    ]
    replies = await together(home, monkeypatch, asks)
    assert sorted(reply.status_code for reply in replies) == [200, 200, 507]
    (late,) = [reply for reply in replies if reply.status_code == 507]
    assert "newcomers" in refused(late, 507).message


async def test_nobody_writes_to_an_upload_of_another_machine_or_to_one_past_its_time(
    home: LocalCoordinator,
) -> None:
    ann, eve = [await home.join(name) for name in ("Ann", "Eve")]
    lease, data = await ann.claim(), await ann.update("tiny")
    upload = decode(await ann.announce(lease, data), UploadInfo).upload_id
    refused(await eve.put(upload, 0, data[:200]), 404)
    assert decode(await ann.put(upload, 0, data[:100]), UploadInfo).offset == 100
    await home.clock.advance(UPLOAD_TTL_S + 1.0)
    refused(await ann.put(upload, 100, data[100:]), 404)  # although no upkeep came by


async def test_a_volunteer_has_so_many_uploads_that_are_not_submitted_at_most(
    home: LocalCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "WAITING_MAX", 2)
    ann, bob = [await home.join(name) for name in ("Ann", "Bob")]
    lease, other = await ann.claim(), await bob.claim()
    replies = [await ann.announce(lease, b"small", part=part) for part in range(3)]
    assert [reply.status_code for reply in replies] == [200, 200, 429]
    assert (await bob.announce(other, b"small")).status_code == 200


async def test_upkeep_takes_no_upload_from_the_request_that_writes_it(
    home: LocalCoordinator,
) -> None:
    ann = await home.join("Ann")
    lease, data = await ann.claim(), await ann.update("tiny")
    upload = decode(await ann.announce(lease, data), UploadInfo).upload_id
    sent, rest = asyncio.Event(), asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield data[:500]
        sent.set()
        await rest.wait()
        yield data[500:]

    writing = asyncio.ensure_future(ann.put(upload, 0, slowly()))
    await sent.wait()
    await ann.post(f"/tasks/{lease.task}/release", {"attempt": lease.attempt})
    assert await home.coordinator.uploads.expire() == 0
    rest.set()
    assert decode(await writing, UploadInfo).complete
    assert await home.coordinator.uploads.expire() == 1
