"""How a volunteer gets the weights of a version: the fewest bytes that lead there, and never
anything but those weights.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from pathlib import Path

import httpx
import msgspec
import pytest
from typing_extensions import override

from shared.errors import InvalidFrame
from shared.proofs.signing import digest
from shared.protocol.base import ErrorBody
from shared.protocol.versions import BlobRef, VersionManifest
from tests.support.published_versions import Versions
from tests.support.virtual_clock import VirtualClock
from volunteer.net.api import Api
from volunteer.net.client import Client
from volunteer.net.tls import Address
from volunteer.net.transfers import Transfers
from volunteer.net.weights import Weights
from volunteer.storage.blob_cache import Cache


class Shelf(httpx.AsyncBaseTransport):
    """A coordinator's blobs."""

    def __init__(self, blobs: dict[str, bytes]) -> None:
        self.blobs = blobs
        self.asked: list[str] = []
        self.sent = 0  # bytes
        self.emptied: Path | None = None  # a cache that its owner deletes at the next request

    @override
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        name = request.url.path.rpartition("/")[2]
        self.asked.append(name)
        if self.emptied is not None:
            shutil.rmtree(self.emptied)
            self.emptied = None
        data = self.blobs.get(name)
        if data is None:
            refusal = ErrorBody(code="not_found", message="there is no such blob", request_id="1")
            body = msgspec.json.encode(refusal)
            return httpx.Response(404, stream=httpx.ByteStream(body))
        self.sent += len(data)
        return httpx.Response(200, stream=httpx.ByteStream(data))


class Volunteer:
    """What of a volunteer has to do with weights.

    A second one in the same directory is the first one restarted.
    """

    def __init__(self, run: Versions, path: Path) -> None:
        self.run = run
        self.shelf = Shelf(run.blobs)
        self.cache = Cache(path, 1 << 30)
        self.told: list[str] = []
        client = Client(
            Address(url="http://127.0.0.1:1"),
            clock=VirtualClock(),
            rng=random.Random(1),
            transport=self.shelf,
        )
        self.weights = Weights(Transfers(Api(client), self.cache), self.cache, self.told.append)

    async def fetch(self, manifest: VersionManifest | None = None) -> int:
        """Fetch the newest version, or another; return how many bytes that took."""
        wanted = manifest or self.run.manifest()
        before = self.shelf.sent
        path = await self.weights.fetch(wanted, lambda total: lambda done: None)
        assert digest(path.read_bytes()) == wanted.weights.sha256
        return self.shelf.sent - before


@pytest.fixture
def run(tmp_path: Path) -> Versions:
    made = Versions(tmp_path / "run", snapshot_every=4)  # 0, 4, 8
    for _ in range(3):
        made.publish()
    return made


def link_size(run: Versions, number: int = -1) -> int:
    return run.contents[number].downlink.links[0].blob.size


def snapshot_size(run: Versions, number: int = -1) -> int:
    return run.contents[number].downlink.snapshots[0].blob.size


async def test_who_follows_the_run_takes_one_link_a_version(run: Versions, tmp_path: Path) -> None:
    ann = Volunteer(run, tmp_path / "ann")
    await ann.fetch(run.manifest(3))
    for _ in range(9):
        run.publish()
        assert await ann.fetch() == link_size(run)
    assert ann.told == []


async def test_what_is_held_already_costs_nothing(run: Versions, tmp_path: Path) -> None:
    ann = Volunteer(run, tmp_path / "ann")
    assert await ann.fetch() > 0
    assert await ann.fetch() == 0


async def test_who_comes_new_takes_the_snapshot_and_the_links_from_it(
    run: Versions, tmp_path: Path
) -> None:
    run.publish()
    run.publish()  # 5: a snapshot of 4 and one link
    ann = Volunteer(run, tmp_path / "ann")
    assert await ann.fetch() == snapshot_size(run, 4) + link_size(run)
    bob = Volunteer(run, tmp_path / "bob")
    assert await bob.fetch(run.manifest(3)) == run.contents[3].size  # nothing shorter leads there


async def test_who_skips_versions_takes_whichever_is_fewer_bytes(
    run: Versions, tmp_path: Path
) -> None:
    ann = Volunteer(run, tmp_path / "ann")
    await ann.fetch(run.manifest(2))
    run.publish()
    assert await ann.fetch() == snapshot_size(run)  # 4: two links would be more
    for _ in range(2):
        run.publish()
    assert await ann.fetch() == link_size(run, 5) + link_size(run, 6)


async def test_a_restart_goes_on_from_the_base_in_the_cache(run: Versions, tmp_path: Path) -> None:
    await Volunteer(run, tmp_path / "ann").fetch()
    run.publish()
    again = Volunteer(run, tmp_path / "ann")
    assert await again.fetch() == link_size(run)


