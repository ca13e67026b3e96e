"""Fuzzing of a running coordinator: bodies of every route, and raw bytes at both parsers.

    make fuzz MINUTES=10        the minutes are shared between the routes and the parsers
    make fuzz MINUTES=300 FUZZ_ARGS='--only routes --database postgresql'

Nothing may be answered with 500, hang, or make the server's memory grow by 64 MB. 503 and 507 are
answers that a coordinator gives on purpose and are counted apart.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import uvicorn

from coordinator.config import Settings
from coordinator.http.deadlines import Guard, protocol
from shared.protocol import endpoints
from shared.protocol.endpoints import ENDPOINTS, Endpoint
from shared.protocol.limits import API, HEADER_BYTES_MAX
from shared.protocol.v1_endpoints import V1
from tests.support.databases import prepare_postgres, start_postgres
from tests.support.local_coordinator import local_coordinator
from tests.support.lying_coordinator import EXTREMES, extreme
from tests.support.server_process import Process

BODIES, STREAMS = 10_000, 100_000
GROWTH_BYTES = 64 << 20
ANSWER_S = 10.0
TOGETHER = 16
PURPOSE = (503, 507)
WORDS: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**63, 2**64, 10**30, -(2**63), 0.5, 1e308, -1e308,
    "", "x", "a" * 70,
    "\x1b[2J", "\u202e", "../../x", "a\r\nb", "0" * 64, [], {}, [[]], [1, "a", None],
    {"a": {"b": [1]}},
]  # fmt: skip


HEADERS = ["", "1", "-1", "9" * 40, "bytes=0-1", "bytes=5-", '"x"']
ODD = ["1", "0", "-1", "9" * 30, "%00", "%2e%2e", "x" * 300, "%ff", "1.5", "a%0d%0a"]


def mutated(value: Any, rng: random.Random) -> Any:
    """A value of JSON with one place changed, removed, or added."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value))
        other = dict(value)
        if rng.random() < 0.1:
            del other[key]
        else:
            other[key] = mutated(value[key], rng)
        return other
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        return [*value[:at], mutated(value[at], rng), *value[at + 1 :]]
    return rng.choice(WORDS)


def body(endpoint: Endpoint[Any], rng: random.Random) -> bytes:
    """A body for a route: of its own type and then changed, or no JSON at all."""
    if endpoint.request is None or rng.random() < 0.1:
        return rng.randbytes(rng.choice((0, 1, 10, 1000)))
    value = extreme(endpoint.request, rng.choice([*EXTREMES.values()]))
    for _ in range(rng.randrange(4)):
        value = mutated(value, rng)
    if isinstance(value, dict) and "wait_s" in value:
        value["wait_s"] = 0.0  # a long poll is no hang
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode("utf-8", "replace")
    if rng.random() < 0.05:
        at = rng.randrange(len(text))
        text = text[:at] + rng.randbytes(3) + text[at + 1 :]
    return text


def address(endpoint: Endpoint[Any], rng: random.Random, known: dict[str, str]) -> str:
    """A path of a route, with the query, whose parts may be anything."""
    path = endpoint.full_path
    for name in endpoint.parameters:
        odd = rng.choice(ODD)
        path = path.replace(f"{{{name}}}", known.get(name, odd) if rng.random() < 0.5 else odd)
    asked = [f"{query.name}={rng.choice([*ODD, ''])}" for query in endpoint.query]
    return path + ("?" + "&".join(asked) if asked and rng.random() < 0.7 else "")


