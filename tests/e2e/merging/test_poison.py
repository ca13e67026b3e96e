"""Contributions that are wrong, by accident or on purpose: each is refused or bounded with its
reason, and the merge goes on.
"""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from sqlalchemy import update

from coordinator.database import contributions, runs, versions
from coordinator.database.tables.contributions import contributions as contributions_table
from coordinator.runs.definition import definition
from shared.protocol.accounts import Me
from shared.protocol.contributions import Verdict
from shared.tensors.codec import codec
from shared.tensors.spec import Schema, TensorSpec
from tests.support.failpoints import fail, faults
from tests.support.local_coordinator import (
    RUN,
    LocalCoordinator,
    Worker,
    decode,
    local_coordinator,
    refused,
)

SCALE = 1e-3
Tensors = dict[str, Any]


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[LocalCoordinator]:
    async with local_coordinator(tmp_path) as made:
        await made.start_run()
        yield made


async def schema_of(home: LocalCoordinator) -> Schema:
    return definition(
        await home.coordinator.db.read(lambda conn: runs.by_name(conn, "tiny"))
    ).schema


def drawn(schema: Schema, seed: int, scale: float = SCALE) -> Tensors:
    rng = np.random.default_rng(seed)
    return {s.name: (rng.standard_normal(s.shape) * scale).astype(np.float32) for s in schema}


def frame(home: LocalCoordinator, tensors: Tensors, schema: Schema) -> bytes:
    path = home.coordinator.blobs.scratch() / "made"
    codec("float32").encode(tensors, schema, path)
    return path.read_bytes()


async def hand_in(worker: Worker, data: bytes, **claims: Any) -> Verdict:
    """A task of this worker, answered with these bytes and these claims about them."""
    lease = await worker.claim()
    said = worker.submission(lease, await worker.begin(lease), data)
    await worker.upload(lease, data)
    said = msgspec.structs.replace(said, **claims)
    return decode(await worker.post(f"/tasks/{lease.task}/submit", said), Verdict)


async def moved(home: LocalCoordinator, version: int) -> float:
    """Return how far a version is from the one before."""
    row = await home.coordinator.db.read(lambda conn: versions.get(conn, 1, version))
    assert row.update_norm is not None
    return row.update_norm


async def merged(home: LocalCoordinator) -> bool:
    """Return True if two honest volunteers make a version of what is there."""
    ann, bob = [await home.join(name) for name in ("Honest Ann", "Honest Bob")]
    for worker, seed in ((ann, 901), (bob, 902)):
        assert (await worker.work(seed)).state == "accepted"
    done = await home.coordinator.merger.merge_if_due(1)
    report = await home.coordinator.checks.run()
    return done and report.breaches == () and await home.coordinator.ledger.check() == ()


def wrong_shape(tensors: Tensors, schema: Schema) -> Schema:
    first = schema[0]
    tensors[first.name] = tensors[first.name].reshape(-1)
    return (TensorSpec(first.name, (first.count,)), *schema[1:])


def missing_tensor(tensors: Tensors, schema: Schema) -> Schema:
    return schema[:-1]


def strange_tensor(tensors: Tensors, schema: Schema) -> Schema:
    tensors["extra"] = np.ones(3, np.float32)
    return (*schema, TensorSpec("extra", (3,)))


def nothing_changed(tensors: Tensors, schema: Schema) -> Schema:
    for tensor in tensors.values():
        tensor[...] = 0.0
    return schema


def a_thousand_times(tensors: Tensors, schema: Schema) -> Schema:
    for tensor in tensors.values():
        tensor *= 1000.0
    return schema


SPOILT: list[tuple[Callable[[Tensors, Schema], Schema], str]] = [
    (wrong_shape, "frame"),
    (missing_tensor, "frame"),
    (strange_tensor, "frame"),
    (nothing_changed, "empty"),
    (a_thousand_times, "norm"),
]


async def test_content_that_cannot_be_is_rejected(home: LocalCoordinator) -> None:
    schema = await schema_of(home)
    for number, (spoil, reason) in enumerate(SPOILT):
        eve = await home.join(f"Eve {number}")
        tensors = drawn(schema, number)
        verdict = await hand_in(eve, frame(home, tensors, spoil(tensors, schema)))
        assert (verdict.state, verdict.reason, verdict.credits_micro) == ("rejected", reason, 0)
        assert len(verdict.message) > 20
        me = decode(await eve.get("/workers/me"), Me)
        assert (me.pending_micro, me.earned_micro) == (0, 0)
    assert await merged(home)


