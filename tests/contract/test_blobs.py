"""The promises of a blob store, made to the disk and to an S3-compatible store alike."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
from contextlib import aclosing
from functools import partial
from pathlib import Path

import pytest

from coordinator.storage.blobs import BlobStore, DiskBlobs, MissingBlob, Pieces, check_name
from coordinator.storage.open_blobs import open_blobs
from coordinator.storage.s3 import S3Blobs, StoreRefused
from shared.errors import BadRequest, Configuration, Unavailable
from tests.support.wayward_store import PIECE_BYTES, WaywardStore

ABSENT = "0" * 64


@pytest.fixture(params=["disk", "s3"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    if request.param == "disk":
        return DiskBlobs(tmp_path / "blobs")
    return S3Blobs(request.getfixturevalue("s3_url"), tmp_path / "cache")


def staged(blobs: BlobStore, data: bytes, name: str = "part") -> tuple[str, Path]:
    path = blobs.scratch() / name
    path.write_bytes(data)
    return hashlib.sha256(data).hexdigest(), path


async def whole(stream: Pieces) -> bytes:
    return b"".join([piece async for piece in stream])


async def test_what_is_put_is_there(blobs: BlobStore) -> None:
    data = os.urandom(3_000_001)
    sha, path = staged(blobs, data)
    await blobs.put_file(sha, path)
    assert not path.exists()
    assert await blobs.size(sha) == len(data)
    assert (await blobs.local(sha)).read_bytes() == data
    assert await whole(await blobs.open_range(sha, 0, len(data))) == data
    assert await blobs.hash(sha) == sha


async def test_a_store_names_its_coordinator(blobs: BlobStore) -> None:
    assert await blobs.owner() == ""
    await blobs.set_owner("abcd-efgh")
    assert await blobs.owner() == "abcd-efgh"
    assert [entry async for entry in blobs.entries()] == []


@pytest.mark.parametrize(
    "denied",
    ["PUT .*/uploads/", "GET .*list-type", "HEAD", "GET .*/[0-9a-f]{64}", "(POST|DELETE)"],
)
async def test_a_call_that_the_store_refuses_is_named(
    wayward: WaywardStore, s3_url: str, tmp_path: Path, denied: str
) -> None:
    staging = S3Blobs(s3_url, tmp_path / "cache", retry_s=1.0).staging
    assert staging is not None
    await staging.try_calls()
    assert not list((tmp_path / "cache" / "tmp").iterdir())
    wayward.denied = re.compile(denied)
    method = denied.strip("(")[:3]
    with pytest.raises(StoreRefused, match=f"answers {method}[A-Z]* with 403 Forbidden"):
        await staging.try_calls()


async def test_a_store_without_its_bucket_says_so(s3_url: str, tmp_path: Path) -> None:
    absent = S3Blobs("s3://no-such-bucket/x", tmp_path / "cache")
    with pytest.raises(StoreRefused, match=r"answers PUT with 404 Not Found \(NoSuchBucket\)"):
        await absent.put_bytes(b"lost")


async def test_bytes_are_named_by_their_hash(blobs: BlobStore) -> None:
    sha = await blobs.put_bytes(b"hello")
    assert sha == hashlib.sha256(b"hello").hexdigest()
    assert (await blobs.local(sha)).read_bytes() == b"hello"
    assert await blobs.put_bytes(b"") == hashlib.sha256(b"").hexdigest()
    assert await whole(await blobs.open_range(hashlib.sha256(b"").hexdigest(), 0, 0)) == b""


async def test_putting_again_changes_nothing(blobs: BlobStore) -> None:
    sha, path = staged(blobs, b"same")
    await blobs.put_file(sha, path)
    again = staged(blobs, b"same", "again")[1]
    await blobs.put_file(sha, again)
    assert not again.exists()
    assert [entry.sha256 async for entry in blobs.entries()] == [sha]


async def test_many_put_the_same_at_once(blobs: BlobStore) -> None:
    parts = [staged(blobs, b"x" * 100_000, f"part{i}") for i in range(20)]
    await asyncio.gather(*(blobs.put_file(sha, path) for sha, path in parts))
    assert await blobs.hash(parts[0][0]) == parts[0][0]
    assert len([entry async for entry in blobs.entries()]) == 1


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 1), (1, 2_500_000), (2_499_999, 2_500_000), (7, 7)]
)
async def test_ranges(blobs: BlobStore, start: int, stop: int) -> None:
    data = os.urandom(2_500_000)
    sha = await blobs.put_bytes(data)
    pieces = [piece async for piece in await blobs.open_range(sha, start, stop)]
    assert b"".join(pieces) == data[start:stop]
    assert all(len(piece) <= 1 << 20 for piece in pieces)


async def test_a_blob_that_the_kernel_has_let_go_is_read_all_the_same(tmp_path: Path) -> None:
    data = os.urandom(5_000_000)
    blobs = DiskBlobs(tmp_path / "blobs")
    sha = await blobs.put_bytes(data)
    path = await blobs.local(sha)
    with path.open("rb") as file:
        if hasattr(os, "posix_fadvise"):  # elsewhere every read is a thread's
            os.posix_fadvise(file.fileno(), 1 << 20, 0, os.POSIX_FADV_DONTNEED)
    assert await whole(await blobs.open_range(sha, 0, len(data))) == data
    assert await whole(await blobs.open_range(sha, 0, len(data))) == data  # from memory now
    os.truncate(path, 3_000_000)
    async with aclosing(await blobs.open_range(sha, 0, len(data))) as stream:
        with pytest.raises(OSError, match="shorter"):
            await whole(stream)


async def test_a_reader_may_leave_early(blobs: BlobStore) -> None:
    sha = await blobs.put_bytes(os.urandom(5_000_000))
    stream = await blobs.open_range(sha, 0, 5_000_000)
    assert await anext(stream)
    await stream.aclose()
    await blobs.delete(sha, "asked")


async def test_what_is_not_there(blobs: BlobStore) -> None:
    with pytest.raises(MissingBlob):
        await blobs.local(ABSENT)
    with pytest.raises(MissingBlob):
        await blobs.size(ABSENT)
    with pytest.raises(MissingBlob):
        await whole(await blobs.open_range(ABSENT, 0, 1))
    await blobs.delete(ABSENT, "asked")


async def test_deleted_is_gone_but_a_mapped_file_stays_readable(blobs: BlobStore) -> None:
    sha = await blobs.put_bytes(b"going")
    with (await blobs.local(sha)).open("rb") as mapped:
        await blobs.delete(sha, "asked")
        assert mapped.read() == b"going"
    with pytest.raises(MissingBlob):
        await blobs.size(sha)
    assert [entry async for entry in blobs.entries()] == []


async def test_entries_say_the_size(blobs: BlobStore) -> None:
    shas = {await blobs.put_bytes(bytes([i]) * (i + 1)): i + 1 for i in range(60)}
    (blobs.scratch() / "unfinished.part").write_bytes(b"no blob")
    found = {entry.sha256: entry async for entry in blobs.entries()}
    assert {sha: entry.size for sha, entry in found.items()} == shas


@pytest.mark.parametrize(
    "name", ["", "../../etc/passwd", "A" * 64, "a" * 63, "a" * 65, "/" + "a" * 63]
)
async def test_no_other_name_reaches_the_disk(blobs: BlobStore, name: str) -> None:
    with pytest.raises(BadRequest):
        check_name(name)
    for call in (blobs.local, blobs.size, partial(blobs.delete, reason="asked")):
        with pytest.raises(BadRequest):
            await call(name)


async def test_disk_files_are_private_and_read_only(tmp_path: Path) -> None:
    blobs = DiskBlobs(tmp_path / "blobs")
    sha = await blobs.put_bytes(b"secret weights")
    assert (await blobs.local(sha)).stat().st_mode & 0o777 == 0o400
    assert (tmp_path / "blobs").stat().st_mode & 0o777 == 0o700


async def test_a_file_from_another_filesystem_arrives_whole(tmp_path: Path) -> None:
    here = tmp_path.stat().st_dev
    places = (Path(name) for name in ("/dev/shm", "/var/tmp", "/tmp"))
    # with one filesystem only, the plain rename is what there is to see
    other = next(
        (path for path in places if path.is_dir() and path.stat().st_dev != here), tmp_path
    )
    source = other / f"{os.getpid()}.part"
    source.write_bytes(b"from afar")
    blobs = DiskBlobs(tmp_path / "blobs")
    sha = hashlib.sha256(b"from afar").hexdigest()
    await blobs.put_file(sha, source)
    assert not source.exists()
    assert await blobs.hash(sha) == sha
    assert list(blobs.scratch().iterdir()) == []


async def test_the_cache_of_an_object_store_is_bounded_and_checked(
    s3_url: str, tmp_path: Path
) -> None:
    blobs = S3Blobs(s3_url, tmp_path / "cache", cache_bytes_max=25_000)
    shas = [await blobs.put_bytes(os.urandom(10_000)) for _ in range(5)]
    for sha in shas:
        assert (await blobs.local(sha)).stat().st_size == 10_000
    kept = [path for path in (tmp_path / "cache").iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in kept) <= 25_000


async def test_no_file_enters_the_cache_of_an_object_store_before_it_is_synced(
    s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss of power would leave zeros under a name that stands for its bytes."""
    synced, fsync = set[int](), os.fsync

    def note(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    here, there = S3Blobs(s3_url, tmp_path / "here"), S3Blobs(s3_url, tmp_path / "there")
    assert here.staging is not None
    sha, path = staged(here, os.urandom(1000))
    await here.put_file(sha, path)
    other, path = staged(here, os.urandom(1000))
    await here.staging.put("upload", 0, path, 1000)
    copy = await here.staging.collect("upload", 1000, path)
    await here.staging.store(other, path, copy)
    for blobs in (here, there):
        for name in (sha, other):
            assert (await blobs.local(name)).stat().st_ino in synced


async def test_many_at_once_may_fill_and_read_a_cache_that_has_no_room(
    s3_url: str, tmp_path: Path
) -> None:
    blobs = S3Blobs(s3_url, tmp_path / "cache", cache_bytes_max=0)
    files = [staged(blobs, os.urandom(1000), f"{number}") for number in range(100)]
    await asyncio.gather(*(blobs.put_file(sha, path) for sha, path in files))
    await asyncio.gather(*(blobs.local(files[number % 3][0]) for number in range(100)))


async def test_a_store_that_does_not_answer_is_unavailable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    blobs = S3Blobs("s3://bucket", tmp_path / "cache", retry_s=0.1)
    with pytest.raises(Unavailable):
        await blobs.size(ABSENT)


async def test_a_stream_that_moves_has_no_time_limit_and_one_that_does_not_has_one(
    wayward: WaywardStore, s3_url: str, tmp_path: Path
) -> None:
    blobs = S3Blobs(s3_url, tmp_path / "cache", retry_s=0.1, still_s=1.0)
    data = os.urandom(40 * PIECE_BYTES)
    sha = await blobs.put_bytes(data)
    wayward.pause_s = 0.06  # 2.4 s in all
    assert await whole(await blobs.open_range(sha, 0, len(data))) == data
    wayward.stall = True
    with pytest.raises(Unavailable):
        await whole(await blobs.open_range(sha, 0, len(data)))


async def test_what_is_in_the_cache_is_served_while_the_store_is_away_and_checks_look_past_it(
    wayward: WaywardStore, s3_url: str, tmp_path: Path
) -> None:
    blobs = S3Blobs(s3_url, tmp_path / "cache", retry_s=0.1)
    sha, path = staged(blobs, os.urandom(100_000))
    await blobs.put_file(sha, path)
    wayward.seen.clear()
    assert len(await whole(await blobs.open_range(sha, 0, await blobs.size(sha)))) == 100_000
    assert wayward.seen == []
    await S3Blobs(s3_url, tmp_path / "other").delete(sha, "asked")
    with pytest.raises(MissingBlob):
        await blobs.hash(sha)


async def test_a_store_that_ends_an_upload_in_parts_without_saying_so_has_it(
    wayward: WaywardStore, s3_url: str, tmp_path: Path
) -> None:
    blobs = S3Blobs(s3_url, tmp_path / "cache", retry_s=0.5)
    sha, path = staged(blobs, os.urandom(6 << 20))
    wayward.swallow = 1  # asked again, the store knows of no such upload: 404
    await blobs.put_file(sha, path)
    assert await blobs.hash(sha) == sha


async def test_a_put_that_fails_is_to_be_tried_again_and_keeps_the_file(
    wayward: WaywardStore, s3_url: str, tmp_path: Path
) -> None:
    blobs = S3Blobs(s3_url, tmp_path / "cache", retry_s=0.1)
    for size in (1000, 6 << 20):
        sha, path = staged(blobs, os.urandom(size), f"part{size}")
        wayward.refuse = True
        with pytest.raises(Unavailable):
            await blobs.put_file(sha, path)
        wayward.refuse = False
        await blobs.put_file(sha, path)
        assert await blobs.hash(sha) == sha


def test_a_setting_names_the_store(tmp_path: Path) -> None:
    assert isinstance(open_blobs(str(tmp_path / "b"), tmp_path / "cache"), DiskBlobs)
    with pytest.raises(Configuration):
        open_blobs("ftp://x", tmp_path)
    for bare in ("s3://", "s3:///prefix", "s3:/bucket/prefix"):
        with pytest.raises(Configuration, match="must be a directory or s3://bucket/prefix, not"):
            open_blobs(bare, tmp_path / "cache")
    (tmp_path / "file").write_text("")
    with pytest.raises(Configuration, match="cannot be used"):
        open_blobs(str(tmp_path / "file"), tmp_path)
