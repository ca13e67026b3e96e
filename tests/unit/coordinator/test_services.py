"""Background jobs of a server: what a failing one keeps waiting."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from shared.errors import Unavailable
from tests.support.local_coordinator import local_coordinator


@pytest.mark.parametrize("error", [Unavailable("the store rests"), ZeroDivisionError()])
async def test_a_job_that_waits_for_its_restart_keeps_no_server_from_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    failed = asyncio.Event()

    async def failing(stop: asyncio.Event) -> None:
        failed.set()
        raise error

    async with local_coordinator(tmp_path) as home:
        monkeypatch.setattr(home.coordinator.upkeep, "run", failing)
        with capture_logs() as lines:
            async with home.coordinator.working():
                await failed.wait()
        assert [line["job"] for line in lines if "cut off" in line["event"]] == []
