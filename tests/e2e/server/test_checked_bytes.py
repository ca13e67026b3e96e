"""What was checked is what is used: bytes in a store that change, vanish, or are finished twice."""

from __future__ import annotations

import asyncio
import hashlib
import re
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import boto3  # type: ignore[import-untyped]  # moto brings it
import httpx
import pytest

from coordinator.database import contributions, versions
from coordinator.intake import uploads
from coordinator.storage.blobs import DamagedBlob, MissingBlob
from coordinator.storage.s3 import S3Blobs
from shared.protocol.base import Cause
from shared.protocol.contributions import UploadInfo, Verdict
from tests.support.databases import Postgres
from tests.support.local_coordinator import (
    LocalCoordinator,
    Worker,
    decode,
    local_coordinator,
    refused,
)
from tests.support.wayward_store import WaywardStore


@pytest.fixture(autouse=True)
def _direct(wayward: WaywardStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_PUBLIC", wayward.url)
    monkeypatch.setattr(uploads, "DIRECT_BYTES", 1)


@pytest.fixture
async def home(
    wayward: WaywardStore, s3_url: str, tmp_path: Path, database_url: str
) -> AsyncIterator[LocalCoordinator]:
    place = local_coordinator(tmp_path / "coordinator", database=database_url, blobs=s3_url)
    async with place as made:
        await made.start_run()
        yield made


def store_of(home: LocalCoordinator) -> S3Blobs:
    blobs = home.coordinator.blobs
    assert isinstance(blobs, S3Blobs)
    return blobs


async def forget(home: LocalCoordinator, sha256: str) -> None:
    """Empty a replica's cache of one blob, as a container without a volume does."""
    (store_of(home)._cache / sha256).unlink(missing_ok=True)


def put(url: str, data: bytes) -> Callable[[], None]:
    def send() -> None:
        assert httpx.put(url, content=data).status_code == 200

    return send


async def put_direct(worker: Worker, data: bytes) -> tuple[UploadInfo, dict[str, int]]:
    """Send an update straight to the store; it is not finished yet."""
    lease = await worker.claim()
    await worker.begin(lease)
    info = decode(await worker.announce(lease, data), UploadInfo)
    await asyncio.to_thread(put(info.url, data))
    return info, {"task": lease.task, "attempt": lease.attempt}


async def announced(worker: Worker, data: bytes, lease: dict[str, int]) -> httpx.Response:
    body = lease | {"part": 0, "tries": 0, "size": len(data)}
    return await worker.post("/uploads", body | {"sha256": hashlib.sha256(data).hexdigest()})


@pytest.mark.parametrize("moment", ["PUT .*/checked/", "PUT .*/[0-9a-f]{2}/[0-9a-f]{64}"])
async def test_a_signed_url_that_is_used_again_changes_no_blob(
    home: LocalCoordinator, wayward: WaywardStore, moment: str
) -> None:
    ann = await home.join("Ann")
    data = await ann.update("tiny", 1)
    info, lease = await put_direct(ann, data)
    wayward.before(moment, put(info.url, bytes(len(data))))
    reply = await announced(ann, data, lease)
    sha = hashlib.sha256(data).hexdigest()
    if "checked" in moment:
        refused(reply, 422)
        assert sha not in {entry.sha256 async for entry in store_of(home).entries()}
    else:
        assert decode(reply, UploadInfo).complete
        assert await store_of(home).hash(sha) == sha
    left = [found["path"] async for found in store_of(home).objects("checked/")]
    assert left == []


async def accepted(home: LocalCoordinator, name: str, seed: int) -> tuple[Worker, Verdict, str]:
    worker = await home.join(name)
    verdict = await worker.work(seed)
    assert verdict.state == "accepted"
    row = await home.coordinator.db.read(
        lambda conn: contributions.by_id(conn, verdict.contribution)
    )
    return worker, verdict, row.sha256


async def test_a_contribution_whose_bytes_changed_is_set_aside_and_blames_nobody(
    home: LocalCoordinator,
) -> None:
    eve, verdict, sha = await accepted(home, "Eve", 1)
    for number, name in enumerate(("Ann", "Bob")):
        await accepted(home, name, 2 + number)
    size = await store_of(home).size(sha)
    await forget(home, sha)
    await store_of(home).put_object(store_of(home).key(sha), bytes(size), size)
    merger = home.coordinator.merger
    assert [await merger.merge_if_due(1) for _ in range(2)] == [False, True]
    after = await eve.verdict(verdict.contribution)
    assert (after.state, after.reason) == ("rejected", "merge_failed")
    states = await home.coordinator.db.read(lambda conn: contributions.counts(conn, 1))
    assert states == {"merged": 2, "rejected": 1}
    task = await home.coordinator.db.read(
        lambda conn: conn.exec_driver_sql(
            "SELECT state, failures FROM tasks WHERE id = (SELECT task_id FROM contributions"
            f" WHERE id = {verdict.contribution})"
        ).one()
    )
    assert tuple(task) == ("todo", 0)
    assert await home.coordinator.ledger.check() == ()


async def test_one_wrong_read_costs_nothing(
    home: LocalCoordinator, wayward: WaywardStore, s3_url: str
) -> None:
    _, _, sha = await accepted(home, "Ann", 1)
    blobs = store_of(home)
    key, right = blobs.key(sha), (await blobs.local(sha)).read_bytes()
    await forget(home, sha)
    await blobs.put_object(key, bytes(len(right)), len(right))

    client = boto3.client("s3", endpoint_url=f"http://{wayward.target}")
    bucket, _, prefix = s3_url.removeprefix("s3://").partition("/")

    def mended() -> None:  # between the first read and the second
        wayward.before(
            f"GET .*{sha}",
            lambda: client.put_object(Bucket=bucket, Key=f"{prefix}/{key}", Body=right),
        )

    wayward.before(f"GET .*{sha}", mended)
    assert (await blobs.local(sha)).read_bytes() == right


async def test_a_base_whose_bytes_changed_is_told_and_sets_nobody_aside(
    home: LocalCoordinator,
) -> None:
    for number, name in enumerate(("Ann", "Bob")):
        await accepted(home, name, 2 + number)
    base = await home.coordinator.db.read(lambda conn: versions.get(conn, 1, 0))
    sha, size = base.master_sha256, await store_of(home).size(base.master_sha256)
    await forget(home, sha)
    await store_of(home).put_object(store_of(home).key(sha), bytes(size), size)
    for _ in range(3):
        with pytest.raises(DamagedBlob):
            await home.coordinator.merger.merge_if_due(1)
    states = await home.coordinator.db.read(lambda conn: contributions.counts(conn, 1))
    assert states == {"accepted": 2}
    assert sha in (await told(home))


async def told(home: LocalCoordinator) -> str:
    """Return why the runs do not go on."""
    answers = await home.coordinator.db.read(home.coordinator.run_queries.standstills.read)
    assert {still.cause for still in answers.values()} <= {Cause.MERGE_FAILS}
    return "; ".join(still.message for still in answers.values())


async def test_a_store_without_a_contributions_bytes_is_told_and_blames_nobody(
    home: LocalCoordinator, wayward: WaywardStore
) -> None:
    shas = [(await accepted(home, name, 2 + n))[2] for n, name in enumerate(("Ann", "Bob"))]
    await forget(home, shas[0])
    wayward.absent = re.compile(f"(GET|HEAD) .*{shas[0]}")
    for _ in range(4):
        with pytest.raises(MissingBlob):
            await home.coordinator.merger.merge_if_due(1)
    assert "is not in the store" in await told(home)
    states = await home.coordinator.db.read(lambda conn: contributions.counts(conn, 1))
    assert states == {"accepted": 2}
    wayward.absent = re.compile("(?!)")
    assert await home.coordinator.merger.merge_if_due(1)
    assert await told(home) == ""


# --- one upload, two replicas ---


@pytest.fixture
async def replicas(
    postgres: Postgres, wayward: WaywardStore, s3_url: str, tmp_path: Path
) -> AsyncIterator[list[LocalCoordinator]]:
    url = await postgres.fresh()
    async with AsyncExitStack() as stack:
        made: list[LocalCoordinator] = []
        for number in range(2):
            folder = tmp_path / f"r{number}"
            folder.mkdir()
            if made:
                shutil.copy(tmp_path / "r0" / "signing.key", folder)
            place = local_coordinator(folder, database=url, blobs=s3_url)
            made.append(await stack.enter_async_context(place))
        await made[0].start_run()
        yield made
    await postgres.recycle(url)


async def test_two_replicas_that_finish_one_upload_give_one_answer(
    replicas: list[LocalCoordinator],
) -> None:
    ann = await replicas[0].join("Ann")
    lease = await ann.claim()
    await ann.begin(lease)
    clients = [
        httpx.AsyncClient(
            transport=each.transport, base_url=ann.http.base_url, headers=ann.http.headers
        )
        for each in replicas
    ]
    for seed in range(10):
        data = await ann.update("tiny", seed)
        place = {"part": seed % 8, "tries": seed // 8}
        info = decode(await ann.announce(lease, data, **place), UploadInfo)
        await asyncio.to_thread(put(info.url, data))
        body: dict[str, object] = {"task": lease.task, "attempt": lease.attempt, **place}
        body |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        replies = await asyncio.gather(
            *(each.post("/api/v1/uploads", json=body) for each in clients)
        )
        assert {reply.status_code for reply in replies} == {200}
        assert decode(await ann.announce(lease, data, **place), UploadInfo).complete


@pytest.mark.parametrize(
    "moment",
    ["GET .*list-type", "PUT .*/checked/", "GET .*/checked/", "PUT .*/[0-9a-f]{2}/[0-9a-f]{64}"],
)
async def test_a_replica_that_comes_second_drops_nothing(
    replicas: list[LocalCoordinator], wayward: WaywardStore, moment: str
) -> None:
    ann = await replicas[0].join("Ann")
    data = await ann.update("tiny", 1)
    info, lease = await put_direct(ann, data)
    fast, slow = replicas
    loop = asyncio.get_running_loop()
    row = await fast.coordinator.uploads._reading.ask(info.upload_id)
    assert row is not None

    def finished_elsewhere() -> None:
        asyncio.run_coroutine_threadsafe(fast.coordinator.uploads._info(row), loop).result(120)

    wayward.before(moment, finished_elsewhere)
    done = await slow.coordinator.uploads._info(row)
    assert done.complete
    assert wayward._before == []
    assert decode(await announced(ann, data, lease), UploadInfo).complete
    sha = hashlib.sha256(data).hexdigest()
    assert await store_of(slow).hash(sha) == sha


async def test_a_store_that_does_not_show_an_uploads_bytes_keeps_the_upload(
    home: LocalCoordinator, wayward: WaywardStore
) -> None:
    ann = await home.join("Ann")
    data = await ann.update("tiny", 1)
    _, lease = await put_direct(ann, data)
    for hidden in ("(GET|HEAD) .*/(uploads|checked)/[0-9a-f]", "PUT .*/checked/"):
        wayward.absent = re.compile(hidden)
        assert refused(await announced(ann, data, lease), 503).code == "unavailable"
    wayward.absent = re.compile("(?!)")
    assert decode(await announced(ann, data, lease), UploadInfo).complete
