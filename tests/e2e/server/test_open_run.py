"""A run that strangers joined: real training beside made-up work, checked before the verdict."""

from __future__ import annotations

import secrets
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import Connection

from coordinator.database import contributions, runs, volunteers
from coordinator.database.ledger import payments
from coordinator.database.ledger.payments import Payment
from coordinator.rules.standing import PROOFS_MIN
from shared.protocol.accounts import Forfeited, Me
from shared.protocol.contributions import Commitment, Verdict
from shared.protocol.leases import ClaimReply
from tests.contract.test_escrow import draw
from tests.e2e.server.test_recomputes import settled
from tests.support.account_rows import add_contribution
from tests.support.local_coordinator import LocalCoordinator, Worker, decode, local_coordinator
from tests.support.local_volunteer import LocalMachine

NOTHING = Commitment()
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


async def noise(worker: Worker, seed: int, commitment: Commitment = NOTHING) -> Verdict:
    """Submit noise of about the honest norm in place of a task's work."""
    lease = await worker.claim()
    begun = await worker.begin(lease)
    data = await worker.update(lease.job.run, seed, scale=0.05)
    await worker.upload(lease, data)
    said = msgspec.structs.replace(worker.submission(lease, begun, data), loss_last=2.0)
    said = msgspec.structs.replace(said, commitment=commitment)
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

            before = await head(home)
            eve = await home.stranger("Eve")
            said = await noise(eve, 1)
            assert said.state in ("accepted", "superseded")  # a merge may come before it
            assert said.reveal == ()  # it was committed to nothing
            await settled(home)
            me = decode(await eve.get("/workers/me"), Me)
            assert (me.standing, me.escrow_micro, me.pending_micro, me.earned_micro) == (
                "probation", 0, 0, 0,
            )  # fmt: skip
            after = await head(home)
            assert after == before  # and it moved no version
        assert await home.coordinator.ledger.check() == ()


async def test_a_machine_with_an_open_question_gets_no_other_lease(tmp_path: Path) -> None:
    """Until it has revealed, or its owner gave the stake up; nor does its update move the model."""
    settings = {"open": True, "proof_of_work_bits": 1}
    async with local_coordinator(tmp_path / "coordinator", **settings) as home:
        await home.start_run(LEARNING)
        async with home.coordinator.working():
            eve = await home.stranger("Eve")
            said = await noise(eve, 1, Commitment(left="a" * 64))
            assert said.reveal == ("a" * 64,)
            reply = decode(await eve.post("/claims", claim()), ClaimReply)
            assert reply.lease is None
            assert reply.idle is not None
            assert reply.idle.reason == "proof"
            assert reply.idle.contribution == said.contribution
            assert reply.idle.reveal == said.reveal
            assert "`volunteer forfeit`" in reply.idle.message
            me = decode(await eve.get("/workers/me"), Me)
            assert (me.proving, me.standing) == (1, "probation")
            given = decode(await eve.post("/me/forfeit"), Forfeited)
            assert given.questions == 1
            again = decode(await eve.post("/me/forfeit"), Forfeited)
            assert (again.questions, again.amount_micro) == (0, 0)
            assert decode(await eve.post("/claims", claim()), ClaimReply).lease is not None
            assert await head(home) == 0
        assert await home.coordinator.ledger.check() == ()


async def test_an_invited_account_closes_all_its_questions_and_loses_nothing(
    tmp_path: Path,
) -> None:
    async with local_coordinator(tmp_path / "coordinator") as home:
        await home.start_run(LEARNING)
        ann = await home.join("Ann")

        def asked(conn: Connection) -> None:
            run = runs.by_name(conn, "tiny").id
            for _ in range(2):
                machine = ann.worker_id
                number = add_contribution(
                    conn, run, ann.volunteer_id, worker_id=machine, weight=1.0
                )
                one = Payment.of(contributions.by_id(conn, number))
                payments.post_step(conn, "pending", [one], 1.0)
                draw(conn, number, ("a" * 64,))

        await home.coordinator.db.write(asked)
        reply = decode(await ann.post("/claims", claim()), ClaimReply)
        assert reply.idle is not None
        assert reply.idle.reason == "proof"
        given = decode(await ann.post("/me/forfeit"), Forfeited)
        assert (given.questions, given.amount_micro) == (2, 0)
        me = decode(await ann.get("/workers/me"), Me)
        assert (me.proving, me.standing, me.pending_micro) == (0, "vetted", 20)
        assert decode(await ann.post("/claims", claim()), ClaimReply).lease is not None
        assert await home.coordinator.ledger.check() == ()


def claim() -> dict[str, object]:
    """A request for work that is answered at once."""
    return {"claim_id": secrets.token_hex(16), "wait_s": 0.0}
