"""A real server and its inference process, killed in the middle of answers: each token that came is
paid once, and nothing stays held.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
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
STREAMS = int(os.environ.get("CHAOS_STREAMS", "12"))  # at once
KILLS = int(os.environ.get("CHAOS_KILLS", "3"))
TOKENS = 120
LIMIT_S = 900.0
BY_VOLUNTEERS = '[serve]\nanswered_by = "volunteers"\n'
pytestmark = pytest.mark.slow


async def _prepared(path: Path, serve: str = "") -> str:
    """Make a data directory with a version, credits and a key."""
    run = RUN.replace("block_size = 8", "block_size = 1024") + serve + TIERS
    async with answering(path, run) as house:
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


class Asking:
    """Many streams at once, each until it ended or was left; failed ones are asked again."""

    def __init__(self, client: openai.AsyncOpenAI, rng: random.Random) -> None:
        self.client = client
        self.seen: dict[str, int] = {}  # pieces with text, by request
        self.whole: dict[str, int] = {}  # tokens of those that came to their end
        self.broken: set[str] = set()  # by a kill
        self.left = [rng.choice((3, 30, TOKENS + 1)) for _ in range(STREAMS)]

    @property
    def pieces(self) -> int:
        return sum(self.seen.values())

    async def all(self) -> None:
        await asyncio.gather(*(self._until_done(leave_after) for leave_after in self.left))

    async def _until_done(self, leave_after: int) -> None:
        while True:
            request = ""
            try:
                stream = await self.client.completions.create(
                    model="tiny",
                    prompt="1 plus",
                    max_tokens=TOKENS,
                    stream=True,
                    stream_options={"include_usage": True},
                )
                async for chunk in stream:
                    request = chunk.id.removeprefix("cmpl-")
                    if chunk.usage is not None:
                        self.whole[request] = chunk.usage.completion_tokens
                        return
                    self.seen[request] = self.seen.get(request, 0) + bool(chunk.choices[0].text)
                    if self.seen[request] >= leave_after:
                        await stream.close()
                        return
            except (openai.APIError, OSError, httpx.HTTPError):
                self.broken.add(request)
                await asyncio.sleep(0.1)


class House:
    """A server, its inference process and a volunteer that answers; each can be killed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.server = self._serve()
        self.volunteer = self._lend()

    def _serve(self) -> Process:
        return Process(self.path / "house", "--port", str(self.port)).started()

    def _lend(self) -> subprocess.Popen[bytes]:
        home = {f"XDG_{kind}_HOME": str(self.path) for kind in ("CONFIG", "DATA", "STATE", "CACHE")}
        options = ("--no-ui", "--device", "cpu", "--set", "serve=true", "--set", "threads=1")
        return subprocess.Popen(
            [sys.executable, "-m", "volunteer", *options],
            env=os.environ | home | {"VOLUNTEER_JOIN": self.server.link},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def kill_inference(self) -> None:
        with contextlib.suppress(ValueError, psutil.Error):  # it may not have begun again
            _inference(self.server).send_signal(signal.SIGKILL)

    def kill_volunteer(self) -> None:
        self.volunteer.kill()
        self.volunteer.wait()
        self.volunteer = self._lend()

    def kill_server(self) -> None:
        self.server.signal(signal.SIGKILL)
        self.server.ended()
        self.server = self._serve()

    def close(self) -> None:
        self.volunteer.kill()
        self.volunteer.wait()
        assert self.server.stop() == 0


@pytest.mark.timeout(LIMIT_S)
async def test_kills_of_everything_under_many_streams(tmp_path: Path) -> None:
    key = await _prepared(tmp_path / "house", BY_VOLUNTEERS)
    rng = random.Random(17)
    house = House(tmp_path)
    kills: list[Callable[[], None]] = [
        house.kill_inference,
        house.kill_volunteer,
        house.kill_server,
    ]
    try:
        async with asyncio.timeout(LIMIT_S), _client(house.server, key) as client:
            asking = Asking(client, rng)
            under_way = asyncio.create_task(asking.all())
            for kill in itertools.islice(itertools.cycle(kills), KILLS):
                due = asking.pieces + rng.randint(20, 60)
                while asking.pieces < due and not under_way.done():
                    await asyncio.sleep(0.01)
                await asyncio.to_thread(kill)
            await under_way
            # the last ones to be dropped are settled by the server before it ends
    finally:
        await asyncio.to_thread(house.close)
    _checked(tmp_path / "house")
    _paid_once(tmp_path / "house", asking)


def _paid_once(path: Path, asking: Asking) -> None:
    """Hold what came against what was paid."""
    with contextlib.closing(sqlite3.connect(path / "coordinator.sqlite3")) as base:
        rows = base.execute("select id, state, tokens_out, tokens_max, cost_micro from usage")
        usage = {row[0]: row[1:] for row in rows}
        burnt = base.execute("select sum(balance_micro) from accounts where kind = 'burn'")
        assert burnt.fetchone()[0] == sum(cost for *_, cost in usage.values()) > 0
        ends = "select key from events where kind in ('settle', 'release')"
        ended = [each.split(":")[1] for (each,) in base.execute(ends)]
        shares = "select count(*), count(distinct key) from events where kind = 'answer'"
        answered, distinct = base.execute(shares).fetchone()
    assert sorted(ended) == sorted(usage)  # each exactly once
    assert answered == distinct
    assert {state for state, *_ in usage.values()} == {"done"}
    for request, tokens in asking.whole.items():
        assert usage[request][1] == tokens
    lost = 0
    for request, pieces in asking.seen.items():
        paid = usage[request][1]
        if request in asking.broken:  # at most the tokens of the last second are the house's loss
            lost += max(0, pieces - paid)
        else:
            assert paid >= pieces
    print(
        f"{len(usage)} requests, {len(asking.broken)} broken by {KILLS} kills, {asking.pieces} "
        f"pieces, {sum(row[1] for row in usage.values())} tokens paid, {answered} shares of "
        f"volunteers, {lost} pieces lost by the house"
    )


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
