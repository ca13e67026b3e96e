"""Whole files to and from the coordinator: a break costs nothing, and what arrives is what was
promised.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import sys
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, closing
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest
from typing_extensions import override

from shared import errors
from shared.protocol.accounts import SignedWheel
from shared.protocol.base import ErrorBody
from shared.protocol.contributions import UploadInfo, UploadRequest
from shared.protocol.versions import BlobRef
from tests.support.fake_hub import Repository, fake_hub
from tests.support.small_disk import full_beyond
from tests.support.virtual_clock import VirtualClock
from volunteer.net.api import Api
from volunteer.net.client import Client, StreamedReply
from volunteer.net.tls import Address
from volunteer.net.transfers import Transfers
from volunteer.storage.blob_cache import Cache, Partial


class Store(httpx.AsyncBaseTransport):
    """A coordinator's blobs, and an upload that may be cut off."""

    def __init__(self, blob: bytes = b"") -> None:
        self.blob = blob
        self.break_after = -1  # bytes of the next download
        self.damage = 0  # downloads that arrive wrong
        self.ignores_ranges = False
        self.ranges: list[str] = []
        self.received = bytearray()
        self.expects = 0
        self.break_upload = False
        self.refusals: list[httpx.Response] = []  # of the next pieces

    @override
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return self._download(request)
        body = await request.aread()
        if request.method == "POST":
            self.expects = msgspec.json.decode(body, type=UploadRequest).size
        elif self.refusals:
            return self.refusals.pop(0)
        else:
            assert int(request.headers["upload-offset"]) == len(self.received)
            if self.break_upload:
                self.break_upload = False
                self.received += body[: len(body) // 2]
                raise httpx.WriteError("cut")
            self.received += body
        info = UploadInfo(
            upload_id="u1",
            offset=len(self.received),
            size=self.expects,
            complete=len(self.received) == self.expects,
            expires_at=0.0,
        )
        return httpx.Response(200, stream=httpx.ByteStream(msgspec.json.encode(info)))

    def _download(self, request: httpx.Request) -> httpx.Response:
        wanted = request.headers.get("range", "")
        self.ranges.append(wanted)
        start = 0 if self.ignores_ranges or not wanted else int(wanted[6:].rstrip("-"))
        data = self.blob[start:]
        if self.damage:
            self.damage -= 1
            data = bytes(byte ^ 1 for byte in data)
        status = 206 if start else 200
        cut, self.break_after = self.break_after, -1

        async def stream() -> AsyncIterator[bytes]:
            for at in range(0, len(data), 1000):
                if 0 <= cut <= at:
                    raise httpx.ReadError("cut")
                yield data[at : at + 1000]

        return httpx.Response(status, content=stream())


def transfers(
    store: Store, path: Path, cache: Cache | None = None
) -> tuple[Transfers, VirtualClock]:
    clock = VirtualClock()
    address = Address(url="http://127.0.0.1:1")
    client = Client(address, clock=clock, rng=random.Random(1), transport=store)
    return Transfers(Api(client), cache or Cache(path, 1 << 30)), clock


async def fetched(store: Store, path: Path) -> tuple[bytes, list[int]]:
    moving, clock = transfers(store, path)
    steps: list[int] = []
    ref = BlobRef(sha256=hashlib.sha256(store.blob).hexdigest(), size=len(store.blob))
    getting = asyncio.ensure_future(moving.fetch(ref, steps.append))
    while not getting.done():
        await clock.advance(1)
        await asyncio.sleep(0)
    return (await getting).read_bytes(), steps


async def test_a_download_is_resumed_after_a_break(tmp_path: Path) -> None:
    store = Store(os.urandom(9000))
    store.break_after = 4000
    data, steps = await fetched(store, tmp_path)
    assert data == store.blob
    assert store.ranges == ["", "bytes=4000-"]
    assert steps[-1] == 9000
    assert steps == sorted(steps)


async def test_a_download_starts_over_where_ranges_are_ignored(tmp_path: Path) -> None:
    store = Store(os.urandom(9000))
    store.break_after, store.ignores_ranges = 4000, True
    assert (await fetched(store, tmp_path))[0] == store.blob


async def test_a_damaged_download_is_fetched_again_but_not_for_ever(tmp_path: Path) -> None:
    store = Store(os.urandom(5000))
    store.damage = 2
    assert (await fetched(store, tmp_path / "a"))[0] == store.blob
    store.damage = 100
    with pytest.raises(errors.InvalidFrame):
        await fetched(store, tmp_path / "b")


@pytest.mark.skipif(sys.platform == "win32", reason="no limit of file sizes")
async def test_a_disk_that_fills_ends_the_download_and_is_no_outage(tmp_path: Path) -> None:
    store = Store(os.urandom(200_000))
    moving, _ = transfers(store, tmp_path)
    outages: list[str] = []

    def watch(online: bool, message: str, retry_at: float | None) -> None:
        outages.extend([] if online else [message])

    moving._client.watch = watch
    ref = BlobRef(sha256=hashlib.sha256(store.blob).hexdigest(), size=len(store.blob))
    with full_beyond(50_000), pytest.raises(errors.StorageFull):
        await asyncio.wait_for(moving.fetch(ref, lambda done: None), 30)
    assert outages == []
    assert (await moving.fetch(ref, lambda done: None)).read_bytes() == store.blob


async def test_a_blob_that_is_here_is_not_fetched(tmp_path: Path) -> None:
    store = Store(b"weights")
    await fetched(store, tmp_path)
    await fetched(store, tmp_path)
    assert len(store.ranges) == 1


async def test_a_blob_larger_than_announced_is_refused(tmp_path: Path) -> None:
    store = Store(b"x" * 5000)
    moving, _ = transfers(store, tmp_path)
    ref = BlobRef(sha256=hashlib.sha256(b"y").hexdigest(), size=10)
    with pytest.raises(errors.InvalidFrame):
        await moving.fetch(ref, lambda done: None)


async def test_two_devices_fetch_a_blob_once(tmp_path: Path) -> None:
    store = Store(os.urandom(5000))
    moving, _ = transfers(store, tmp_path)
    ref = BlobRef(sha256=hashlib.sha256(store.blob).hexdigest(), size=5000)
    await asyncio.gather(*(moving.fetch(ref, lambda done: None) for _ in range(3)))
    assert len(store.ranges) == 1


async def test_an_upload_goes_on_where_the_server_says(tmp_path: Path) -> None:
    store, data = Store(), os.urandom(700_000)
    path = tmp_path / "update"
    path.write_bytes(data)
    request = UploadRequest(
        task=1, attempt=1, part=0, tries=0, sha256=hashlib.sha256(data).hexdigest(), size=len(data)
    )
    moving, _ = transfers(store, tmp_path / "cache")
    store.break_upload = True
    with pytest.raises(errors.Unreachable):
        await moving.upload(request, path, lambda done: None)
    steps: list[int] = []
    assert (await moving.upload(request, path, steps.append)).complete
    assert bytes(store.received) == data
    assert (steps[0], steps[-1]) == (len(data) // 2, len(data))


@pytest.mark.parametrize("trouble", [errors.NotFound, errors.Conflict, errors.InvalidFrame])
async def test_an_upload_that_the_server_lost_or_damaged_begins_again(
    tmp_path: Path, trouble: type[errors.VolunteerError]
) -> None:
    store, data = Store(), os.urandom(10_000)
    path = tmp_path / "update"
    path.write_bytes(data)
    request = UploadRequest(
        task=1, attempt=1, part=0, tries=0, sha256=hashlib.sha256(data).hexdigest(), size=len(data)
    )
    moving, _ = transfers(store, tmp_path / "cache")
    said = msgspec.json.encode(ErrorBody(code=trouble.code, message="no", request_id=""))
    refusal = httpx.Response(trouble.status, stream=httpx.ByteStream(said))
    store.refusals = [refusal]
    with pytest.raises(errors.Unreachable):
        await moving.upload(request, path, lambda done: None)
    assert (await moving.upload(request, path, lambda done: None)).complete


async def test_a_file_that_is_damaged_here_is_refused_for_good(tmp_path: Path) -> None:
    store = Store()
    (tmp_path / "update").write_bytes(b"other bytes")
    request = UploadRequest(task=1, attempt=1, part=0, tries=0, sha256="0" * 64, size=11)
    moving, _ = transfers(store, tmp_path / "cache")
    said = msgspec.json.encode(ErrorBody(code="invalid_frame", message="no", request_id="r"))
    store.refusals = [httpx.Response(422, stream=httpx.ByteStream(said))]
    with pytest.raises(errors.InvalidFrame):
        await moving.upload(request, tmp_path / "update", lambda done: None)


class Slow(Cache):
    """A cache on a disk that takes its time to open a file."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, 1 << 30)
        self.reached, self.allowed = threading.Event(), threading.Event()

    @override
    def partial(self, sha256: str, size: int) -> Partial:
        self.reached.set()
        assert self.allowed.wait(30)
        return super().partial(sha256, size)


async def test_a_fetch_that_is_given_up_leaves_no_file_open(tmp_path: Path) -> None:
    store = Store(b"some bytes")
    cache = Slow(tmp_path)
    moving, _ = transfers(store, tmp_path, cache)
    ref = BlobRef(sha256=hashlib.sha256(store.blob).hexdigest(), size=len(store.blob))
    getting = asyncio.create_task(moving.fetch(ref, lambda done: None))
    assert await asyncio.to_thread(cache.reached.wait, 30)
    getting.cancel()
    await asyncio.gather(getting, return_exceptions=True)
    cache.allowed.set()
    await asyncio.get_running_loop().shutdown_default_executor()  # the thread has come to its end
    held = [file.path for file in psutil.Process().open_files()]
    assert not [path for path in held if path.startswith(str(tmp_path))]


async def test_a_cancel_waits_for_the_piece_of_a_mirror_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, reached, allowed = b"some bytes", threading.Event(), threading.Event()
    failed: list[Exception] = []
    write = Partial.write

    def slow(self: Partial, piece: bytes) -> None:
        reached.set()
        allowed.wait(30)
        try:
            write(self, piece)
        except Exception as error:
            failed.append(error)

    async def mirrored(*_: object) -> bytes:
        return data

    monkeypatch.setattr(Partial, "write", slow)
    monkeypatch.setattr("volunteer.net.transfers.DIRECT_BYTES", 1)
    moving, _ = transfers(Store(data), tmp_path)
    moving.mirrors["https://mirror"] = 1.0
    monkeypatch.setattr(moving, "_mirror_piece", mirrored)
    ref = BlobRef(sha256=hashlib.sha256(data).hexdigest(), size=len(data))
    getting = asyncio.create_task(moving.fetch(ref, lambda done: None))
    assert await asyncio.to_thread(reached.wait, 30)
    getting.cancel()
    await asyncio.sleep(0.05)
    assert not getting.done()
    allowed.set()
    await asyncio.gather(getting, return_exceptions=True)
    assert getting.cancelled()
    assert not failed


@pytest.mark.parametrize("begun", [0, 3, 4, 7, 10])
async def test_mirrors_continue_a_download_that_broke_off_within_a_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: int
) -> None:
    data, spans = b"some bytes", list[tuple[int, int]]()

    async def mirrored(sha256: str, span: tuple[int, int], digest: str) -> bytes:
        spans.append(span)
        return data[slice(*span)]

    monkeypatch.setattr("volunteer.net.transfers.DIRECT_BYTES", 1)
    monkeypatch.setattr("volunteer.net.transfers.MIRROR_PIECE_BYTES", 4)
    store = Store(data)
    moving, _ = transfers(store, tmp_path)
    moving.mirrors["https://mirror"] = 1.0
    monkeypatch.setattr(moving, "_mirror_piece", mirrored)
    pieces = tuple(hashlib.sha256(data[at : at + 4]).hexdigest() for at in (0, 4, 8))
    ref = BlobRef(sha256=hashlib.sha256(data).hexdigest(), size=len(data), pieces=pieces)
    with closing(Cache(tmp_path, 1 << 30).partial(ref.sha256, ref.size)) as partial:
        partial.write(data[:begun])
    assert (await moving.fetch(ref, lambda done: None)).read_bytes() == data
    assert spans == [span for span in ((0, 4), (4, 8), (8, 10)) if span[1] > begun]
    assert store.ranges == []  # the coordinator serves nothing


async def test_a_package_larger_than_announced_is_not_read_to_its_end(tmp_path: Path) -> None:
    store = Store(os.urandom(9000))
    api = transfers(store, tmp_path)[0]._api
    wheel = SignedWheel(name="program.whl", sha256="0" * 64, size=9000, signature="")
    assert await api.wheel(wheel) == store.blob
    store.break_after = 5000  # whoever reads on notices an interruption
    with pytest.raises(errors.InvalidFrame, match="larger than announced"):
        await api.wheel(msgspec.structs.replace(wheel, size=2500))


async def test_a_file_that_became_shorter_is_not_sent_for_ever(tmp_path: Path) -> None:
    data = os.urandom(300_000)
    path = tmp_path / "update"
    path.write_bytes(data[:-1])
    request = UploadRequest(
        task=1, attempt=1, part=0, tries=0, sha256=hashlib.sha256(data).hexdigest(), size=len(data)
    )
    moving, _ = transfers(Store(), tmp_path / "cache")
    with pytest.raises(errors.InvalidFrame, match="is missing or damaged"):
        await moving.upload(request, path, lambda done: None)


@pytest.mark.parametrize("trouble", ["", "damaged", "lost", "nobody there"])
async def test_what_is_public_comes_from_the_hub_and_else_from_the_coordinator(
    tmp_path: Path, trouble: str
) -> None:
    store, name = Store(os.urandom(9000)), "model.safetensors"
    ref = BlobRef(sha256=hashlib.sha256(store.blob).hexdigest(), size=len(store.blob))
    with fake_hub() as hub:
        model = hub.models["ann/tiny"] = Repository()
        commit = model.commit({name: store.blob})
        model.damaged |= {name} if trouble == "damaged" else set()
        model.lost |= {name} if trouble == "lost" else set()
        at = "http://127.0.0.1:1" if trouble == "nobody there" else hub.url
        client = Client(
            Address(url="http://127.0.0.1:1"), clock=VirtualClock(), token="t", transport=store
        )
        moving = Transfers(Api(client), Cache(tmp_path, 1 << 30), lambda: at)
        path = f"ann/tiny/resolve/{commit}/{name}"
        found = await moving.fetch(ref, lambda _: None, path)
        assert found.read_bytes() == store.blob
        assert bool(store.ranges) == bool(trouble)  # the coordinator was asked
        assert (await moving.fetch(ref, lambda _: None, path)) == found
        assert hub.fetched.count(name) == (trouble in ("", "damaged"))


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])  # the hub cuts the first
@pytest.mark.parametrize("begun", [0, 3000, 9000])
async def test_a_download_that_broke_off_goes_on_from_the_hub(
    tmp_path: Path, begun: int, name: str
) -> None:
    store = Store(os.urandom(9000))
    ref = BlobRef(sha256=hashlib.sha256(store.blob).hexdigest(), size=len(store.blob))
    with fake_hub() as hub:
        commit = hub.models.setdefault("ann/tiny", Repository()).commit({name: store.blob})
        client = Client(Address(url="http://127.0.0.1:1"), clock=VirtualClock(), transport=store)
        cache = Cache(tmp_path, 1 << 30)
        moving = Transfers(Api(client), cache, lambda: hub.url)
        with closing(cache.partial(ref.sha256, ref.size)) as partial:
            partial.write(store.blob[:begun])
        path = f"ann/tiny/resolve/{commit}/{name}"
        assert (await moving.fetch(ref, lambda done: None, path)).read_bytes() == store.blob
        assert store.ranges == []  # the coordinator serves nothing
        assert hub.fetched.count(name) == (begun < ref.size)
        if name == "model.safetensors" and begun == 3000:
            assert hub.parts == ["bytes=3000-"]


async def test_a_mirror_that_sends_without_end_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[bytes] = []

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(1000):
            read.append(b"x" * 1000)
            yield read[-1]

    @asynccontextmanager
    async def get_elsewhere(url: str, headers: Mapping[str, str]) -> AsyncIterator[StreamedReply]:
        yield StreamedReply(206, {}, endless())

    monkeypatch.setattr("volunteer.net.transfers.DIRECT_BYTES", 1)
    store = Store(os.urandom(2500))
    moving, _ = transfers(store, tmp_path)
    monkeypatch.setattr(moving._client, "get_elsewhere", get_elsewhere)
    monkeypatch.setattr(moving._client, "may_go_to", lambda url: True)
    moving.mirrors["https://mirror"] = 1.0
    ref = BlobRef(sha256=hashlib.sha256(store.blob).hexdigest(), size=len(store.blob))
    assert (await moving.fetch(ref, lambda done: None)).read_bytes() == store.blob
    assert len(read) == 3  # one more than it was asked for
    assert moving.mirrors == {"https://mirror": 0.0}


async def test_another_server_is_asked_by_https_alone(tmp_path: Path) -> None:
    client = Client(Address(url="http://127.0.0.1:1"), clock=VirtualClock(), transport=Store())
    with pytest.raises(errors.Unreachable, match="is not encrypted"):
        async with client.get_elsewhere("http://192.0.2.1/model", {}):
            pass