async def routes(
    url: str, tokens: dict[str, str], known: dict[str, str], count: int, until: float, seed: int
) -> dict[str, Counter[int]]:
    """Send so many bodies to each route, or as many as time allows. Raises AssertionError."""
    rng = random.Random(seed)
    found: dict[str, Counter[int]] = {}
    limits = httpx.Limits(max_connections=TOGETHER)
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_S, limits=limits) as client:

        async def once(endpoint: Endpoint[Any]) -> int:
            auth = "worker" if endpoint.auth == "key" else endpoint.auth  # a machine may ask too
            token = "" if endpoint is endpoints.LEAVE else tokens.get(auth, "")
            headers = {"Authorization": f"Bearer {token or 'a.b'}"}
            headers |= {name: rng.choice(HEADERS) for name in endpoint.headers}
            where, sent = address(endpoint, rng, known), body(endpoint, rng)
            if rng.random() < 0.7:
                sent = sent.replace(
                    b'"model": ""', b'"model": "%b"' % known.get("run", "").encode()
                )
            try:
                reply = await client.request(endpoint.method, where, content=sent, headers=headers)
            except httpx.InvalidURL:
                return 0
            except httpx.RemoteProtocolError:
                return 1  # the connection was closed ahead of the answer
            status: int = reply.status_code
            assert status < 500 or status in PURPOSE, (endpoint.method, where, sent, reply.text)
            return status

        for done in range(0, count, TOGETHER):
            for endpoint in (*ENDPOINTS, *V1):
                if endpoint.auth == "admin":
                    continue
                statuses = await asyncio.gather(
                    *(once(endpoint) for _ in range(min(TOGETHER, count - done)))
                )
                found.setdefault(f"{endpoint.method} {endpoint.path}", Counter()).update(statuses)
            if time.monotonic() > until:
                break
    return found


PIECES = [
    b"GET / HTTP/1.1\r\n", b"POST /x HTTP/1.1\r\n", b"Host: x\r\n", b"\r\n", b"\n",
    b"\r", b"\x00", b":",
    b"Content-Length: 5\r\n", b"Content-Length: 99999999999999999999\r\n",
    b"Content-Length: -1\r\n",
    b"Transfer-Encoding: chunked\r\n", b"5\r\nhello\r\n", b"0\r\n", b"ffffffffffffffff\r\n",
    b"hello",
    b"Expect: 100-continue\r\n", b"Upgrade: websocket\r\nConnection: upgrade\r\n", b"X: y\r\n" * 50,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01", b"GET http://a/ HTTP/1.0\r\n",
    b"a" * 3000,
    b"Connection: close\r\n", b"Connection: keep-alive\r\n", b";ext=1\r\n", b"1;a=\"b\"\r\nx\r\n",
]  # fmt: skip


def stream(rng: random.Random) -> list[bytes]:
    """Return what one connection sends, piece by piece."""
    pieces = []
    for _ in range(rng.randrange(1, 12)):
        piece = rng.choice(PIECES) if rng.random() < 0.9 else rng.randbytes(rng.randrange(1, 200))
        pieces.append(piece[: rng.randrange(1, len(piece) + 1)] if rng.random() < 0.1 else piece)
    return pieces


async def streams(port: int, count: int, until: float, seed: int) -> Counter[str]:
    """Open so many connections, one stream each. Raises AssertionError for a 500 or a hang."""
    rng = random.Random(seed)
    found: Counter[str] = Counter()

    async def once(sent: list[bytes]) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            for piece in sent:
                writer.write(piece)
                await writer.drain()
            writer.write_eof()
            said = await asyncio.wait_for(reader.read(65536), ANSWER_S)
        except OSError:
            return "reset"
        finally:
            writer.close()
        status = said[9:12].decode("latin-1") if said.startswith(b"HTTP/1.1 ") else "closed"
        assert not status.startswith("500"), (sent, said)
        return status

    for done in range(0, count, TOGETHER):
        made = [stream(rng) for _ in range(min(TOGETHER, count - done))]
        found.update(await asyncio.gather(*map(once, made)))
        if time.monotonic() > until:
            break
    return found


@contextmanager
def flat(process: psutil.Process, most: int = GROWTH_BYTES) -> Iterator[Callable[[], int]]:
    """The memory of a process may not have grown at the end; calling it says by how much."""
    before = process.memory_info().rss

    def grown() -> int:
        return int(process.memory_info().rss - before)

    yield grown
    assert grown() < most, f"{grown() >> 20} MB"


async def prepared(path: Path, database: str) -> None:
    """A data directory with a running run."""
    async with local_coordinator(path, database=database) as home:
        await home.start_run()


@contextmanager
def database_of(kind: str) -> Iterator[str]:
    """The address of an empty database, "" for SQLite in the data directory."""
    if kind == "sqlite":
        yield ""
        return
    server = start_postgres("fsync=off")
    try:
        asyncio.run(prepare_postgres(server))
        yield asyncio.run(server.fresh())
    finally:
        server.stop()


