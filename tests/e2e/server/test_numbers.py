"""Numbers that no row can have: refused or not found on either database, never a failure of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from shared.protocol.limits import API
from tests.support.local_coordinator import LocalCoordinator, local_coordinator, refused

HUGE = (2**31, 2**32, 2**63 - 1, 2**63, 10**17)


@pytest.fixture
async def home(tmp_path: Path, database_url: str) -> AsyncIterator[LocalCoordinator]:
    async with local_coordinator(tmp_path, database=database_url) as made:
        yield made


async def test_no_number_in_an_address_reaches_the_database_too_large(
    home: LocalCoordinator,
) -> None:
    run = await home.start_run()
    ann = await home.join("Ann")
    for number in HUGE:
        for path in (
            f"/runs/{run}/versions/{number}",
            f"/runs/{run}/versions?cursor={number}",
            f"/contributions?cursor={number}",
            f"/me/ledger?cursor={number}",
            f"/leaderboard?days={number}",
        ):
            reply = await ann.get(path)
            assert reply.status_code in (200, 400, 404), path


async def test_no_number_in_a_message_reaches_the_database_too_large(
    home: LocalCoordinator,
) -> None:
    await home.start_run()
    ann = await home.join("Ann")
    lease = await ann.claim()
    begun = await ann.begin(lease)
    data = await ann.update("tiny")
    await ann.upload(lease, data)
    good = msgspec.to_builtins(ann.submission(lease, begun, data))
    for number in (*HUGE, -2):
        for name in ("attempt", "part", "tries", "base_version", "size"):
            reply = await ann.post(f"/tasks/{lease.task}/submit", good | {name: number})
            assert 400 <= reply.status_code < 500, (name, number)
        for body in ({"attempt": number}, {"attempt": lease.attempt, "known": number}):
            reply = await ann.post(f"/tasks/{lease.task}/begin", body)
            assert 400 <= reply.status_code < 500, body
        beat = {"tasks": [{"task": number, "attempt": number}]}
        reply = await ann.post("/workers/heartbeat", beat)
        assert reply.status_code in (200, 400), number


async def test_what_is_stored_of_a_submission_is_bounded(home: LocalCoordinator) -> None:
    await home.start_run()
    ann = await home.join("Ann")
    lease = await ann.claim()
    begun = await ann.begin(lease)
    data = await ann.update("tiny")
    await ann.upload(lease, data)
    good = msgspec.to_builtins(ann.submission(lease, begun, data))
    for metrics in ({f"m{n}": 1.0 for n in range(26_000)}, {"m" * 100: 1.0}):
        refused(await ann.post(f"/tasks/{lease.task}/submit", good | {"metrics": metrics}), 400)


async def test_no_number_of_the_organiser_reaches_the_database_too_large(
    home: LocalCoordinator,
) -> None:
    run = await home.start_run()
    await home.join("Ann")
    for number in (*HUGE, -1, -(10**17)):
        for command, body in (
            ("run.export", {"name": run, "version": number}),
            ("run.rollback", {"name": run, "to": number}),
            ("run.rollouts", {"name": run, "version": number}),
            ("task.requeue", {"ids": [number]}),
            ("invite.revoke", {"id": number}),
            ("invite.create", {"count": number}),
            ("invite.create", {"uses": number}),
            ("announce.withdraw", {"id": number}),
            ("contribution.reverse", {"id": number, "reason": "wrong"}),
            ("checker.renew", {"contribution": number, "hold": "x"}),
            ("grant", {"name": "Ann", "amount_micro": number, "reason": "gift"}),
            ("record.list", {"before": number}),
            ("volunteer.reverse", {"name": "Ann", "since": float(number), "reason": "wrong"}),
            ("volunteer.key", {"name": "Ann", "expires_s": float(number)}),
            ("announce", {"text": "hello", "until": float(number)}),
            ("run.extend", {"name": run, "stop": {"versions": number}, "yes": True}),
            ("run.extend", {"name": run, "stop": {"tokens": number}, "yes": True}),
        ):
            reply = await home.admin.post(
                f"{API}/admin/{command}", content=msgspec.json.encode(body)
            )
            assert reply.status_code < 500, (command, body, reply.text)
