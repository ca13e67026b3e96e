"""Bytes on their way to the coordinator over HTTP: gone on with, counted, refused, and thrown
away in the end.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from coordinator.config import Constants
from coordinator.database.tables.contributions import uploads as rows
from coordinator.database.volunteers import set_volunteer
from coordinator.intake import uploads as intake
from coordinator.intake.uploads import FREE_S
from coordinator.request_body import ClientGone
from shared.protocol.contributions import UploadInfo, Verdict
from shared.protocol.leases import Lease
from shared.tensors import writer
from tests.support.local_coordinator import (
    RUN,
    LocalCoordinator,
    Worker,
    decode,
    local_coordinator,
    refused,
)


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[LocalCoordinator]:
    async with local_coordinator(tmp_path) as made:
        yield made


async def announced(home: LocalCoordinator) -> tuple[Worker, Lease, bytes, UploadInfo]:
    """A worker, its lease, the update that it is about to send, and the state of the upload."""
    await home.start_run()
    ann = await home.join("Ann")
    lease = await ann.claim()
    data = await ann.update("tiny")
    return ann, lease, data, decode(await ann.announce(lease, data), UploadInfo)


async def test_an_upload_goes_on_where_it_broke_off(home: LocalCoordinator) -> None:
    ann, lease, data, info = await announced(home)
    half = decode(await ann.put(info.upload_id, 0, data[:1000]), UploadInfo)
    assert (half.offset, half.complete) == (1000, False)
    assert refused(await ann.put(info.upload_id, 0, data), 409).code == "offset_mismatch"
    assert refused(await ann.put(info.upload_id, 1001, data[1001:]), 409).code == "offset_mismatch"
    home.coordinator.uploads._hashes.clear()  # as after a restart
    assert decode(await ann.announce(lease, data), UploadInfo).offset == 1000
    done = decode(await ann.put(info.upload_id, 1000, data[1000:]), UploadInfo)
    assert done.complete


async def test_a_broken_connection_keeps_what_came(home: LocalCoordinator) -> None:
    ann, lease, data, info = await announced(home)

    async def breaks() -> AsyncIterator[bytes]:
        yield data[:700]
        raise ClientGone

    principal = await home.coordinator.volunteers.authenticate(ann.worker_id, ann.secret)
    with pytest.raises(ClientGone):
        await home.coordinator.uploads.write(principal, info.upload_id, 0, breaks())
    assert decode(await ann.announce(lease, data), UploadInfo).offset == 700


async def test_an_upload_that_the_disk_lost_a_part_of_begins_again(
    home: LocalCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann, lease, data, info = await announced(home)
    real, failures = os.fsync, [OSError(errno.ENOSPC, "full")]

    def failing(descriptor: int) -> None:
        if failures:  # the kernel tells of it once
            raise failures.pop()
        real(descriptor)

    monkeypatch.setattr(writer, "SYNC_BYTES", 1)
    monkeypatch.setattr(os, "fsync", failing)
    refused(await ann.put(info.upload_id, 0, data[:-1]), 507)
    assert decode(await ann.announce(lease, data), UploadInfo).offset == 0
    assert decode(await ann.put(info.upload_id, 0, data), UploadInfo).complete


async def test_a_newer_request_ends_an_older_one(home: LocalCoordinator) -> None:
    ann, _, data, info = await announced(home)
    sent, forever = asyncio.Event(), asyncio.Event()

    async def hangs() -> AsyncIterator[bytes]:
        yield data[:500]
        sent.set()
        await forever.wait()

    old = asyncio.create_task(ann.put(info.upload_id, 0, hangs()))
    await sent.wait()
    refused(
        await ann.put(info.upload_id, 0, data), 409
    )  # ends the old one, whose 500 bytes are kept
    refused(await old, 409)
    done = decode(await ann.put(info.upload_id, 500, data[500:]), UploadInfo)
    assert done.complete


async def test_uploads_are_counted_against_their_grant(home: LocalCoordinator) -> None:
    await home.start_run()
    ann = await home.join("Ann")
    lease = await ann.claim()
    data = await ann.update("tiny")
    refused(await ann.announce(lease, data, size=1 << 40), 413)
    refused(await ann.announce(lease, data, size=lease.grant.bytes_max + (1 << 20)), 413)
    refused(await ann.announce(lease, data, size=0), 413)
    refused(await ann.announce(lease, data, sha256="x"), 400)
    refused(await ann.announce(lease, data, part=10**6), 400)
    info = decode(await ann.announce(lease, data), UploadInfo)
    refused(await ann.announce(lease, data, size=len(data) - 1), 409)
    longer = await ann.put(info.upload_id, 0, data + b"more")
    refused(longer, 413)
    assert longer.headers["connection"] == "close"
    assert decode(await ann.announce(lease, data), UploadInfo).offset < len(data)


async def test_other_bytes_than_announced_are_refused_and_gone(home: LocalCoordinator) -> None:
    ann, lease, data, info = await announced(home)
    assert (
        refused(await ann.put(info.upload_id, 0, os.urandom(len(data))), 422).code
        == "invalid_frame"
    )
    refused(await ann.put(info.upload_id, 0, data), 404)
    fresh = await ann.upload(lease, data)
    assert fresh.complete


async def test_what_has_arrived_and_is_not_handed_in_yet_is_no_orphan(
    home: LocalCoordinator,
) -> None:
    await home.start_run()
    ann, whole = await home.join("Ann"), home.coordinator
    lease = await ann.claim()
    begun, data = await ann.begin(lease), await ann.update("tiny")
    await ann.upload(lease, data)
    await home.clock.advance(7200)
    await whole.upkeep.sweep()  # as the server does while the volunteer is cut off
    said = ann.submission(lease, begun, data)
    verdict = decode(await ann.post(f"/tasks/{lease.task}/submit", said), Verdict)
    assert verdict.state == "accepted"
    assert (await whole.checks.run()).breaches == ()


async def test_uploads_that_are_never_handed_in_go_in_the_end(home: LocalCoordinator) -> None:
    await home.start_run()
    ann, whole = await home.join("Ann"), home.coordinator
    data = await ann.update("tiny")
    await ann.upload(await ann.claim(), data)
    blob = await whole.blobs.local(hashlib.sha256(data).hexdigest())
    await home.clock.advance(2 * 86_400)
    assert await whole.uploads.expire() == 1
    assert await whole.upkeep.sweep() == 1
    assert not blob.exists()


async def test_unfinished_uploads_expire(home: LocalCoordinator) -> None:
    ann, _, data, info = await announced(home)
    await ann.put(info.upload_id, 0, data[:100])
    await home.clock.advance(2 * 86_400)
    assert await home.coordinator.uploads.expire() == 1
    refused(await ann.put(info.upload_id, 0, data), 404)
    assert list((home.coordinator.blobs.scratch() / "uploads").iterdir()) == []


async def test_a_part_has_two_uploads_at_most(home: LocalCoordinator) -> None:
    ann, lease, data, _ = await announced(home)
    assert (await ann.announce(lease, data[::-1])).status_code == 200
    third = await ann.announce(lease, data + b"3")
    assert "2 uploads of this part" in refused(third, 409).message
    assert (await ann.announce(lease, data)).status_code == 200  # the same once more


async def test_machines_of_one_volunteer_share_a_quota(home: LocalCoordinator) -> None:
    """On probation it is two leases' worth, whatever number of machines there are."""
    await home.start_run()
    ann = await home.join("Ann")
    db = home.coordinator.db
    await db.write(lambda conn: set_volunteer(conn, ann.volunteer_id, standing="probation"))
    lease = await ann.claim()
    granted = lease.grant.bytes_max
    first = await ann.announce(lease, bytes(granted))
    assert first.status_code == 200
    await db.write(lambda conn: conn.execute(rows.update().values(size=4 * granted)))
    other = await ann.announce(lease, b"1" * granted)
    assert "submit them first" in refused(other, 429).message
    await db.write(lambda conn: set_volunteer(conn, ann.volunteer_id, standing="vetted"))
    assert (await ann.announce(lease, b"1" * granted)).status_code == 200


