"""Near copies in an open run: refused with a sentence, and counted against nobody."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from coordinator.database import checks, runs, volunteers
from coordinator.database import contributions as store
from coordinator.runs.definition import definition
from shared import proof_of_work
from shared.protocol.accounts import RegisterReply
from shared.protocol.contributions import Verdict
from shared.tensors.quantize import codec
from tests.support.local_coordinator import LocalCoordinator, Worker, decode, local_coordinator

OPEN = {"open": True, "proof_of_work_bits": 1}


async def stranger(home: LocalCoordinator, name: str) -> Worker:
    worker = Worker(home, name)
    given = await home.coordinator.volunteers.challenge(worker.volunteer_id)
    nonce = proof_of_work.solve(given.challenge, given.bits, lambda _: True)
    proof = {"challenge": given.challenge, "nonce": f"{nonce:x}"}
    decode(await worker.post("/workers/register", worker.registration(**proof)), RegisterReply)
    return worker


async def changed(worker: Worker, run: str, data: bytes, factor: float) -> bytes:
    """The same update in other bytes: scaled."""
    row = await worker.house.coordinator.db.read(lambda conn: runs.by_name(conn, run))
    about = definition(row)
    scratch = worker.house.coordinator.blobs.scratch()
    (scratch / "theirs").write_bytes(data)
    with codec(about.plan.codec).decode(scratch / "theirs", about.schema) as update:
        tensors = {name: update[name] * np.float32(factor) for name in update}
    codec(about.plan.codec).encode(tensors, about.schema, scratch / "changed")
    return (scratch / "changed").read_bytes()


async def submitted(worker: Worker, make: object, seed: int = 0, factor: float = 0.0) -> Verdict:
    """Submit an update of a seed, or what `make` holds times a factor."""
    lease = await worker.claim()
    begun = await worker.begin(lease)
    data = await worker.update(lease.job.run, seed)
    if isinstance(make, bytes):
        data = await changed(worker, lease.job.run, make, factor)
    await worker.upload(lease, data)
    said = worker.submission(lease, begun, data)
    return decode(await worker.post(f"/tasks/{lease.task}/submit", said), Verdict)


async def test_a_changed_copy_is_refused_and_counts_against_nobody(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path / "coordinator", **OPEN) as home:
        run = await home.start_run()
        ann, eve = await stranger(home, "Ann"), await stranger(home, "Eve")
        first = await submitted(ann, None, seed=1)
        assert first.state == "accepted"
        theirs = await ann.update(run, 1)
        copy = await submitted(eve, theirs, factor=1.5)
        assert (copy.state, copy.reason) == ("rejected", "replay")
        assert "near copy of another update of the same version" in copy.message
        row = await home.coordinator.db.read(
            lambda conn: volunteers.existing(conn, eve.volunteer_id)
        )
        assert row.trust == 1.0
        assert (await submitted(eve, None, seed=2)).state == "accepted"

        def kept(conn: object) -> int:
            newest = store.by_id(conn, first.contribution)  # type: ignore[arg-type]
            other = msgspec.structs.replace(newest, id=0)
            return len(checks.known_sketches(conn, other))  # type: ignore[arg-type]

        assert await home.coordinator.db.read(kept) == 2  # of what was accepted


async def test_by_invitation_no_sketch_is_made(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path / "coordinator") as home:
        run = await home.start_run()
        ann, ben = await home.join("Ann"), await home.join("Ben")
        assert (await submitted(ann, None, seed=1)).state == "accepted"
        theirs = await ann.update(run, 1)
        assert (await submitted(ben, theirs, factor=1.5)).state == "accepted"
