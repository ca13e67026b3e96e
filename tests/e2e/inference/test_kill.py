"""A real server and its inference process, killed in the middle of answers: each token that came is
paid once, and nothing stays held.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
from pathlib import Path

import openai
import psutil
import pytest

from tests.support.answering import answering
from tests.support.local_coordinator import RUN
from tests.support.server_process import Process, command

TIERS = """
[[serve.tiers]]
requests_per_minute = 10000
tokens = 4096
tokens_waiting = 1000000
"""
pytestmark = pytest.mark.slow


async def _prepared(path: Path) -> str:
    """Make a data directory with a version, credits and a key."""
    async with answering(path, RUN.replace("block_size = 8", "block_size = 1024") + TIERS) as house:
        return house.key


def _client(server: Process, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60)


async def _some(
    client: openai.AsyncOpenAI, count: int
) -> openai.AsyncStream[openai.types.Completion]:
    stream = await client.completions.create(
        model="tiny", prompt="1", max_tokens=1000, stream=True, temperature=0
    )
    for _ in range(count):
        await anext(stream)
    return stream


def _inference(server: Process) -> psutil.Process:
    """The inference process of a server."""
    (found,) = [
        child
        for child in psutil.Process(server.child.pid).children(recursive=True)
        if "coordinator.inference.worker" in child.cmdline()
    ]
    return found


def _checked(path: Path) -> None:
    ended = command("check", "--data-dir", str(path))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    with contextlib.closing(sqlite3.connect(path / "coordinator.sqlite3")) as base:
        held = "select sum(balance_micro) from accounts where kind = 'held'"
        assert base.execute(held).fetchone() == (0,)
        ended_rows = base.execute("select tokens_out, cost_micro from usage").fetchall()
    assert len(ended_rows) >= 2


async def test_a_killed_inference_process_is_paid_for_what_came(tmp_path: Path) -> None:
    key = await _prepared(tmp_path)
    with Process(tmp_path, "--port", "0") as server:
        async with _client(server, key) as client:
            stream = await _some(client, 2)
            _inference(server).send_signal(signal.SIGKILL)
            with contextlib.suppress(openai.APIError):
                async for _ in stream:
                    pass
            answered = False
            while not answered:  # it is begun again by itself
                with contextlib.suppress(openai.APIStatusError):
                    await client.completions.create(model="tiny", prompt="1", max_tokens=2)
                    answered = True
        assert server.stop() == 0
    _checked(tmp_path)


async def test_a_killed_server_settles_at_its_next_start(tmp_path: Path) -> None:
    key = await _prepared(tmp_path)
    with Process(tmp_path, "--port", "0") as server:
        async with _client(server, key) as client:
            await _some(client, 2)
            worker = _inference(server)
            os.kill(server.child.pid, signal.SIGKILL)
            worker.wait(30)  # it ends with its server
        server.ended()
    with Process(tmp_path, "--port", "0") as server:
        async with _client(server, key) as client:
            done = await client.completions.create(model="tiny", prompt="1", max_tokens=2)
            assert done.usage
        assert server.stop() == 0
    _checked(tmp_path)
