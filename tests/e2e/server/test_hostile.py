"""Hostile clients of a real server: refused with a sentence, memory flat, others served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from shared.protocol.base import ErrorBody
from shared.protocol.endpoints import ENDPOINTS
from shared.protocol.limits import API
from tests.e2e.conftest import ServedCoordinator
from tests.support.local_coordinator import local_coordinator

MIB = 1 << 20
DRIPPING = 700


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no VmRSS")


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
async def test_text_that_a_database_cannot_hold_is_refused(
    tmp_path: Path, database_url: str
) -> None:
    async with local_coordinator(tmp_path, database=database_url) as home:
        await home.start_run()
        ann = await home.join("Ann")
        lease = await ann.claim()
        for text in ("a\0b", "a\\\0b"):
            for path, body in {
                "/workers/register": ann.registration(nickname=text, hostname=text),
                "/claims": {"claim_id": text, "device": text},
                f"/tasks/{lease.task}/release": {"attempt": lease.attempt, "reason": text},
                "/workers/heartbeat": {"paused": {text: True}, "device": text},
            }.items():
                reply = await ann.post(path, body)
                assert reply.status_code == 400, (path, reply.text)
                assert msgspec.json.decode(reply.content, type=ErrorBody).message
        for path in (
            "/runs/a%00b",
            "/datasets/%00",
            "/contributions?cursor=%00",
            "/leaderboard?run=%00",
        ):
            assert (await ann.get(path)).status_code in (400, 404), path
        reason = {"attempt": lease.attempt, "reason": "a\\u0000b"}  # no NUL: six characters
        reply = await ann.post(f"/tasks/{lease.task}/release", reason)
        assert reply.status_code == 204


@pytest.mark.slow
class TestOnASocket:
    """With the deadlines set small."""

    @pytest.fixture
    def database_url(self) -> str:
        return ""

    @pytest.fixture
    async def server(self, served: ServedCoordinator) -> ServedCoordinator:
        small = {"headers_s": 1.0, "body_window_s": 1.5, "connections_per_address": 2 * DRIPPING}
        served.settings |= {"constants": small}
        await served.serve()
        await served.listening()
        return served

    async def test_an_endless_body_is_refused_while_memory_stays_flat(
        self, server: ServedCoordinator
    ) -> None:
        async def endless() -> AsyncIterator[bytes]:
            for _ in range(300):
                yield bytes(MIB)

        before = resident_bytes(server.child.pid)
        async with httpx.AsyncClient(base_url=server.url) as client:
            for endpoint in ENDPOINTS:
                if endpoint.request is None or "{" in endpoint.path:
                    continue
                try:
                    reply = await client.request(
                        endpoint.method, endpoint.full_path, content=endless()
                    )
                except httpx.TransportError:
                    continue  # it hung up before we had read the answer
                assert 400 <= reply.status_code < 500, endpoint.path
                assert msgspec.json.decode(reply.content, type=ErrorBody).message
            assert (await client.get(f"{API}/server")).status_code == 200
        assert resident_bytes(server.child.pid) - before < 64 * MIB

    async def test_who_drips_is_closed_and_who_is_slow_but_honest_lives(
        self, server: ServedCoordinator
    ) -> None:
        async with AsyncExitStack() as stack:
            dripping = [await self._connect(server, stack) for _ in range(DRIPPING)]
            _, honest = slow = await self._connect(server, stack)
            head = "POST /api/v1/workers/register HTTP/1.1\r\nHost: localhost\r\nContent-Length: 6144\r\n\r\n"
            honest.write(head.encode())
            for _, writer in dripping:
                writer.write(b"POST /api/v1/claims HTTP/1.1\r\n")
            closed = asyncio.gather(*(self._until_closed(reader) for reader, _ in dripping))
            for _ in range(24):  # 2 KiB/s for three seconds: longer than the deadlines
                honest.write(b"x" * 256)
                await honest.drain()
                await asyncio.sleep(0.125)
            answer = await asyncio.wait_for(slow[0].read(12), 60)
            assert answer == b"HTTP/1.1 400"
            await asyncio.wait_for(closed, 60)
        async with httpx.AsyncClient(base_url=server.url) as client:
            assert (await client.get(f"{API}/server")).status_code == 200

    async def _connect(self, server: ServedCoordinator, stack: AsyncExitStack) -> Any:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.settings["port"])
        stack.callback(writer.close)
        return reader, writer

    async def _until_closed(self, reader: asyncio.StreamReader) -> None:
        try:
            await reader.read()
        except ConnectionError:
            pass
