"""Updates that are no good, in every codec that can hide it: a reason and a sentence, and the work
goes on.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from coordinator.database import runs
from coordinator.runs.definition import definition
from shared.protocol.contributions import Verdict
from shared.protocol.leases import ClaimReply
from shared.tensors.codec import codec
from shared.tensors.frame import frame_bytes, open_frame
from shared.tensors.quantize import SCALE
from shared.tensors.spec import Schema
from tests.support.local_coordinator import (
    RUN,
    LocalCoordinator,
    decode,
    local_coordinator,
    refused,
)

NAN = 0x7FC0  # as a bfloat16

Spoil = Callable[[bytes, Schema, Path], bytes]


@pytest.fixture
async def home(tmp_path: Path, database_url: str) -> AsyncIterator[LocalCoordinator]:
    async with local_coordinator(tmp_path, database=database_url) as made:
        yield made


def cut(data: bytes, schema: Schema, folder: Path) -> bytes:
    return data[:-10]


def nan_scale(data: bytes, schema: Schema, folder: Path) -> bytes:
    wire = codec("int8").wire_schema(schema)
    (folder / "u").write_bytes(data)
    with open_frame(folder / "u", wire) as frame:
        tensors = {name: array.copy() for name, array in frame.items()}
    next(array for name, array in tensors.items() if name.endswith(SCALE))[-1] = NAN
    return frame_bytes(tensors, None, wire)


def encoded(way: str, schema: Schema, folder: Path) -> bytes:
    """Encode a valid update."""
    rng = np.random.default_rng(1)
    tensors = {s.name: (rng.standard_normal(s.shape) * 1e-3).astype("f4") for s in schema}
    codec(way).encode(tensors, schema, folder / "made")
    return (folder / "made").read_bytes()


def honest(data: bytes, schema: Schema, folder: Path) -> bytes:
    return data


@pytest.mark.parametrize(
    ("way", "spoil", "says"),
    [
        ("int8", cut, "cut off"),
        ("int8", nan_scale, "scale that is negative, infinite or not a number"),
        ("float32", cut, "cut off"),
        ("bf16", honest, ""),
        ("float32", honest, ""),
    ],
)
async def test_a_spoilt_update_is_refused_with_a_sentence_and_a_sound_one_taken(
    home: LocalCoordinator, tmp_path: Path, way: str, spoil: Spoil, says: str
) -> None:
    text = RUN.replace("quorum = 2", "quorum = 1")
    await home.start_run(text.replace('codec = "float32"', f'codec = "{way}"'))
    ann = await home.join("Ann")
    body = {"claim_id": "c", "wait_s": 0, "codecs": [way]}
    lease = decode(await ann.post("/claims", body), ClaimReply).lease
    assert lease is not None
    assert lease.grant.codec == way
    begun = await ann.begin(lease)
    row = await home.coordinator.db.read(lambda conn: runs.by_name(conn, "tiny"))
    schema = definition(row).schema
    data = spoil(encoded(way, schema, tmp_path), schema, tmp_path)
    await ann.upload(lease, data)
    said = ann.submission(lease, begun, data)
    verdict = decode(await ann.post(f"/tasks/{lease.task}/submit", said), Verdict)
    if says:
        assert (verdict.state, verdict.reason) == ("rejected", "frame")
        assert says in verdict.message
    else:
        assert verdict.state == "accepted"
        assert await home.coordinator.merger.merge_if_due(1)


@pytest.mark.parametrize(
    ("way", "says"),
    [
        (
            "int4",
            'the update is encoded as "int4", which this run does not accept; accepted: bf16,',
        ),
        ("bf16", ""),  # more bytes than were asked for, and no harm
    ],
)
async def test_an_update_in_a_codec_that_the_run_grants_to_nobody_is_refused(
    home: LocalCoordinator, tmp_path: Path, way: str, says: str
) -> None:
    text = RUN.replace("quorum = 2", 'quorum = 3\naggregate = "median"')
    await home.start_run(text.replace('codec = "float32"', 'codec = "int8"'))
    ann = await home.join("Ann")
    lease = await ann.claim()
    begun = await ann.begin(lease)
    row = await home.coordinator.db.read(lambda conn: runs.by_name(conn, "tiny"))
    data = encoded(way, definition(row).schema, tmp_path)
    await ann.upload(lease, data)
    said = msgspec.structs.replace(ann.submission(lease, begun, data), codec=way)
    verdict = decode(await ann.post(f"/tasks/{lease.task}/submit", said), Verdict)
    assert (verdict.state, verdict.reason) == (("rejected", "frame") if says else ("accepted", ""))
    assert says in verdict.message


@pytest.mark.parametrize("way", ["ternary", "x" * 1000], ids=["short", "long"])
async def test_a_codec_that_nobody_knows_is_refused_before_anything_is_kept(
    home: LocalCoordinator, way: str
) -> None:
    await home.start_run(RUN)
    ann = await home.join("Ann")
    lease = await ann.claim()
    begun = await ann.begin(lease)
    data = await ann.update("tiny")
    await ann.upload(lease, data)
    right = ann.submission(lease, begun, data)
    wrong = msgspec.structs.replace(right, codec=way)
    said = refused(await ann.post(f"/tasks/{lease.task}/submit", wrong), 400)
    assert "there is no codec" in said.message
    assert await home.coordinator.intake.recheck() == 0
    verdict = decode(await ann.post(f"/tasks/{lease.task}/submit", right), Verdict)
    assert verdict.state == "accepted"