async def test_newcomers_fill_half_of_the_free_disk_at_most(
    home: LocalCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann, lease, data, _ = await announced(home)
    db = home.coordinator.db
    await db.write(lambda conn: set_volunteer(conn, ann.volunteer_id, standing="probation"))
    free_bytes = 1.9 * len(data)
    monkeypatch.setattr(intake, "disk_bytes", lambda path: (free_bytes, free_bytes))
    await home.clock.advance(FREE_S)
    assert "newcomers" in refused(await ann.announce(lease, data[::-1]), 507).message
    free_bytes = 3.1 * len(data)
    await home.clock.advance(FREE_S)
    assert (await ann.announce(lease, data[::-1])).status_code == 200


async def test_what_was_submitted_is_not_uploaded_again_whatever_became_of_it(
    tmp_path: Path, database_url: str
) -> None:
    """Its worker, whose reply was lost, submits it again and has its verdict; nobody else is told
    of it.
    """
    parts = RUN.replace('preset = "fedavg"\nquorum = 2', 'preset = "async-sgd"')
    async with local_coordinator(tmp_path, database=database_url) as home:
        await home.start_run(parts)
        ann, bob = [await home.join(name) for name in ("Ann", "Bob")]
        lease = await ann.claim()
        begun, data = await ann.begin(lease), await ann.update("tiny")
        await ann.upload(lease, data)
        samples = lease.job.batch_size
        said = replace(ann.submission(lease, begun, data), steps=1, samples=samples)
        first = decode(await ann.post(f"/tasks/{lease.task}/submit", said), Verdict)
        assert first.state == "accepted"
        his = await bob.claim()
        begun = await bob.begin(his)
        await bob.upload(his, b"no")
        wrong = replace(bob.submission(his, begun, b"no"), steps=1, samples=samples)
        reply = await bob.post(f"/tasks/{his.task}/submit", wrong)
        assert decode(reply, Verdict).state == "rejected"
        quota = home.coordinator.settings.constants
        home.coordinator.uploads._settings = replace(
            home.coordinator.settings, constants=replace(quota, upload_quota_bytes=1)
        )
        assert "submit it again" in refused(await ann.announce(lease, data), 410).message
        assert decode(await ann.post(f"/tasks/{lease.task}/submit", said), Verdict) == first
        assert "submit it again" in refused(await bob.announce(his, b"no"), 410).message
        refused(await bob.announce(lease, data), 404)
        for other in ({"part": 1}, {"tries": 1}):
            refused(await ann.announce(lease, data, **other), 429)


async def test_who_names_what_it_submitted_before_has_the_same_quota(
    home: LocalCoordinator,
) -> None:
    """Bytes that never come in full belong to no contribution, whatever hash they promise."""
    ann, first, old, _ = await announced(home)
    begun = await ann.begin(first)
    await ann.upload(first, old)
    await ann.post(f"/tasks/{first.task}/submit", ann.submission(first, begun, old))
    db = home.coordinator.db
    await db.write(lambda conn: set_volunteer(conn, ann.volunteer_id, standing="probation"))
    lease = await ann.claim()
    size = lease.grant.bytes_max
    replies = [await ann.announce(lease, old, size=size, part=part) for part in range(6)]
    assert [reply.status_code for reply in replies] == [200] * 4 + [429] * 2


@pytest.mark.parametrize("standing", ["vetted", "probation"])
async def test_the_quota_bounds_what_lies_around(tmp_path: Path, standing: str) -> None:
    async with local_coordinator(tmp_path, constants=Constants(upload_quota_bytes=20_000)) as home:
        await home.start_run()
        ann = await home.join("Ann")
        db = home.coordinator.db
        await db.write(lambda conn: set_volunteer(conn, ann.volunteer_id, standing=standing))
        lease = await ann.claim()
        data = await ann.update("tiny")
        reply = await ann.announce(lease, data, size=20_001)
        refused(reply, 429)
        assert int(reply.headers["retry-after"]) >= 1
