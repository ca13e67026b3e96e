"""Manifests that a volunteer refuses: old ones shown again, expired ones, of another dataset."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from shared.clock import SystemClock
from shared.errors import InvalidFrame
from shared.proofs.signing import SigningKey, canonical
from shared.protocol.transparency import TreeHead
from shared.protocol.versions import BlobRef, SignedManifest, VersionManifest, chunks_digest
from shared.workloads.base import ChunkRef, DatasetManifest, load
from tests.support.workloads import tiny_causal
from tests.support.workplaces import workplace
from volunteer.account.record_check import RecordCheck
from volunteer.agent.downloads import GRACE_S, Downloads, OlderVersion
from volunteer.control.event_bus import EventBus
from volunteer.control.status import Status
from volunteer.storage.receipts import ReceiptBook

CHUNK = ChunkRef(sha256="ab" * 32, size=8, items=4)
DATA = DatasetManifest(
    name="sums", kind="tokens", licence="", source="", chunks=(CHUNK,), assets={"tokenizer": CHUNK}
)
LEASE: Any = SimpleNamespace(
    run="r", job=SimpleNamespace(workload="gpt", config={}), data=None, dataset="sums", member=False
)


class PartPosition:
    """Downloads of one machine, and the key of its coordinator."""

    def __init__(self, path: Path) -> None:
        self.key = SigningKey.load_or_create(path / "key")
        clock = SystemClock()
        self.now = clock.now()
        self.path = path
        self.bus = EventBus(clock, Status())
        self.told: list[str] = []
        bus: Any = self.bus
        bus.notice = lambda message, level="info": self.told.append(message)

    def downloads(self) -> Downloads:
        identity = SimpleNamespace(public_key=self.key.public_key.hex())
        book = ReceiptBook(self.path / "receipts")
        store = {"receipts": book, "cache": None}
        place = workplace(SystemClock(), remote={"identity": identity}, store=store, bus=self.bus)
        record = RecordCheck(cast(Any, None), book, self.key.public_key.hex(), "v")
        return Downloads(place=place, record=record)

    def manifest(self, version: int, **other: Any) -> SignedManifest:
        values: dict[str, Any] = {
            "run": "r", "version": version, "workload": "gpt", "workload_version": 1, "config": {},
            "weights": BlobRef(sha256="cd" * 32, size=1), "master_sha256": "", "schema_sha256": "",
            "dataset": "sums", "tokenizer_sha256": "", "global_step": 0,
            "tokens": 0, "created_at": self.now, "expires_at": self.now + 100.0,
        }  # fmt: skip
        payload = canonical(VersionManifest(**values | other))
        return SignedManifest(payload=payload.decode(), signature=self.key.sign(payload).hex())


@pytest.fixture
def place(tmp_path: Path) -> PartPosition:
    return PartPosition(tmp_path)


def test_a_version_below_one_that_was_seen_is_refused_also_after_a_restart(
    place: PartPosition,
) -> None:
    first = place.downloads()
    first.verify(place.manifest(7), LEASE)
    again = place.downloads()
    floor = again.place.store.receipts.newest("r")
    assert floor == 7
    for version in (7, 8):  # the same, and what a rollback makes
        assert again.verify(place.manifest(version), LEASE, floor).version == version
    with pytest.raises(OlderVersion, match="offers version 6 of r as the newest"):
        again.verify(place.manifest(6), LEASE, floor)
    assert again.verify(place.manifest(6), LEASE).version == 6  # the base of a task that goes on
    assert again.place.store.receipts.newest("r") == 8
    assert again.place.store.receipts.newest("another") == -1


def test_an_expired_version_is_warned_of_and_refused_after_a_grace(place: PartPosition) -> None:
    downloads = place.downloads()
    downloads.verify(place.manifest(1, expires_at=place.now - 50.0), LEASE)
    assert "older than its organiser promised" in place.told[0]
    with pytest.raises(InvalidFrame, match=r"expired .* ago and was not signed again"):
        downloads.verify(place.manifest(1, expires_at=place.now - GRACE_S - 50.0), LEASE)


def test_frozen_weights_that_are_not_the_manifests_are_refused(place: PartPosition) -> None:
    def config(name: str) -> dict[str, Any]:
        file = {"sha256": name * 64, "size": 8, "items": 1}
        table = tiny_causal.table({**tiny_causal.LLAMA, "vocab_size": 300}, train="lora")
        return load("causal-lm").config(table | {"files": {"model.safetensors": file}}, None)

    downloads = place.downloads()
    leases: list[Any] = [
        SimpleNamespace(
            run="r",
            job=SimpleNamespace(workload="causal-lm", config=config(name)),
            data=None,
            dataset="sums",
            member=False,
        )
        for name in ("a", "b")
    ]
    mine, other = leases
    signed = place.manifest(1, workload="causal-lm", config=config("a"))
    manifest = downloads.verify(signed, mine)
    downloads.check_data(manifest, mine, DATA)
    with pytest.raises(InvalidFrame, match="the files of r are not those of version 1"):
        downloads.check_data(manifest, other, DATA)


def test_a_dataset_that_is_not_the_manifests_is_refused(place: PartPosition) -> None:
    downloads = place.downloads()
    good = chunks_digest(DATA)
    signed = place.manifest(1, chunks_sha256=good, tokenizer_sha256=CHUNK.sha256)
    manifest = downloads.verify(signed, LEASE)
    downloads.check_data(manifest, LEASE, DATA)
    # What is not part of it: the held-out split, which volunteers never get, and the words.
    downloads.check_data(manifest, LEASE, msgspec.structs.replace(DATA, heldout=(CHUNK,)))
    other = ChunkRef(sha256="ef" * 32, size=8, items=4)
    wrongs: tuple[dict[str, Any], ...] = (
        {"chunks": (other,)},
        {"chunks": (CHUNK, CHUNK)},
        {"assets": {}},
        {"meta": {"dtype": "u4"}},
        {"kind": "images"},
    )
    for wrong in wrongs:
        with pytest.raises(InvalidFrame, match='dataset "sums" is not the one of version 1'):
            downloads.check_data(manifest, LEASE, msgspec.structs.replace(DATA, **wrong))
    old = downloads.verify(place.manifest(1, tokenizer_sha256=CHUNK.sha256), LEASE)
    downloads.check_data(old, LEASE, DATA)  # an earlier coordinator names no hash of the chunks
    with pytest.raises(InvalidFrame, match="hash of its tokenizer"):
        downloads.check_data(old, LEASE, msgspec.structs.replace(DATA, assets={"tokenizer": other}))


def test_the_head_in_a_manifest_is_kept_to_be_checked(place: PartPosition) -> None:
    downloads = place.downloads()
    downloads.verify(place.manifest(1), LEASE)
    heads = [downloads.place.store.receipts.unchecked_head]  # none by an earlier coordinator
    tree = TreeHead(size=3, root="ab" * 32, at=1.0)
    downloads.verify(place.manifest(2, tree=tree), LEASE)
    heads.append(downloads.place.store.receipts.unchecked_head)
    assert [head and head.tree for head in heads] == [None, tree]
