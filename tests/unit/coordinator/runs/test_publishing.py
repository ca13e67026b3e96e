"""What is published of a version: the master itself, or a chain; and which ways to it a manifest
lists.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from coordinator.plan.plan import plan
from coordinator.runs.publishing import ways
from shared.errors import InvalidFrame, InvalidPlan
from shared.protocol.versions import BlobRef, Downlink, Link, Snapshot
from tests.support.parsed_frames import parse_frame
from tests.support.published_versions import SCHEMA, Versions

COUNT = 200 * 50 + 90  # parameters


def test_without_a_chain_volunteers_get_the_master_as_it_is(tmp_path: Path) -> None:
    run = Versions(tmp_path / "run", downlink="float32")
    content = run.publish()
    assert content.published_sha256 == content.master_sha256
    assert content.size == content.master_size
    assert content.downlink == Downlink()
    assert len(run.blobs) == 2  # one file a version


def test_a_chain_keeps_the_exact_master_beside_what_it_publishes(tmp_path: Path) -> None:
    run = Versions(tmp_path / "run")
    for _ in range(4):
        run.publish()
    content = run.publish()
    assert content.published_sha256 != content.master_sha256
    master = parse_frame(run.blobs[content.master_sha256], SCHEMA)
    published = parse_frame(run.blobs[content.published_sha256], SCHEMA)
    assert master["w"].tobytes() == run.weights["w"].tobytes()
    assert 0 < np.abs(master["w"] - published["w"]).max() < 4e-5
    assert published["mean"].tobytes() == master["mean"].tobytes()
    assert int(published["steps"]) == 6
    assert all(hashlib.sha256(data).hexdigest() == sha for sha, data in run.blobs.items())


def test_a_link_and_a_snapshot_are_small(tmp_path: Path) -> None:
    run = Versions(tmp_path / "run", snapshot_every=2)
    run.publish()
    content = run.publish()
    link, snapshot = content.downlink.links[0], content.downlink.snapshots[0]
    assert link.blob.size < 1.02 * COUNT + 1000
    assert snapshot.blob.size < 1.45 * COUNT + 1000
    assert link.rounded
    assert snapshot.weights == link.weights == content.published_sha256


def test_a_version_that_nobody_could_tell_from_the_last_has_no_link(tmp_path: Path) -> None:
    run = Versions(tmp_path / "run", snapshot_every=1)
    first = run.publish()
    published = parse_frame(run.blobs[first.published_sha256], SCHEMA)
    run.weights = {name: published[name].copy() for name in published}
    run.weights["steps"] -= 1
    again = run.publish(scale=0.0)
    assert again.published_sha256 == first.published_sha256
    assert again.downlink == first.downlink


def test_a_master_that_is_not_finite_is_not_published(tmp_path: Path) -> None:
    run = Versions(tmp_path / "run")
    run.weights["bias"][3] = np.inf
    with pytest.raises(InvalidFrame, match="NaN or infinite"):
        run.publish()


def test_of_a_very_small_model_only_the_whole_file_is_kept(tmp_path: Path) -> None:
    run = Versions(tmp_path / "run", snapshot_every=1, schema=SCHEMA[1:3])
    run.commit()
    content = run.publish()
    assert content.downlink == Downlink()
    assert set(run.blobs) >= {content.master_sha256, content.published_sha256}
    assert len(run.blobs) == 4  # two versions, master and published


# --- which ways are listed ---


def ref(name: str, size: int) -> BlobRef:
    return BlobRef(sha256=name, size=size)


def link(base: str, weights: str, size: int = 101) -> Link:
    return Link(
        base=base,
        weights=weights,
        blob=ref(f"{base}-{weights}", size),
        codec="int8",
        rounded=False,
    )


def snapshot(weights: str, size: int = 140) -> Snapshot:
    return Snapshot(weights=weights, blob=ref(f"{weights}-packed", size))


def test_a_manifest_lists_links_until_the_whole_file_is_fewer_bytes() -> None:
    known = Downlink()
    for number in range(1, 9):
        step = link(str(number - 1), str(number))
        known = ways(known, ref(str(number), 400), step, None)
    assert [each.weights for each in known.links] == ["8", "7", "6"]


def test_what_a_newer_snapshot_makes_useless_is_listed_no_more() -> None:
    known = ways(Downlink(), ref("0", 400), None, snapshot("0"))
    assert known.snapshots == (snapshot("0"),)
    known = ways(known, ref("1", 400), link("0", "1"), None)
    known = ways(known, ref("2", 400), link("1", "2"), None)
    assert [each.weights for each in known.links] == ["2", "1"]
    assert known.snapshots == (snapshot("0"),)
    known = ways(known, ref("3", 400), link("2", "3"), snapshot("3"))
    assert known.links == (link("2", "3"),)  # a second link is more than the snapshot
    assert known.snapshots == (snapshot("3"),)


def test_weights_that_come_back_to_what_they_were_make_no_circle() -> None:
    known = ways(Downlink(), ref("b", 400), link("a", "b", 1), None)
    known = ways(known, ref("a", 400), link("b", "a", 1), None)
    known = ways(known, ref("b", 400), link("a", "b", 1), None)
    assert len(known.links) == 2


def test_a_chain_without_snapshots_is_refused() -> None:
    with pytest.raises(InvalidPlan, match="snapshot_every"):
        plan({"snapshot_every": 0})
