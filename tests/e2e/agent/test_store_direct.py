"""Bytes between volunteer and object store by signed URLs; the coordinator sees hashes alone."""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from coordinator.intake import uploads
from shared.protocol.contributions import UploadInfo
from tests.support.local_coordinator import (
    LocalCoordinator,
    decode,
    local_coordinator,
    refused,
)
from tests.support.local_volunteer import SHORT, worked
from tests.support.wayward_store import WaywardStore
from volunteer.control import events
from volunteer.net import transfers

SMALL = 1


@pytest.fixture
async def home(
    wayward: WaywardStore, s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[LocalCoordinator]:
    """A coordinator whose store volunteers reach, for small files too."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_PUBLIC", wayward.url)
    for module in (uploads, transfers):
        monkeypatch.setattr(module, "DIRECT_BYTES", SMALL)
    async with local_coordinator(tmp_path / "coordinator", blobs=s3_url) as made:
        yield made


async def test_weights_data_and_updates_go_around_the_coordinator(
    home: LocalCoordinator, tmp_path: Path
) -> None:
    process = await worked(home, tmp_path / "machine", tasks=2)
    assert process.all(events.Judged)[-1].verdict.state in ("accepted", "merged")
    assert not [seen for seen in process.network.seen if seen.startswith("PUT /api/v1/uploads")]
    sent = [seen for seen in process.network.seen if "/blobs/" in seen]
    assert sent
    assert all(seen.endswith("/url") for seen in sent)
    assert sum(event.bytes for event in process.all(events.Submitted)) > 10_000


async def test_without_a_store_nobody_asks_for_an_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "DIRECT_BYTES", SMALL)
    async with local_coordinator(tmp_path / "coordinator") as home:
        process = await worked(home, tmp_path / "machine")
    assert any("/blobs/" in seen for seen in process.network.seen)
    assert not [seen for seen in process.network.seen if seen.endswith("/url")]


async def test_a_store_that_fails_costs_a_try_and_the_coordinator_takes_the_bytes(
    home: LocalCoordinator, wayward: WaywardStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        type(home.coordinator.blobs), "signed", lambda *_: _away("http://127.0.0.1:1/x")
    )
    process = await worked(home, tmp_path / "machine")
    assert [seen for seen in process.network.seen if seen.startswith("PUT /api/v1/uploads")]


@pytest.mark.parametrize("late", ["GET", "PUT"])
async def test_an_expired_url_costs_a_try_and_no_work(
    home: LocalCoordinator, wayward: WaywardStore, tmp_path: Path, late: str
) -> None:
    wayward.denied = re.compile(f"{late} .*[?&]X-Amz-Signature=")  # as S3 answers after 15 minutes
    process = await worked(home, tmp_path / "machine")
    assert process.all(events.Judged)[-1].verdict.state in ("accepted", "merged")
    asked = process.network.seen
    through = [seen for seen in asked if re.search("PUT .*/uploads|/blobs/[0-9a-f]{64}$", seen)]
    assert {seen.partition(" ")[0] for seen in through} == {late}
    assert any("X-Amz-Signature" in path for method, path in wayward.seen if method == late)


async def _away(url: str) -> str:
    return url


async def test_what_does_not_fit_what_was_announced_is_refused(home: LocalCoordinator) -> None:
    await home.start_run(SHORT)
    ann = await home.join("Ann")
    lease = await ann.claim()
    data = await ann.update("tiny")
    info = decode(await ann.announce(lease, data), UploadInfo)
    async with httpx.AsyncClient() as store:
        assert (await store.put(info.url, content=data[:-1])).status_code == 200  # too short
        assert decode(await ann.announce(lease, data), UploadInfo).offset == 0
        assert (await store.put(info.url, content=bytes(len(data)))).status_code == 200
        refused(await ann.announce(lease, data), 422)  # of another hash: gone
        info = decode(await ann.announce(lease, data), UploadInfo)
        assert (await store.put(info.url, content=data)).status_code == 200
        assert decode(await ann.announce(lease, data), UploadInfo).complete
        assert (await store.put(info.url, content=bytes(len(data)))).status_code == 200  # again
    blobs = home.coordinator.blobs
    sha = hashlib.sha256(data).hexdigest()
    assert await blobs.hash(sha) == sha