def enrolled(port: int) -> str:
    """Register a worker that holds a task; its token."""
    ids = {name: secrets.token_hex(16) for name in ("volunteer_id", "worker_id", "secret")}
    token = f"{ids['worker_id']}.{ids['secret']}"
    with httpx.Client(base_url=f"http://127.0.0.1:{port}{API}", timeout=30) as client:
        told = ids | {"nickname": f"Ann {secrets.token_hex(3)}", "workloads": ["gpt"]}
        client.post("/workers/register", json=told).raise_for_status()
        claim = {"claim_id": "c" * 32, "wait_s": 0.0, "codecs": ["float32"]}
        headers = {"Authorization": f"Bearer {token}"}
        client.post("/claims", json=claim, headers=headers).raise_for_status()
    return token


def fuzz_routes(
    path: Path, count: int, seconds: float, seed: int, database: str = ""
) -> dict[str, Counter[int]]:
    """Bodies at a coordinator in a process of its own."""
    asyncio.run(prepared(path, database))
    off = {f"COORDINATOR_RATE_{kind}": "off" for kind in ("IP", "WORKER", "REGISTER")}
    if database:
        off["COORDINATOR_DATABASE"] = database
    with Process(path, "--port", "0", "--log-level", "error", **off) as server:
        tokens = {"worker": enrolled(server.port)}
        known = {"run": "tiny", "dataset": "sums", "task": "1", "version": "0"}
        url = f"http://127.0.0.1:{server.port}"
        asyncio.run(routes(url, tokens, known, TOGETHER, time.monotonic() + 60, seed))  # warm
        with flat(psutil.Process(server.child.pid)) as grown:
            found = asyncio.run(
                routes(url, tokens, known, count, time.monotonic() + seconds, seed + 1)
            )
            print(f"coordinator: {grown() / 2**20:+.0f} MB")
        server.stop()
        assert not any("Traceback" in line for line in server.errors), server.errors[-20:]
    return found


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """The application behind a parser: reads the body and says 200."""
    while (message := await receive()).get("more_body"):
        pass
    if message["type"] == "http.disconnect":
        return
    start = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]}
    await send(start)
    await send({"type": "http.response.body", "body": b""})


def serve(kind: Any) -> None:
    """Serve one parser behind the guard, and print the port."""
    settings = Settings(connections_per_ip=4096, headers_deadline_s=2.0)
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    print(listener.getsockname()[1], flush=True)
    config = uvicorn.Config(
        answer,
        http=protocol(Guard(settings), kind),
        lifespan="off",
        ws="none",
        log_config=None,
        h11_max_incomplete_event_size=HEADER_BYTES_MAX,
    )
    asyncio.run(uvicorn.Server(config).serve(sockets=[listener]))


def fuzz_parser(kind: str, count: int, seconds: float, seed: int) -> Counter[str]:
    """Raw streams at a parser in a process of its own."""
    words = [sys.executable, "-m", "tests.support.fuzz", "--serve", kind]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        try:
            assert child.stdout
            port = int(child.stdout.readline())
            time.sleep(0.5)
            asyncio.run(streams(port, 10 * TOGETHER, time.monotonic() + 30, seed))  # warm
            with flat(psutil.Process(child.pid)) as grown:
                found = asyncio.run(streams(port, count, time.monotonic() + seconds, seed + 1))
                print(f"{kind}: {grown() / 2**20:+.0f} MB")
        finally:
            child.kill()
    return found


def table(found: dict[str, Counter[Any]]) -> str:
    """Rows of what was sent and how it was answered."""
    rows = ["| where | sent | answers |", "|---|---|---|"]
    for where, counts in found.items():
        told = ", ".join(f"{status}: {many}" for status, many in sorted(counts.items()))
        rows.append(f"| {where} | {sum(counts.values())} | {told} |")
    return "\n".join(rows)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--minutes", type=float, default=10.0)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--only", choices=("routes", "streams"), help="half of it")
    options.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    options.add_argument("--serve", default="")
    asked = options.parse_args()
    if asked.serve:
        serve(asked.serve)
        return
    third = asked.minutes * 60 / 3
    found: dict[str, Counter[Any]] = {}
    if asked.only != "streams":
        with database_of(asked.database) as url, tempfile.TemporaryDirectory() as folder:
            found |= fuzz_routes(Path(folder), BODIES, third, asked.seed, url)
    for kind in ("httptools", "h11") if asked.only != "routes" else ():
        found[f"raw streams, {kind}"] = fuzz_parser(kind, STREAMS, third, asked.seed)
    print(table(found))


if __name__ == "__main__":
    main()
