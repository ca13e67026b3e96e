"""A run that strangers joined: real training beside made-up work, checked before the verdict."""

from __future__ import annotations

from pathlib import Path

import msgspec
from sqlalchemy import Connection

from coordinator.database import volunteers
from coordinator.database.ledger import payments
from coordinator.rules.standing import PASSED_MIN
from shared import proof_of_work
from shared.protocol.accounts import Me, RegisterReply
from shared.protocol.contributions import Verdict
from tests.e2e.server.test_recomputes import settled
from tests.support.local_coordinator import Worker, decode, local_coordinator
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


async def test_honest_strangers_are_vetted_and_made_up_work_is_not_paid(tmp_path: Path) -> None:
    settings = {"open": True, "proof_of_work_bits": 1}
    async with local_coordinator(tmp_path / "coordinator", **settings) as home:
        await home.start_run(LEARNING)
        async with home.coordinator.working():
            machine = LocalMachine(tmp_path / "machine", home)
            await machine.join("Ann")
            async with machine.working(max_tasks=PASSED_MIN + 1) as process:
                assert await process.ended(120) == 0
            ann = next(p for p in await home.coordinator.volunteers.list() if p.nickname == "Ann")

            def standing(conn: Connection) -> tuple[str, int, int]:
                row = volunteers.existing(conn, ann.volunteer_id)
                has = payments.balances(conn, ann.volunteer_id)
                return row.standing, row.accepted, has.escrow_micro + has.pending_micro

            state, accepted, held = await home.coordinator.db.read(standing)
            assert state == "vetted"
            assert accepted == PASSED_MIN + 1
            assert held > 0  # and nothing of it can be spent yet

            eve = Worker(home, "Eve")
            given = await home.coordinator.volunteers.challenge(eve.volunteer_id)
            nonce = proof_of_work.solve(given.challenge, given.bits, lambda _: True)
            proof = {"challenge": given.challenge, "nonce": f"{nonce:x}"}
            decode(await eve.post("/workers/register", eve.registration(**proof)), RegisterReply)
            verdicts = [await noise(eve, seed) for seed in range(3)]
            assert [verdict.state for verdict in verdicts] == ["superseded"] * 3
            assert "could not confirm" in verdicts[0].message
            await settled(home)
            me = decode(await eve.get("/workers/me"), Me)
            assert (me.standing, me.escrow_micro, me.pending_micro, me.earned_micro) == (
                "probation", 0, 0, 0,
            )  # fmt: skip
        assert await home.coordinator.ledger.check() == ()
