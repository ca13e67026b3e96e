"""A run that strangers joined: real training beside made-up work, checked before the verdict."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import Connection

from coordinator.database import contributions, runs, volunteers
from coordinator.rules.standing import PROOFS_MIN
from shared.protocol.accounts import Me
from shared.protocol.contributions import Verdict
from tests.e2e.server.test_recomputes import settled
from tests.support.local_coordinator import LocalCoordinator, Worker, decode, local_coordinator
from tests.support.local_volunteer import LocalMachine

LEARNING = """
name = "tiny"
workload = "gpt"
dataset = "sums"
[model]
block_size = 8
n_layer = 1
n_head = 1
n_embd = 16
dropout = 0.0
[train]
lr = 0.01
warmup_steps = 0
[task]
local_steps = 8
batch_size = 8
min_steps = 1
[plan]
preset = "fedavg"
quorum = 1
codec = "float32"
"""


async def noise(worker: Worker, seed: int) -> Verdict:
    """Submit noise of about the honest norm in place of a task's work."""
    lease = await worker.claim()
    begun = await worker.begin(lease)
    data = await worker.update(lease.job.run, seed, scale=0.05)
    await worker.upload(lease, data)
    said = msgspec.structs.replace(worker.submission(lease, begun, data), loss_last=2.0)
    return decode(await worker.post(f"/tasks/{lease.task}/submit", said), Verdict)


async def head(home: LocalCoordinator) -> int:
    """The newest version of the run."""
    return (await home.coordinator.db.read(lambda conn: runs.by_name(conn, "tiny"))).head


@pytest.mark.slow
async def test_honest_strangers_are_vetted_and_paid_and_made_up_work_is_neither(
    tmp_path: Path,
) -> None:
    settings = {"open": True, "proof_of_work_bits": 1}
    async with local_coordinator(tmp_path / "coordinator", **settings) as home:
        await home.start_run(LEARNING + "[trust]\nrecompute = 1.0\n")  # quickly
        async with home.coordinator.working():
            machine = LocalMachine(tmp_path / "machine", home)
            await machine.join("Ann")
            async with machine.working(max_tasks=2 * PROOFS_MIN) as process:
                assert await process.ended(240) == 0
            await settled(home)
            ann = next(p for p in await home.coordinator.volunteers.list() if p.nickname == "Ann")

            def standing(conn: Connection) -> tuple[str, int]:
                row = volunteers.existing(conn, ann.volunteer_id)
                return row.standing, row.accepted

            assert await home.coordinator.db.read(standing) == ("vetted", 2 * PROOFS_MIN)
            assert await head(home) > PROOFS_MIN

            def waiting(conn: Connection) -> int:
                return len(contributions.mergeable(conn, runs.by_name(conn, "tiny").id))

            while await home.coordinator.db.read(waiting):  # Ann's last update
                await asyncio.sleep(0.02)
            before = await head(home)
            eve = await home.stranger("Eve")
            said = await noise(eve, 1)
            assert said.state in ("accepted", "superseded")  # a merge may come before it
            await settled(home)
            me = decode(await eve.get("/workers/me"), Me)
            assert (me.standing, me.escrow_micro, me.pending_micro, me.earned_micro) == (
                "suspended", 0, 0, 0,
            )  # fmt: skip
            after = await head(home)
            assert after == before  # and it moved no version
        assert await home.coordinator.ledger.check() == ()
