"""Two hundred streams at once, clients that vanish or read a byte a second, and a kill."""

from __future__ import annotations

import asyncio
import random
import socket
from pathlib import Path

import openai
import pytest

from coordinator.inference.builtin_engine import BuiltinEngine, ProcessLimits
from coordinator.v1 import reply_sender
from shared.clock import SystemClock
from tests.support.answering import Answering, answering
from tests.support.counting_engine import CountingEngine
from tests.support.local_coordinator import RUN

STREAMS, TOKENS = 200, 20
TIERS = """
[[serve.tiers]]
requests_per_minute = 10000
tokens = 4096
tokens_waiting = 1000000
"""


async def test_two_hundred_streams_with_random_disconnects(tmp_path: Path) -> None:
    rng, engine = random.Random(7), CountingEngine()
    async with answering(tmp_path, RUN + TIERS, engine) as house, house.client() as client:

        async def ask(leave_after: int) -> int:
            stream = await client.completions.create(
                model="tiny", prompt="x", max_tokens=TOKENS, stream=True
            )
            seen = 0
            async for chunk in stream:
                seen += len(chunk.choices[0].text)
                if seen >= leave_after:
                    break
            await stream.close()
            return seen

        limits = [rng.choice((1, 5, TOKENS + 1)) for _ in range(STREAMS)]
        seen = await asyncio.gather(*(ask(limit) for limit in limits))
        await house.sound()
        rows = (await house.ann.get("/me/usage")).json()
        assert len(rows) == STREAMS
        assert sum(row["tokens_out"] for row in rows) == engine.generated >= sum(seen)
        paid = (await house.balances()).spent_micro
        assert sum(row["cost_micro"] for row in rows) == paid > 0
        assert engine.open == 0


@pytest.mark.slow
async def test_two_hundred_streams_of_the_built_in_engine_with_disconnects(
    tmp_path: Path, database_url: str
) -> None:
    rng = random.Random(8)
    run = RUN.replace("block_size = 8", "block_size = 64") + TIERS
    async with answering(tmp_path, run, database=database_url) as house, house.client() as client:
        inside = house.coordinator
        engine = BuiltinEngine(inside.db, SystemClock(), inside.blobs, ProcessLimits(threads=1))
        inside.answers.connect(engine)
        try:

            async def ask(leave_after: int) -> int:
                stream = await client.completions.create(
                    model="tiny", prompt="1 plus", max_tokens=TOKENS, stream=True
                )
                seen = 0
                async for chunk in stream:
                    seen += bool(chunk.choices[0].text)
                    if seen >= leave_after:
                        break
                await stream.close()
                return seen

            limits = [rng.choice((1, 5, TOKENS + 1)) for _ in range(STREAMS)]
            seen = await asyncio.gather(*(ask(limit) for limit in limits))
            await house.sound()
        finally:
            await engine.close()
        rows = (await house.ann.get("/me/usage")).json()
        assert len(rows) == STREAMS
        assert sum(row["tokens_out"] for row in rows) >= sum(seen)
        paid = (await house.balances()).spent_micro
        assert sum(row["cost_micro"] for row in rows) == paid > 0


@pytest.mark.parametrize("reads", [0, 1])  # bytes, now and then
async def test_a_client_that_hardly_reads_is_dropped_and_pays_for_what_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: int
) -> None:
    monkeypatch.setattr(reply_sender.ReplySender.__init__, "__defaults__", (0.2,))
    engine = CountingEngine(context=1 << 20)
    async with answering(tmp_path, RUN + TIERS, engine) as house:
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            host, port = house.url.removeprefix("http://").split(":")
            slow.connect((host, int(port)))
            await _ask(house, slow, tokens=4000)  # more than the buffers of both sides hold
            async with asyncio.timeout(120):
                while not engine.closed:
                    if reads:
                        slow.setblocking(False)
                        await asyncio.get_running_loop().sock_recv(slow, reads)
                    await asyncio.sleep(0.01)
                await house.settled()
        assert engine.open == 0
        (row,) = (await house.ann.get("/me/usage")).json()
        assert 0 < row["tokens_out"] < 8 * 4000
        await house.sound()


async def _ask(house: Answering, slow: socket.socket, tokens: int) -> None:
    body = (
        b'{"model":"tiny","prompt":"x","n":8,"logprobs":5,"stream":true,"max_tokens":%d}' % tokens
    )
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {house.key}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    slow.sendall(head.encode() + body)


async def test_requests_a_minute_are_limited_by_tier(tmp_path: Path) -> None:
    async with answering(tmp_path) as house, house.client() as client:
        for _ in range(30):
            await client.completions.create(model="tiny", prompt="x", max_tokens=1)
        with pytest.raises(openai.RateLimitError, match="30 requests a minute") as caught:
            await client.completions.create(model="tiny", prompt="x", max_tokens=1)
        assert int(caught.value.response.headers["retry-after"]) > 0
        assert caught.value.code == "rate_limit_exceeded"


async def test_a_kill_between_tokens_is_settled_by_the_next_start(tmp_path: Path) -> None:
    gate = asyncio.Semaphore(4)
    async with answering(tmp_path, engine=CountingEngine(gate=gate)) as house:
        async with house.client() as client:
            stream = await client.completions.create(
                model="tiny", prompt="x", max_tokens=50, stream=True
            )
            pieces = aiter(stream)
            for _ in range(4):
                await anext(pieces)
            meter = house.coordinator.answers.meter
            await meter.tick()
            meter._live.clear()  # as a killed process forgets
            assert await meter.recover(all_replicas=True) == 1
            (row,) = (await house.ann.get("/me/usage")).json()
            assert row["tokens_out"] == 4
            await stream.close()
        await house.sound()