async def test_what_is_no_number_is_rejected(home: LocalCoordinator) -> None:
    schema = await schema_of(home)
    for number, poison in enumerate((np.nan, np.inf, -np.inf)):
        data = frame(home, drawn(schema, number), schema)[:-4] + np.float32(poison).tobytes()
        verdict = await hand_in(await home.join(f"Eve {number}"), data)
        assert (verdict.state, verdict.reason) == ("rejected", "not_finite")
    assert await merged(home)


async def test_the_base_itself_and_bytes_that_are_no_file_are_rejected(
    home: LocalCoordinator,
) -> None:
    eve, schema = await home.join("Eve"), await schema_of(home)
    base = await home.coordinator.db.read(lambda conn: versions.get(conn, 1, 0))
    weights = (await home.coordinator.blobs.local(base.published_sha256)).read_bytes()
    unchanged = await hand_in(eve, weights)
    assert (unchanged.state, unchanged.reason) == ("rejected", "norm")
    data = frame(home, drawn(schema, 1), schema)
    for garbage in (b"no tensors at all", data[:-1], data[: len(data) // 2], bytes(len(data))):
        verdict = await hand_in(eve, garbage)
        assert (verdict.state, verdict.reason) == ("rejected", "frame")
    assert await merged(home)


CLAIMS: list[tuple[dict[str, Any], str]] = [
    ({"steps": 10**9}, "steps"),
    ({"samples": 10**9}, "steps"),
    ({"base_version": 7}, "stale"),
    ({"loss_last": -1.0}, "loss"),
]


async def test_claims_are_checked_and_never_paid(home: LocalCoordinator) -> None:
    schema = await schema_of(home)
    for number, (claims, reason) in enumerate(CLAIMS):
        eve = await home.join(f"Eve {number}")
        verdict = await hand_in(eve, frame(home, drawn(schema, number), schema), **claims)
        assert (verdict.state, verdict.reason, verdict.credits_micro) == ("rejected", reason, 0)
    assert await merged(home)


async def test_boasting_of_time_and_speed_earns_nothing_more(home: LocalCoordinator) -> None:
    schema = await schema_of(home)
    eve, ann = await home.join("Eve"), await home.join("Ann")
    lie = {"train_s": 1e12, "metrics": {"tokens": 1e15, "flops": 1e30}}
    lied = await hand_in(eve, frame(home, drawn(schema, 1), schema), **lie)
    honest = await hand_in(ann, frame(home, drawn(schema, 2), schema))
    assert lied.credits_micro == honest.credits_micro > 0


async def test_a_turned_sign_weighs_no_more_than_honest_work(home: LocalCoordinator) -> None:
    schema = await schema_of(home)
    for number in range(2):
        worker = await home.join(f"Ann {number}")
        assert (
            await hand_in(worker, frame(home, drawn(schema, number), schema))
        ).state == "accepted"
    assert await home.coordinator.merger.merge_if_due(1)
    turned = {name: -2.3 * tensor for name, tensor in drawn(schema, 5).items()}
    eve, bob = await home.join("Eve"), await home.join("Bob")
    assert (await hand_in(eve, frame(home, turned, schema))).state == "accepted"
    assert (await hand_in(bob, frame(home, drawn(schema, 6), schema))).state == "accepted"
    assert await home.coordinator.merger.merge_if_due(1)
    honest, turned_one = [await moved(home, version) for version in (1, 2)]
    assert turned_one < 3 * honest


async def test_too_old_work_is_rejected_and_counted_against_nobody(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home:
        await home.start_run(RUN.replace("quorum = 2", "quorum = 1\nmax_staleness = 1"))
        eve, ann = await home.join("Eve"), await home.join("Ann")
        lease = await eve.claim()
        begun = await eve.begin(lease)
        data = await eve.update("tiny", 77)
        await eve.upload(lease, data)
        for seed in range(3):
            assert (await ann.work(seed)).state == "accepted"
            assert await home.coordinator.merger.merge_if_due(1)
        reply = await eve.post(f"/tasks/{lease.task}/submit", eve.submission(lease, begun, data))
        verdict = decode(reply, Verdict)
        assert (verdict.state, verdict.reason) == ("rejected", "stale")
        assert (await ann.claim()).job.start == lease.job.start  # somebody does it again
        assert (await home.coordinator.checks.run()).breaches == ()


async def test_bytes_of_another_task_are_a_replay(home: LocalCoordinator) -> None:
    schema = await schema_of(home)
    ann, eve, bob = [await home.join(name) for name in ("Ann", "Eve", "Bob")]
    data = frame(home, drawn(schema, 1), schema)
    assert (await hand_in(ann, data)).state == "accepted"
    for thief in (eve, bob, eve):
        verdict = await hand_in(thief, data)
        assert (verdict.state, verdict.reason) == ("rejected", "replay")
    assert await merged(home)


async def test_nobody_answers_for_the_task_of_somebody_else(home: LocalCoordinator) -> None:
    ann, eve = await home.join("Ann"), await home.join("Eve")
    lease = await ann.claim()
    begun = await ann.begin(lease)
    data = await eve.update("tiny", 5)
    refused(await eve.announce(lease, data), 404)
    said = eve.submission(lease, begun, data)
    refused(await eve.post(f"/tasks/{lease.task}/submit", said), 404)
    refused(await eve.post(f"/tasks/{10**6}/submit", said), 404)
    await ann.upload(lease, data)
    assert decode(await ann.post(f"/tasks/{lease.task}/submit", said), Verdict).state == "accepted"


# --- when validation had a gap, and when a merge fails ---


async def planted(home: LocalCoordinator, verdict: Verdict, data: bytes) -> None:
    """Put other bytes under a contribution that was accepted."""
    sha = await home.coordinator.blobs.put_bytes(data)
    c = contributions_table.c
    planting = update(contributions_table).where(c.id == verdict.contribution)
    await home.coordinator.db.write(
        lambda conn: conn.execute(planting.values(sha256=sha, size=len(data)))
    )


async def test_what_makes_merges_fail_is_set_aside_after_two_and_the_rest_is_merged(
    home: LocalCoordinator,
) -> None:
    eve = await home.join("Eve")
    verdict = await eve.work(1)
    await planted(home, verdict, b"this is no file of tensors")
    for name, seed in (("Ann", 2), ("Bob", 3)):
        assert (await (await home.join(name)).work(seed)).state == "accepted"
    merger = home.coordinator.merger
    assert [await merger.merge_if_due(1) for _ in range(3)] == [False, False, True]
    after = await eve.verdict(verdict.contribution)
    assert (after.state, after.reason, after.credits_micro) == ("rejected", "merge_failed", 0)
    states = await home.coordinator.db.read(lambda conn: contributions.counts(conn, 1))
    assert states == {"merged": 2, "rejected": 1}
    assert await home.coordinator.ledger.check() == ()
    assert (await home.coordinator.checks.run()).breaches == ()


@pytest.mark.parametrize("times", [1, 5])
async def test_a_disk_that_fails_a_merge_is_blamed_on_no_contribution(
    home: LocalCoordinator, times: int
) -> None:
    for name, seed in (("Ann", 2), ("Bob", 3)):
        assert (await (await home.join(name)).work(seed)).state == "accepted"
    broken = fail(OSError(errno.EIO, "input/output error")).before("put_file").often(times)
    tries = 0
    with faults(broken).installed():
        while not await home.coordinator.merger.merge_if_due(1):
            tries += 1
            assert tries < 10
    states = await home.coordinator.db.read(lambda conn: contributions.counts(conn, 1))
    assert states == {"merged": 2}
    assert (await home.coordinator.checks.run()).breaches == ()
    assert [path.name for path in home.coordinator.blobs.scratch().glob("merge-*")] == []


async def test_a_merge_that_fails_leaves_no_trace(home: LocalCoordinator) -> None:
    for name, seed in (("Ann", 2), ("Bob", 3)):
        await (await home.join(name)).work(seed)
    before = await home.coordinator.runs.queries.info("tiny")
    broken = faults(fail(OSError(errno.EIO, "no")).amid("write _commit"))
    with broken.installed(), pytest.raises(OSError, match="no"):
        await home.coordinator.merger.merge_if_due(1)
    assert (await home.coordinator.runs.queries.info("tiny")).version == before.version
    states = await home.coordinator.db.read(lambda conn: contributions.counts(conn, 1))
    assert states == {"accepted": 2}
    assert (await home.coordinator.checks.run()).breaches == ()
    assert await home.coordinator.merger.merge_if_due(1)
