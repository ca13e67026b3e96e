"""Alerts reach the log and a webhook, once an hour a kind; `coordinator trust` shows why."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from coordinator.database import standings
from coordinator.upkeep.alerts import WAVE_MIN, Alert, Alerts
from shared import proof_of_work
from tests.e2e.server.test_recomputes import lazy, results, run_file
from tests.support.local_coordinator import LocalCoordinator, Worker, local_coordinator
from tests.support.local_volunteer import LocalMachine


@asynccontextmanager
async def webhook() -> AsyncIterator[tuple[str, list[Alert]]]:
    """A server that keeps what is posted to it."""
    heard: list[Alert] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(int(l.split(":")[1]) for l in head.split("\r\n") if l.startswith("Content-L"))
        heard.append(Alert(**json.loads(await reader.readexactly(length))))
        writer.write(b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        yield f"http://127.0.0.1:{port}/alerts", heard


async def strangers(home: LocalCoordinator, names: range) -> None:
    for number in names:
        worker = Worker(home, f"S{number}")
        given = await home.coordinator.volunteers.challenge(worker.volunteer_id)
        nonce = proof_of_work.solve(given.challenge, given.bits, lambda _: True)
        proof = {"challenge": given.challenge, "nonce": f"{nonce:x}"}
        reply = await worker.post("/workers/register", worker.registration(**proof))
        assert reply.status_code == 200, reply.text


async def test_a_wave_of_strangers_is_said_once(tmp_path: Path) -> None:
    async with webhook() as (address, heard):
        settings = {
            "open": True, "proof_of_work_bits": 1, "alert_webhook": address,
            "registrations_per_network": 1000,
        }  # fmt: skip
        async with local_coordinator(tmp_path, **settings) as home:
            alerts = home.coordinator.alerts
            await strangers(home, range(WAVE_MIN - 1))
            assert await alerts.look() == ()
            await strangers(home, range(WAVE_MIN, WAVE_MIN + 2))
            assert [alert.kind for alert in await alerts.look()] == ["sybil wave"]
            assert await alerts.look() == ()
        assert [alert.kind for alert in heard] == ["sybil wave"]
        assert "by invitation" in heard[0].message


async def test_a_failed_check_is_an_alert_and_stands_in_the_report(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path / "coordinator") as home:
        coordinator = home.coordinator
        alerts = Alerts(coordinator.db, coordinator.clock, coordinator.settings)
        await home.start_run(run_file())
        async with coordinator.working():
            machine = LocalMachine(tmp_path / "machine", home)
            await machine.join("Eve")
            async with machine.working(lazy, max_tasks=1) as process:
                await process.ended(120)
                await results(home, 1)
        assert [alert.kind for alert in await alerts.look()] == ["failed check"]
        report = await coordinator.volunteers.trust()
        assert report.standings == {"suspended": 1}
        assert report.recompute.failed == 1
        assert report.accounts[0].nickname == "Eve"
        assert "done again" in report.accounts[0].reason


async def test_a_webhook_that_does_not_answer_costs_nothing(tmp_path: Path) -> None:
    settings = {"open": True, "proof_of_work_bits": 1, "alert_webhook": "http://127.0.0.1:9/",
                "registrations_per_network": 1000}  # fmt: skip
    async with local_coordinator(tmp_path, **settings) as home:
        await strangers(home, range(WAVE_MIN))
        assert len(await home.coordinator.alerts.look()) == 1


async def test_a_check_that_fails_within_the_silent_hour_is_said_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with local_coordinator(tmp_path) as home:
        alerts, clock = home.coordinator.alerts, home.clock
        failed: list[tuple[float, int]] = []
        monkeypatch.setattr(
            standings,
            "failed_recomputes",
            lambda conn, since: [n for at, n in failed if at > since],
        )

        async def fails(number: int) -> str:
            await clock.advance(60.0)
            failed.append((clock.now(), number))
            await clock.advance(1.0)
            return " ".join(alert.message for alert in await alerts.look())

        assert "contribution 1 is" in await fails(1)
        assert await fails(2) == ""
        assert await alerts.look() == ()
        await clock.advance(3600.0)
        (late,) = await alerts.look()
        assert "contribution 2 is" in late.message
        assert await alerts.look() == ()
