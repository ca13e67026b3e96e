"""The same thing asked at one moment by several: one effect, one answer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from coordinator.rules import validation
from coordinator.rules.validation import Measurement
from shared.protocol.contributions import Verdict
from shared.tensors.spec import Schema
from tests.support.local_coordinator import decode, local_coordinator


async def test_one_result_sent_many_times_at_once_is_one_contribution(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """... and looked into once: whoever repeats it costs the server nothing."""
    measured: list[str] = []
    measure = validation.measure

    def counting(path: Path, schema: Schema, codec: str) -> Measurement:
        measured.append(codec)
        return measure(path, schema, codec)

    monkeypatch.setattr(validation, "measure", counting)
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
        assert len(measured) == 1
        assert await home.coordinator.ledger.check() == ()
