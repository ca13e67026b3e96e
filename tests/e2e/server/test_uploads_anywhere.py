"""Uploads in pieces to three replicas in turn, on one database and one object store."""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path

import httpx
import pytest
from typing_extensions import override

from coordinator.database import tasks, upload_rows
from coordinator.request_body import ClientGone
from shared.protocol.contributions import UploadInfo, Verdict
from shared.protocol.limits import UPLOAD_PIECE_BYTES
from tests.support.databases import Postgres
from tests.support.local_coordinator import (
    LocalCoordinator,
    Worker,
    decode,
    local_coordinator,
    refused,
)

REPLICAS = 3
UPLOADS = int(os.environ.get("UPLOADS", "20"))


class RoundRobin(httpx.AsyncBaseTransport):
    """The way to replicas in turn, as through a balancer where nothing sticks."""

    def __init__(self, homes: list[LocalCoordinator]) -> None:
        self._next = itertools.cycle([home.transport for home in homes])
        self.requests = 0

    @override
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.requests += 1
        return await next(self._next).handle_async_request(request)


@pytest.fixture
async def homes(
    postgres: Postgres, s3_url: str, tmp_path: Path
) -> AsyncIterator[list[LocalCoordinator]]:
    url = await postgres.fresh()
    async with AsyncExitStack() as stack:
        made: list[LocalCoordinator] = []
        for number in range(REPLICAS):
            folder = tmp_path / f"r{number}"
            folder.mkdir()
            if made:
                shutil.copy(tmp_path / "r0" / "signing.key", folder)
            place = local_coordinator(folder, database=url, blobs=s3_url)
            made.append(await stack.enter_async_context(place))
        yield made
    await postgres.recycle(url)


def spread(worker: Worker, homes: list[LocalCoordinator]) -> RoundRobin:
    """Send what a worker asks to the replicas in turn."""
    way = RoundRobin(homes)
    worker.http._transport = way
    return way


async def test_three_pieces_take_four_requests_and_every_upload_ends(
    homes: list[LocalCoordinator],
) -> None:
    await homes[0].start_run()
    ann = await homes[0].join("Ann")
    lease = await ann.claim()
    begun = await ann.begin(lease)
    way = spread(ann, homes)
    for number in range(UPLOADS):
        data = await ann.update("tiny", number)
        third = len(data) // 3 + 1
        info = decode(
            await ann.announce(lease, data, part=number % 8, tries=number % 2), UploadInfo
        )
        while not info.complete:
            piece = data[info.offset : info.offset + third]
            info = decode(await ann.put(info.upload_id, info.offset, piece), UploadInfo)
        sha = hashlib.sha256(data).hexdigest()
        assert await homes[0].coordinator.blobs.hash(sha) == sha
        await homes[0].coordinator.db.write(
            partial(upload_rows.remove, upload_ids=[info.upload_id])
        )
    assert way.requests == 4 * UPLOADS
    data = await ann.update("tiny")
    await ann.upload(lease, data)
    reply = await ann.post(f"/tasks/{lease.task}/submit", ann.submission(lease, begun, data))
    assert decode(reply, Verdict).state == "accepted"


async def test_what_arrived_before_a_break_is_kept_for_every_replica(
    homes: list[LocalCoordinator],
) -> None:
    await homes[0].start_run()
    ann = await homes[0].join("Ann")
    lease = await ann.claim()
    spread(ann, homes)
    data = await ann.update("tiny")
    info = decode(await ann.announce(lease, data), UploadInfo)

    async def broken() -> AsyncIterator[bytes]:
        yield data[:1000]
        raise ClientGone

    with suppress(AssertionError):  # httpx wants a reply, of which there is none
        await ann.put(info.upload_id, 0, broken())
    for _ in range(REPLICAS):
        info = decode(await ann.announce(lease, data), UploadInfo)
        assert info.offset == 1000
        assert refused(await ann.put(info.upload_id, 0, data), 409).code == "offset_mismatch"
    assert decode(await ann.put(info.upload_id, 1000, data[1000:]), UploadInfo).complete
    staging = homes[0].coordinator.blobs.staging
    assert staging is not None
    assert await staging.pieces(info.upload_id) == []


async def test_the_announced_hash_is_checked_over_all_pieces(
    homes: list[LocalCoordinator],
) -> None:
    await homes[0].start_run()
    ann = await homes[0].join("Ann")
    lease = await ann.claim()
    spread(ann, homes)
    data = await ann.update("tiny")
    info = decode(await ann.announce(lease, data), UploadInfo)
    decode(await ann.put(info.upload_id, 0, data[:1000]), UploadInfo)
    wrong = bytes(len(data) - 1000)
    assert refused(await ann.put(info.upload_id, 1000, wrong), 422).code == "invalid_frame"


@pytest.mark.slow
async def test_a_file_of_more_than_one_piece_goes_on_where_a_replica_died(
    homes: list[LocalCoordinator], monkeypatch: pytest.MonkeyPatch
) -> None:
    size = UPLOAD_PIECE_BYTES + (24 << 20)
    monkeypatch.setattr(tasks, "grant_bytes", lambda *_: size)
    chunk = bytes(1 << 20)

    async def zeros(count: int) -> AsyncIterator[bytes]:
        for _ in range(count // len(chunk)):
            yield chunk

    digest = hashlib.sha256()
    for _ in range(size // len(chunk)):
        digest.update(chunk)
    await homes[0].start_run()
    ann = await homes[0].join("Ann")
    lease = await ann.claim()
    announced = {"size": size, "sha256": digest.hexdigest()}
    info = decode(await ann.announce(lease, b"", **announced), UploadInfo)
    first = await ann.put(info.upload_id, 0, zeros(UPLOAD_PIECE_BYTES))
    assert decode(first, UploadInfo).offset == UPLOAD_PIECE_BYTES
    shutil.rmtree(homes[0].coordinator.settings.directory / "cache")  # its machine is gone
    spread(ann, homes[1:])
    info = decode(await ann.announce(lease, b"", **announced), UploadInfo)
    assert (info.offset, info.complete) == (UPLOAD_PIECE_BYTES, False)
    rest = await ann.put(info.upload_id, info.offset, zeros(size - info.offset))
    assert decode(rest, UploadInfo).complete
    assert await homes[2].coordinator.blobs.hash(digest.hexdigest()) == digest.hexdigest()
