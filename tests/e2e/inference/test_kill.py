"""A real server and its inference process, killed in the middle of answers: each token that came is
paid once, and nothing stays held.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from sqlalchemy import Connection, func, select

from coordinator.database.engine.open_database import Database
from coordinator.database.inference.request_rows import shares
from coordinator.database.tables.inference import usage
from coordinator.database.tables.ledger import accounts, events, postings
from coordinator.inference.stream_log import FOLDER, read_slots
from shared.decoding import decode
from tests.support.answering import answering
from tests.support.forkserver import Child, ForkServer
from tests.support.local_coordinator import RUN
from tests.support.server_process import Process, command

TIERS = """
[[serve.tiers]]
requests_per_minute = 100000
tokens = 4096
tokens_waiting = 1000000
"""
STREAMS = int(os.environ.get("CHAOS_STREAMS", "12"))  # at once, until the kills are over
KILLS = int(os.environ.get("CHAOS_KILLS", "3"))
TOKENS = 400
SAID = 3  # tokens by a volunteer of an answer in whose middle its machine is killed
SETTLED = 8  # looks, 0.25 s apart, that see the same
LIMIT_S = 900.0
BY_VOLUNTEERS = '[serve]\nanswered_by = "volunteers"\nhouse_share = 0.25\n'
UNLIMITED = {"COORDINATOR_RATE_WORKER": "off", "COORDINATOR_RATE_IP": "off"}
pytestmark = pytest.mark.slow


async def _prepared(path: Path, serve: str = "", database: str = "") -> str:
    """Make a data directory with a version, credits and a key."""
    run = RUN.replace("block_size = 8", "block_size = 1024") + serve + TIERS
    async with answering(path, run, database=database) as house:
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
        if "coordinator.inference.inference_process" in child.cmdline()
    ]
    return found


class Books:
    """Rows of a database whose server has ended: use, ends of holds, and pay of volunteers."""

    def __init__(self, conn: Connection) -> None:
        rows = conn.execute(select(usage)).mappings()
        self.usage: dict[str, dict[str, Any]] = {row["id"]: dict(row) for row in rows}
        self.held = self._sum(conn, "held")
        self.burnt = self._sum(conn, "burn")
        ends = select(events.c.key).where(events.c.kind.in_(("settle", "release")))
        self.ended = [key.partition(":")[2] for key in conn.execute(ends).scalars()]
        pay = (
            select(events.c.key, postings.c.amount_micro)
            .join(postings, postings.c.event_id == events.c.id)
            .where(events.c.kind == "answer", postings.c.amount_micro > 0)
        )
        self.pay = [(*key.split(":")[1:], amount) for key, amount in conn.execute(pay)]

    def _sum(self, conn: Connection, kind: str) -> int:
        query = select(func.sum(accounts.c.balance_micro)).where(accounts.c.kind == kind)
        return int(conn.execute(query).scalar() or 0)

    def by_volunteers(self, request: str) -> int:
        """Return the tokens of a request that volunteers made."""
        return sum(decode(self.usage[request]["answered"], dict[str, int]).values())


async def _checked(path: Path, database: str = "") -> Books:
    """Check every invariant as the organiser does; nothing is held, every hold ended once."""
    more = ("--database", database) if database else ()
    ended = await asyncio.to_thread(command, "check", "--data-dir", str(path), *more)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    db = await Database.open(database or f"sqlite:///{path / 'coordinator.sqlite3'}")
    try:
        books = await db.read(Books)
    finally:
        await db.close()
    assert books.held == 0
    assert books.burnt == sum(row["cost_micro"] for row in books.usage.values()) > 0
    assert sorted(books.ended) == sorted(books.usage)
    assert {row["state"] for row in books.usage.values()} == {"done"}
    return books


async def test_a_killed_inference_process_is_paid_for_what_came(
    tmp_path: Path, fork_server: ForkServer
) -> None:
    key = await _prepared(tmp_path)
    with Process(tmp_path, "--port", "0", command=fork_server) as server:
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
    assert len((await _checked(tmp_path)).usage) >= 2


async def test_a_killed_server_settles_at_its_next_start(
    tmp_path: Path, fork_server: ForkServer
) -> None:
    key = await _prepared(tmp_path)
    with Process(tmp_path, "--port", "0", command=fork_server) as server:
        async with _client(server, key) as client:
            stream = await _some(client, 2)
            request = (await anext(stream)).id.removeprefix("cmpl-")
            worker = _inference(server)
            os.kill(server.child.pid, signal.SIGKILL)
            worker.wait(30)  # it ends with its server
        server.ended()
    with Process(tmp_path, "--port", "0", command=fork_server) as server:
        async with _client(server, key) as client:
            done = await client.completions.create(model="tiny", prompt="1", max_tokens=2)
            assert done.usage
        assert server.stop() == 0
    books = await _checked(tmp_path)
    assert books.usage[request]["tokens_out"] >= 3  # within the second before the kill
    assert [*tmp_path.rglob("*.slots")] == []


class Asking:
    """Many streams at once; some leave, and what ended or failed is asked again until the end."""

    def __init__(self, client: openai.AsyncOpenAI, rng: random.Random) -> None:
        self._client = client
        self._rng = rng
        self.seen: dict[str, int] = {}  # pieces with text, by request
        self.whole: dict[str, int] = {}  # tokens of those that came to their end
        self.broken: set[str] = set()  # by a kill
        self.stay: set[str] = set()  # that are listened to until the end
        self.over = False

    @property
    def pieces(self) -> int:
        return sum(self.seen.values())

    def ended(self, request: str) -> bool:
        return request in self.whole or request in self.broken

    async def all(self) -> None:
        await asyncio.gather(*(self._one() for _ in range(STREAMS)))

    async def _one(self) -> None:
        while not self.over:
            await self._ask(self._rng.choice((3, 30, TOKENS + 1)))

    async def _ask(self, leave_after: int) -> None:
        request = ""
        try:
            stream = await self._client.completions.create(
                model="tiny",
                prompt="1 plus",
                max_tokens=TOKENS,
                stream=True,
                stream_options={"include_usage": True},
            )
            async for chunk in stream:
                request = chunk.id.removeprefix("cmpl-")
                if leave_after > TOKENS:
                    self.stay.add(request)
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

    def __init__(self, path: Path, database: str, fork_server: ForkServer) -> None:
        self.path = path
        self._fork_server = fork_server
        self._database = ("--database", database)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.server = self._serve()
        self.volunteer = self._lend()

    def _serve(self) -> Process:
        options = ("--port", str(self._port), *self._database)
        place, command = self.path / "house", self._fork_server
        return Process(place, *options, command=command, **UNLIMITED).started()

    def _lend(self) -> Child:
        home = {f"XDG_{kind}_HOME": str(self.path) for kind in ("CONFIG", "DATA", "STATE", "CACHE")}
        options = ("--no-ui", "--device", "cpu", "--set", "serve=true", "--set", "threads=1")
        environment = os.environ | home | {"VOLUNTEER_JOIN": self.server.link}
        return self._fork_server.unheard(["volunteer", *options], environment)

    def answered_by_volunteer(self, among: set[str]) -> tuple[str, int]:
        """A request that the volunteer answers now and its tokens so far, or nothing."""
        for path in (self.path / "house" / FOLDER).glob("*.slots"):
            with path.open("rb") as file:
                found = read_slots(file)
            for request, streamed in found.items():
                made = sum(streamed.answered.values())
                if request in among and SAID <= made == streamed.out < TOKENS - SAID:
                    return request, made
        return "", 0

    def kill_inference(self) -> None:
        with contextlib.suppress(ValueError, psutil.Error):  # it may not have begun again
            _inference(self.server).send_signal(signal.SIGKILL)

    async def hit_volunteer(self, asking: Asking) -> str:
        """Kill the volunteer in the middle of an answer; the request, which went on elsewhere."""
        while True:
            if self.answered_by_volunteer(asking.stay)[0]:
                self.volunteer.kill(signal.SIGSTOP)
                request, made = await self._settled(asking)
                if request:
                    self.kill_volunteer()
                    while not asking.ended(request):
                        await asyncio.sleep(0.02)
                    self.volunteer = self._lend()
                    if asking.whole.get(request, 0) > made:
                        return request
                self.volunteer.kill(signal.SIGCONT)  # the answer had ended by itself
            await asyncio.sleep(0.02)

    async def _settled(self, asking: Asking) -> tuple[str, int]:
        """Return what the halted volunteer is answering, when all that it sent has arrived, and an
        answer that had ended is written down.
        """
        before, now, same = None, self.answered_by_volunteer(asking.stay), 0
        while now[0] and same < SETTLED:
            await asyncio.sleep(0.25)
            before, now = now, self.answered_by_volunteer(asking.stay)
            same = same + 1 if before == now else 0
        return now

    def kill_volunteer(self) -> None:
        self.volunteer.kill()
        self.volunteer.death.result(120)

    def kill_server(self) -> None:
        self.server.signal(signal.SIGKILL)
        self.server.ended()
        self.server = self._serve()

    def close(self) -> None:
        self.kill_volunteer()
        assert self.server.stop() == 0


async def _kills(house: House, asking: Asking, rng: random.Random) -> list[str]:
    """Kill the volunteer, the inference process and the server in turn; the requests that the
    volunteer was answering when it died.
    """
    hit: list[str] = []
    for number in range(KILLS):
        if number % 3 == 0:
            hit.append(await house.hit_volunteer(asking))
            continue
        due = asking.pieces + rng.randint(20, 60) * STREAMS // 12
        while asking.pieces < due:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(house.kill_inference if number % 3 == 1 else house.kill_server)
    return hit


# The client's own generators are not closed in order where it leaves a stream.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.timeout(LIMIT_S)
async def test_kills_of_everything_under_many_streams(
    tmp_path: Path, database_url: str, fork_server: ForkServer
) -> None:
    key = await _prepared(tmp_path / "house", BY_VOLUNTEERS, database_url)
    rng = random.Random(17)
    house = House(tmp_path, database_url, fork_server)
    try:
        async with asyncio.timeout(LIMIT_S), _client(house.server, key) as client:
            asking = Asking(client, rng)
            under_way = asyncio.create_task(asking.all())
            hit = await _kills(house, asking, rng)
            asking.over = True
            await under_way
    finally:  # the last ones to be dropped are settled by the server before it ends
        await asyncio.to_thread(house.close)
    books = await _checked(tmp_path / "house", database_url)
    _paid_once(books, asking)
    assert hit
    for each in hit:  # begun by a volunteer, which died, and brought to its end by another machine
        assert SAID <= books.by_volunteers(each) < asking.whole[each]


def _paid_once(books: Books, asking: Asking) -> None:
    """Hold what came against what was paid, and what was paid against who made it."""
    for request, tokens in asking.whole.items():
        assert books.usage[request]["tokens_out"] == tokens
    beyond = 0
    for request, pieces in asking.seen.items():
        paid = books.usage[request]["tokens_out"]
        assert paid >= pieces, f"{pieces - paid} pieces of {request} were not paid"
        if request in asking.broken:
            beyond += paid - pieces
    due = {
        (request, who): amount
        for request, row in books.usage.items()
        for who, amount in shares(
            row["cost_micro"], row["tokens_out"], decode(row["answered"], dict[str, int]), 0.25
        ).items()
    }
    assert sorted(books.pay) == sorted((*key, amount) for key, amount in due.items())
    assert due
    by_others = sum(map(books.by_volunteers, books.usage))
    paid = sum(row["tokens_out"] for row in books.usage.values())
    print(
        f"{STREAMS} streams, {KILLS} kills: {len(books.usage)} requests, {len(asking.whole)} to "
        f"the end, {len(asking.broken)} broken; {asking.pieces} pieces came, {paid} tokens paid, "
        f"{by_others} of them to volunteers in {len(due)} shares; {beyond} tokens of broken "
        "streams without text or on the way when the kill came"
    )
