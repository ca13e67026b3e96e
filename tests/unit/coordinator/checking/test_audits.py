"""Answers of auditors: how surely the organiser does a task again although an answer agrees."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest
import sqlalchemy as sa

from coordinator.checking.audits import _sums_of_update
from coordinator.database import contributions, runs, volunteers
from coordinator.database.ledger import escrow, payments
from coordinator.database.ledger.payments import Payment
from coordinator.rules import audits as rules
from coordinator.runs.definition import definition
from shared.protocol.contributions import Verdict
from shared.protocol.leases import ClaimReply
from tests.support.account_rows import add_contribution
from tests.support.local_coordinator import RUN, decode, local_coordinator

DRAWN = RUN.replace("quorum = 2", "quorum = 1000") + "[trust]\nrecompute = 1.0\n"
STAKED, MEAN, DRAWS = 50_000_000, 1000, 5


async def test_what_an_auditor_may_have_free_at_any_time_makes_no_check_of_its_answer_rarer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the bond stays: other draws of the auditor may end before, and free the rest."""
    weighed: list[tuple[int, int | None]] = []

    def certain(gained: int, stake: int | None) -> float:
        weighed.append((gained, stake))
        return 1.0

    monkeypatch.setattr(rules, "confirmed_chance", certain)
    async with local_coordinator(tmp_path, open=True, proof_of_work_bits=0) as home:
        await home.start_run(DRAWN)
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
        assert await home.coordinator.audits.open() == 1
        claim = {"claim_id": secrets.token_hex(16), "wait_s": 0.0, "audits": True}
        lease = decode(await bob.post("/claims", claim), ClaimReply).lease
        assert lease is not None
        assert lease.audit is not None
        row, run = await home.coordinator.db.read(
            lambda conn: (contributions.by_id(conn, verdict.contribution), runs.by_id(conn, 1))
        )
        path = await home.coordinator.blobs.local(row.sha256)
        sums = _sums_of_update(path, definition(run).schema, row.codec, lease.audit.seed)
        begun = await bob.begin(lease)
        await bob.upload(lease, sums)
        answer = bob.submission(lease, begun, sums)
        reply = await bob.post(f"/tasks/{lease.task}/submit", answer)
        assert decode(reply, Verdict).state == "accepted"
        bond = MEAN * (DRAWS - 1)
        assert weighed == [(2 * lease.price_micro, bond)]
