"""Answers of auditors: what they are paid for, and how surely the organiser checks them."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from coordinator.checking.audits import TOO_LATE, _sums_of_update
from coordinator.checking.case import Case
from coordinator.database import contributions, recomputes, runs, volunteers
from coordinator.database.ledger import escrow, payments
from coordinator.database.ledger.payments import Payment
from coordinator.rules import audits as rules
from coordinator.rules.draws import HERE, ComputeDevice, Redone
from coordinator.runs.definition import definition
from shared.protocol.accounts import Me
from shared.protocol.contributions import Verdict
from shared.protocol.leases import ClaimReply, Lease
from tests.support.account_rows import add_contribution
from tests.support.local_coordinator import RUN, LocalCoordinator, Worker, decode, local_coordinator

DRAWN = RUN.replace("quorum = 2", "quorum = 1000") + "[trust]\nrecompute = 1.0\n"
STAKED, MEAN, DRAWS = 50_000_000, 1000, 5


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[LocalCoordinator]:
    async with local_coordinator(tmp_path, open=True, proof_of_work_bits=0) as made:
        await made.start_run(DRAWN)
        yield made


async def audited(home: LocalCoordinator) -> tuple[int, Worker, Lease]:
    """The number of a contribution of Eve, and its audit, which Bob has claimed."""
    eve, bob = [await home.stranger(name) for name in ("Eve", "Bob")]
    verdict = await eve.work(1)

    def trusted(conn: sa.Connection) -> None:
        number = add_contribution(
            conn, 1, bob.volunteer_id, "merged", STAKED, weight=1.0, worker_id=bob.worker_id
        )
        row = contributions.by_id(conn, number)
        payments.post_step(conn, "pending", [Payment.of(row)], 0.0)
        escrow.hold(conn, [row], 0.0)
        history = {"accepted": 10**6, "accepted_micro": MEAN * 10**6, "draws": DRAWS}
        volunteers.set_volunteer(conn, bob.volunteer_id, standing="vetted", **history)

    await home.coordinator.db.write(trusted)
    await home.clock.advance(rules.OFFERED_AFTER_S + 1)
    watch = home.coordinator.signals.watch("queue")
    assert await home.coordinator.audits.open() == 1
    assert await watch.wait(0)  # who waits for work
    lease = await claimed(bob)
    assert lease.audit is not None
    return verdict.contribution, bob, lease


async def claimed(worker: Worker) -> Lease:
    """Work of a program that knows audits."""
    claim = {"claim_id": secrets.token_hex(16), "wait_s": 0.0, "audits": True}
    lease = decode(await worker.post("/claims", claim), ClaimReply).lease
    assert lease is not None
    return lease


async def sums_of(home: LocalCoordinator, number: int, lease: Lease) -> bytes:
    """The sums of the audited update."""
    row, run = await home.coordinator.db.read(
        lambda conn: (contributions.by_id(conn, number), runs.by_id(conn, 1))
    )
    path = await home.coordinator.blobs.local(row.sha256)
    assert lease.audit is not None
    return _sums_of_update(path, definition(run).schema, row.codec, lease.audit.seed)


async def answer(worker: Worker, lease: Lease, sums: bytes) -> Verdict:
    begun = await worker.begin(lease)
    await worker.upload(lease, sums)
    submission = worker.submission(lease, begun, sums)
    return decode(await worker.post(f"/tasks/{lease.task}/submit", submission), Verdict)


async def pay(worker: Worker) -> tuple[int, int, int]:
    me = decode(await worker.get("/workers/me"), Me)
    return me.pending_micro, me.escrow_micro, me.earned_micro


async def test_what_an_auditor_may_have_free_at_any_time_makes_no_check_of_its_answer_rarer(
    home: LocalCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the bond stays: other draws of the auditor may end before, and free the rest."""
    weighed: list[tuple[int, int | None]] = []

    def certain(gained: int, stake: int | None) -> float:
        weighed.append((gained, stake))
        return 1.0

    monkeypatch.setattr(rules, "confirmed_chance", certain)
    number, bob, lease = await audited(home)
    assert (await answer(bob, lease, await sums_of(home, number, lease))).state == "accepted"
    bond = MEAN * (DRAWS - 1)
    assert weighed == [(2 * lease.price_micro, bond)]


async def test_an_answer_that_comes_after_the_organiser_did_the_task_is_not_paid(
    home: LocalCoordinator,
) -> None:
    number, bob, lease = await audited(home)
    before, sums = await pay(bob), await sums_of(home, number, lease)

    def ordered(conn: sa.Connection) -> tuple[recomputes.RecomputeRow, Case]:
        row = recomputes.get(conn, number)
        assert row is not None
        return row, Case.from_stored(conn, row.work, runs.by_id(conn, 1))

    row, case = await home.coordinator.db.read(ordered)
    agrees, here = Redone(cosine=1.0, norm_ratio=1.0), ComputeDevice(kind=HERE)
    await home.coordinator.recomputes.judge(row, case, agrees, here, 1.0)
    verdict = await answer(bob, lease, sums)
    assert (verdict.state, verdict.message, verdict.credits_micro) == (
        "superseded",
        TOO_LATE.message,
        0,
    )
    assert await pay(bob) == before


async def test_who_answers_an_audit_with_nonsense_is_not_asked_again(
    home: LocalCoordinator,
) -> None:
    number, bob, lease = await audited(home)
    before, sums = await pay(bob), await sums_of(home, number, lease)
    verdict = await answer(bob, lease, sums[:-4] + b"\xff\xff\xff\xff")  # no number
    assert (verdict.state, verdict.reason) == ("rejected", "frame")
    assert await pay(bob) == before
    await home.clock.advance(3600.0)  # the rest after a failed task
    assert (await claimed(bob)).audit is None
