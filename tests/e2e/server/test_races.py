"""The same thing asked at one moment by several: one effect, one answer."""

from __future__ import annotations

import asyncio
from pathlib import Path

from shared.protocol.contributions import Verdict
from tests.support.local_coordinator import decode, local_coordinator


async def test_one_result_sent_many_times_at_once_is_one_contribution(
    tmp_path: Path, database_url: str
) -> None:
    async with local_coordinator(tmp_path, database=database_url) as home:
        await home.start_run()
        ann = await home.join("Ann")
        lease = await ann.claim()
        begun = await ann.begin(lease)
        data = await ann.update("tiny")
        await ann.upload(lease, data)
        said = ann.submission(lease, begun, data)
        storm = [ann.post(f"/tasks/{lease.task}/submit", said) for _ in range(20)]
        recheck = [home.coordinator.intake.recheck() for _ in range(3)]
        replies, _ = await asyncio.gather(asyncio.gather(*storm), asyncio.gather(*recheck))
        verdicts = [decode(reply, Verdict) for reply in replies]
        assert len({verdict.contribution for verdict in verdicts}) == 1
        assert {verdict.state for verdict in verdicts} == {"accepted"}
        assert await home.coordinator.ledger.check() == ()