async def test_a_base_that_was_damaged_on_the_disk_is_not_built_on(
    run: Versions, tmp_path: Path
) -> None:
    await Volunteer(run, tmp_path / "ann").fetch()
    run.publish()
    base = run.contents[3].published_sha256
    kept = tmp_path / "ann" / base[:2] / base
    data = bytearray(kept.read_bytes())
    data[-1] ^= 1
    kept.write_bytes(data)
    assert await Volunteer(run, tmp_path / "ann").fetch() == snapshot_size(run)


async def test_a_cache_deleted_during_a_download_costs_only_bytes(
    run: Versions, tmp_path: Path
) -> None:
    ann = Volunteer(run, tmp_path / "ann")
    await ann.fetch()
    run.publish()
    ann.shelf.emptied = tmp_path / "ann"
    assert await ann.fetch() == 2 * link_size(run) + snapshot_size(run)
    assert "downloaded another way: a file of this download is no longer" in ann.told[0]
    run.publish()
    assert await ann.fetch() == link_size(run)


async def test_a_damaged_link_is_noticed_and_the_snapshot_taken(
    run: Versions, tmp_path: Path
) -> None:
    ann = Volunteer(run, tmp_path / "ann")
    await ann.fetch()
    link = run.publish().downlink.links[0]
    run.blobs[link.blob.sha256] = bytes(link.blob.size)
    await ann.fetch()
    assert ann.shelf.asked[-1] == run.contents[-1].downlink.snapshots[0].blob.sha256
    assert "downloaded another way: a download arrived damaged" in ann.told[0]


async def test_a_link_that_leads_elsewhere_is_noticed_and_leaves_nothing(
    run: Versions, tmp_path: Path
) -> None:
    """Its own hash is right, and what comes out is not what the manifest promises."""
    ann = Volunteer(run, tmp_path / "ann")
    await ann.fetch()
    content = run.publish()
    step = content.downlink.links[0]
    wrong = msgspec.structs.replace(step, rounded=not step.rounded)
    downlink = msgspec.structs.replace(content.downlink, links=(wrong,))
    manifest = msgspec.structs.replace(run.manifest(), downlink=downlink)
    assert await ann.fetch(manifest) == step.blob.size + snapshot_size(run)
    assert "does not have the hash of the manifest" in ann.told[0]
    assert not list((tmp_path / "ann" / "partial").iterdir())


async def test_a_pruned_link_gives_the_snapshot_and_a_pruned_snapshot_the_whole_file(
    run: Versions, tmp_path: Path
) -> None:
    ann, bob = Volunteer(run, tmp_path / "ann"), Volunteer(run, tmp_path / "bob")
    await ann.fetch()
    ways = run.publish().downlink
    del run.blobs[ways.links[0].blob.sha256]
    assert await ann.fetch() == ways.snapshots[0].blob.size
    del run.blobs[ways.snapshots[0].blob.sha256]
    assert await bob.fetch() == run.contents[-1].size


async def test_a_base_that_no_link_begins_from_any_more_gives_the_snapshot(
    run: Versions, tmp_path: Path
) -> None:
    ann = Volunteer(run, tmp_path / "ann")
    await ann.fetch(run.manifest(0))
    for _ in range(5):
        run.publish()
    assert await ann.fetch() == snapshot_size(run)


async def test_a_link_in_a_codec_of_the_future_is_left_alone(run: Versions, tmp_path: Path) -> None:
    ann = Volunteer(run, tmp_path / "ann")
    await ann.fetch()
    content = run.publish()
    strange = msgspec.structs.replace(content.downlink.links[0], codec="ternary")
    downlink = msgspec.structs.replace(content.downlink, links=(strange,))
    await ann.fetch(msgspec.structs.replace(run.manifest(), downlink=downlink))
    assert strange.blob.sha256 not in ann.shelf.asked
    assert ann.told == []


async def test_two_devices_that_want_the_same_version_fetch_it_once(
    run: Versions, tmp_path: Path
) -> None:
    ann = Volunteer(run, tmp_path / "ann")
    await asyncio.gather(ann.fetch(run.manifest(2)), ann.fetch(run.manifest(2)))
    assert len(ann.shelf.asked) == len(set(ann.shelf.asked))


async def test_what_is_named_by_no_hash_never_becomes_a_path(run: Versions, tmp_path: Path) -> None:
    ann = Volunteer(run, tmp_path / "ann")
    content = run.publish()
    packed = content.downlink.snapshots[0]
    bad = msgspec.structs.replace(packed, blob=BlobRef(sha256="../../x", size=packed.blob.size))
    downlink = msgspec.structs.replace(content.downlink, snapshots=(bad,))
    manifest = msgspec.structs.replace(run.manifest(), downlink=downlink)
    assert await ann.fetch(manifest) == content.size
    assert "not a SHA-256" in ann.told[0]


async def test_when_all_that_comes_is_damaged_it_is_said(run: Versions, tmp_path: Path) -> None:
    ann = Volunteer(run, tmp_path / "ann")
    run.blobs.update({name: bytes(len(data)) for name, data in run.blobs.items()})
    with pytest.raises(InvalidFrame, match="damaged"):
        await ann.fetch()
