"""Fuzzing of a running coordinator: bodies of every route, and raw bytes at both parsers.

    make fuzz MINUTES=10        the minutes are shared between the routes and the parsers
    make fuzz MINUTES=300 FUZZ_ARGS='--only routes --database postgresql'
    make fuzz MINUTES=60 FUZZ_ARGS='--only routes --route /claims --seed 7'

Nothing may be answered with 500, hang, or make the server's memory grow by 64 MB. 503 and 507 are
answers that a coordinator gives on purpose and are counted apart. What was sent is drawn from the
seed, the route and a number, so that a fault can be sent again alone; it is printed as it happens,
with its body, and the whole body is kept below `build/fuzz`. An answer that takes longer than ten
seconds is asked for again with a minute's patience: no answer then is a hang, one that comes is
counted as slow and told with what the server and this program did meanwhile.
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
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import msgspec
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
PATIENCE_S = 60.0  # for the second try of what was not answered
PROGRESS_S = 15.0
FAULTS_MAX = 20  # after which a run ends
SHOWN = 1500  # characters of a body
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


# Values that a coordinator takes, by the names of their fields: what lies behind the first check of
# a body is reached by bodies that pass it.
FITTING: dict[str, Callable[[random.Random], Any]] = {
    name: lambda rng: f"{rng.getrandbits(128):032x}"
    for name in ("claim_id", "volunteer_id", "worker_id", "secret")
} | {
    "sha256": lambda rng: f"{rng.getrandbits(256):064x}",
    "nickname": lambda rng: f"Ann {rng.getrandbits(24):x}",
    "codec": lambda rng: "float32",
    "codecs": lambda rng: ["float32"],
    "device": lambda rng: "cpu",
    "workload_versions": lambda rng: {},
    "workloads": lambda rng: ["gpt"],
    "runs": lambda rng: [],
    "kinds": lambda rng: [],
    "run": lambda rng: "tiny",
    "task": lambda rng: rng.randrange(1, 9),
    "attempt": lambda rng: 1,
    "part": lambda rng: 0,
    "tries": lambda rng: 0,
    "base_version": lambda rng: 0,
    "size": lambda rng: rng.choice((1, 1000, 40_000)),
    "name": lambda rng: f"team {rng.getrandbits(24):x}",
    "prompt": lambda rng: "1 plus 1",
    "max_tokens": lambda rng: 4,
}


def fitted(value: Any, rng: random.Random) -> Any:
    """The value with fields that fit, most of them."""
    if not isinstance(value, dict):
        return value
    return {
        name: FITTING[name](rng) if name in FITTING and rng.random() < 0.9 else old
        for name, old in value.items()
    }


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


@cache
def example(kind: Any, name: str) -> Any:
    """A value of a type whose leaves are extreme."""
    return extreme(kind, EXTREMES[name])


def body(endpoint: Endpoint[Any], rng: random.Random) -> bytes:
    """A body for a route: of its own type and then changed, or no JSON at all."""
    if endpoint.request is None or rng.random() < 0.1:
        return rng.randbytes(rng.choice((0, 1, 10, 1000)))
    value = example(endpoint.request, rng.choice([*EXTREMES]))
    if rng.random() < 0.5:
        value = fitted(value, rng)
    for _ in range(rng.randrange(4)):
        value = mutated(value, rng)
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode("utf-8", "replace")
    if rng.random() < 0.05:
        at = rng.randrange(len(text))
        text = text[:at] + rng.randbytes(3) + text[at + 1 :]
    return at_once(endpoint.request, text)


def at_once(kind: Any, text: bytes) -> bytes:
    """The body, but for one that asks for a long poll, which is no hang: that asks for none.

    A claim without `wait_s` waits for half a minute.
    """
    if "wait_s" not in getattr(kind, "__struct_fields__", ()):
        return text
    try:
        asked = msgspec.json.decode(text, type=kind, strict=False)
    except (msgspec.DecodeError, ValueError):
        return text
    return msgspec.json.encode(msgspec.structs.replace(asked, wait_s=0.0))


def address(endpoint: Endpoint[Any], rng: random.Random, known: dict[str, str]) -> str:
    """A path of a route, with the query, whose parts may be anything."""
    path = endpoint.full_path
    for name in endpoint.parameters:
        odd = rng.choice(ODD)
        path = path.replace(f"{{{name}}}", known.get(name, odd) if rng.random() < 0.5 else odd)
    asked = [f"{query.name}={rng.choice([*ODD, ''])}" for query in endpoint.query]
    return path + ("?" + "&".join(asked) if asked and rng.random() < 0.7 else "")


@dataclass(frozen=True, kw_only=True)
class Sent:
    """One request: enough to send it again."""

    route: str
    number: int
    method: str
    where: str
    headers: dict[str, str]
    body: bytes

    def __str__(self) -> str:
        shown = repr(self.body)
        more = f"... {len(self.body)} bytes" if len(shown) > SHOWN else ""
        return (
            f"{self.route}, number {self.number}: {self.method} {self.where}\n"
            f"  headers {self.headers}\n  body {shown[:SHOWN]}{more}"
        )


@dataclass(eq=False)
class Watch:
    """What a run has seen: faults as they happen, progress, and how late this program itself is."""

    what: str
    total: int
    process: psutil.Process
    folder: Path | None = None
    faults: list[str] = field(default_factory=list)
    done: int = 0
    slow: int = 0
    late_s: float = 0.0  # of this program's event loop, since it was last told

    def fault(self, why: str, sent: Any, whole: bytes) -> None:
        """Tell of a fault, with what was sent."""
        said = f"FAULT {why}\n{sent}"
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"fault-{int(time.time())}-{len(self.faults)}.body"
            path.write_bytes(whole)
            said += f"\n  whole body: {path}"
        self.faults.append(said)
        print(said, flush=True)

    @property
    def ended(self) -> bool:
        return len(self.faults) >= FAULTS_MAX

    def check(self) -> None:
        assert not self.faults, "\n".join(self.faults)

    async def told(self) -> None:
        """Print progress until cancelled."""
        began = last = time.monotonic()
        first = self.process.memory_info().rss
        while True:
            asked = time.monotonic()
            await asyncio.sleep(0.1)
            now = time.monotonic()
            self.late_s = max(self.late_s, now - asked - 0.1)
            if now - last < PROGRESS_S:
                continue
            last = now
            grown = (self.process.memory_info().rss - first) / 2**20
            rate = self.done / (now - began)
            left = (self.total - self.done) / max(1e-9, rate)
            print(
                f"{self.what}: {self.done:,} of {self.total:,}, {rate:,.0f}/s, "
                f"{left / 60:.0f} min left, {len(self.faults)} faults, {self.slow} slow, "
                f"server {grown:+.0f} MB, this program up to {self.late_s:.1f} s late",
                flush=True,
            )
            self.late_s = 0.0


@contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """Progress is told inside the block."""
    telling = asyncio.get_running_loop().create_task(watch.told())
    try:
        yield
    finally:
        telling.cancel()


def asked_of(
    endpoint: Endpoint[Any], number: int, seed: int, tokens: dict[str, str], known: dict[str, str]
) -> Sent:
    """The request of a number to a route."""
    route = f"{endpoint.method} {endpoint.path}"
    rng = random.Random(f"{seed} {route} {number}")
    auth = "worker" if endpoint.auth == "key" else endpoint.auth  # a machine may ask too
    token = "" if endpoint is endpoints.LEAVE else tokens.get(auth, "")
    headers = {"Authorization": f"Bearer {token or 'a.b'}"}
    headers |= {name: rng.choice(HEADERS) for name in endpoint.headers}
    where, text = address(endpoint, rng, known), body(endpoint, rng)
    if rng.random() < 0.7:
        text = text.replace(b'"model": ""', b'"model": "%b"' % known.get("run", "").encode())
    return Sent(
        route=route,
        number=number,
        method=endpoint.method,
        where=where,
        headers=headers,
        body=text,
    )


async def answer_to(client: httpx.AsyncClient, sent: Sent, watch: Watch) -> int:
    """Send a request, and again where it was not answered in time; its status."""
    for patience in (ANSWER_S, PATIENCE_S):
        began, used = time.monotonic(), watch.process.cpu_times()
        try:
            reply = await client.request(
                sent.method,
                sent.where,
                content=sent.body,
                headers=sent.headers,
                timeout=patience,
            )
        except httpx.InvalidURL:
            return 0
        except httpx.RemoteProtocolError:
            return 1  # the connection was closed ahead of the answer
        except httpx.TimeoutException as error:
            now = watch.process.cpu_times()
            spent = now.user + now.system - used.user - used.system
            told = (
                f"{type(error).__name__} after {time.monotonic() - began:.1f} s, in which the "
                f"server used {spent:.1f} s of CPU and this program was up to "
                f"{watch.late_s:.1f} s late"
            )
            if patience == PATIENCE_S:
                watch.fault(f"a hang: {told}", sent, sent.body)
                return 2
            watch.slow += 1
            print(f"slow: {told}\n{sent}", flush=True)
        except httpx.TransportError as error:
            watch.fault(f"{type(error).__name__}: {error}", sent, sent.body)
            return 2
        else:
            if reply.status_code >= 500 and reply.status_code not in PURPOSE:
                watch.fault(f"answered {reply.status_code}: {reply.text[:300]}", sent, sent.body)
            return reply.status_code
    raise AssertionError  # the last of the two returns


def fuzzed(only: str = "") -> list[Endpoint[Any]]:
    """Every route that somebody else than the organiser may call."""
    every = (one for one in (*ENDPOINTS, *V1) if one.auth != "admin")
    return [one for one in every if only in f"{one.method} {one.path}"]


async def routes(
    url: str,
    tokens: dict[str, str],
    known: dict[str, str],
    plan: Plan,
    watch: Watch,
) -> dict[str, Counter[int]]:
    """Send so many bodies to each route, or as many as time allows."""
    found: dict[str, Counter[int]] = {}
    limits = httpx.Limits(max_connections=TOGETHER)
    wanted = fuzzed(plan.route)
    async with httpx.AsyncClient(base_url=url, limits=limits) as client:
        with watched(watch):
            for first in range(0, plan.count, TOGETHER):
                for endpoint in wanted:
                    numbers = range(first, min(first + TOGETHER, plan.count))
                    sent = [asked_of(endpoint, n, plan.seed, tokens, known) for n in numbers]
                    statuses = await asyncio.gather(
                        *(answer_to(client, one, watch) for one in sent)
                    )
                    watch.done += len(sent)
                    where = f"{endpoint.method} {endpoint.path}"
                    found.setdefault(where, Counter()).update(statuses)
                if time.monotonic() > plan.until or watch.ended:
                    break
    return found


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is sent."""

    count: int
    seconds: float
    seed: int
    route: str = ""  # only routes with this in their name
    folder: Path | None = None  # for the bodies of faults
    until: float = float("inf")

    def begun(self, count: int | None = None, seconds: float | None = None, seed: int = 0) -> Plan:
        """The plan from now on."""
        lasts = self.seconds if seconds is None else seconds
        return replace(
            self,
            count=self.count if count is None else count,
            seed=self.seed + seed,
            until=time.monotonic() + lasts,
        )


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


async def streams(port: int, plan: Plan, watch: Watch) -> Counter[str]:
    """Open so many connections, one stream each."""
    found: Counter[str] = Counter()

    async def once(number: int) -> str:
        sent = stream(random.Random(f"{plan.seed} stream {number}"))
        writer: asyncio.StreamWriter | None = None
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for piece in sent:
                writer.write(piece)
                await asyncio.wait_for(writer.drain(), ANSWER_S)
            writer.write_eof()
            said = await asyncio.wait_for(reader.read(65536), ANSWER_S)
        except TimeoutError:
            watch.fault(f"number {number}: no answer in {ANSWER_S:.0f} s", sent, b"".join(sent))
            return "hang"
        except OSError:
            return "reset"
        finally:
            if writer is not None:
                writer.close()
        status = said[9:12].decode("latin-1") if said.startswith(b"HTTP/1.1 ") else "closed"
        if status.startswith("500"):
            watch.fault(f"number {number}: {said!r}", sent, b"".join(sent))
        return status

    with watched(watch):
        for first in range(0, plan.count, TOGETHER):
            numbers = range(first, min(first + TOGETHER, plan.count))
            found.update(await asyncio.gather(*map(once, numbers)))
            watch.done += len(numbers)
            if time.monotonic() > plan.until or watch.ended:
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


def fuzz_routes(path: Path, plan: Plan, database: str = "") -> dict[str, Counter[int]]:
    """Bodies at a coordinator in a process of its own. Raises AssertionError for a fault."""
    asyncio.run(prepared(path, database))
    off = {f"COORDINATOR_RATE_{kind}": "off" for kind in ("IP", "WORKER", "REGISTER")}
    if database:
        off["COORDINATOR_DATABASE"] = database
    with Process(path, "--port", "0", "--log-level", "error", **off) as server:
        tokens = {"worker": enrolled(server.port)}
        known = {"run": "tiny", "dataset": "sums", "task": "1", "version": "0"}
        url = f"http://127.0.0.1:{server.port}"
        process = psutil.Process(server.child.pid)
        many = len(fuzzed(plan.route))
        warm = Watch("warm-up", TOGETHER * many, process, plan.folder)
        asyncio.run(routes(url, tokens, known, plan.begun(TOGETHER, 60), warm))
        watch = Watch("routes", plan.count * many, process, plan.folder, warm.faults)
        with flat(process) as grown:
            found = asyncio.run(routes(url, tokens, known, plan.begun(seed=1), watch))
            print(f"coordinator: {grown() / 2**20:+.0f} MB, {watch.slow} slow answers")
        server.stop()
        watch.check()
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


def fuzz_parser(kind: str, plan: Plan) -> Counter[str]:
    """Raw streams at a parser in a process of its own. Raises AssertionError for a fault."""
    words = [sys.executable, "-m", "tests.support.fuzz", "--serve", kind]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        try:
            assert child.stdout
            port = int(child.stdout.readline())
            time.sleep(0.5)
            process = psutil.Process(child.pid)
            warm = Watch("warm-up", 10 * TOGETHER, process, plan.folder)
            asyncio.run(streams(port, plan.begun(10 * TOGETHER, 30), warm))
            watch = Watch(kind, plan.count, process, plan.folder, warm.faults)
            with flat(process) as grown:
                found = asyncio.run(streams(port, plan.begun(seed=1), watch))
                print(f"{kind}: {grown() / 2**20:+.0f} MB")
            watch.check()
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
    options.add_argument("--route", default="", help="only routes with this in their name")
    options.add_argument("--parser", choices=("httptools", "h11"), help="only one of the parsers")
    options.add_argument("--bodies", type=int, default=BODIES, help="for each route")
    options.add_argument("--streams", type=int, default=STREAMS, help="for each parser")
    options.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    options.add_argument("--keep", type=Path, default=Path("build/fuzz"), help="bodies of faults")
    options.add_argument("--serve", default="", help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.serve:
        serve(asked.serve)
        return
    third = asked.minutes * 60 / 3
    found: dict[str, Counter[Any]] = {}
    plan = Plan(
        count=asked.bodies, seconds=third, seed=asked.seed, route=asked.route, folder=asked.keep
    )
    try:
        if asked.only != "streams":
            with database_of(asked.database) as url, tempfile.TemporaryDirectory() as folder:
                found |= fuzz_routes(Path(folder), plan, url)
        parsers = (asked.parser,) if asked.parser else ("httptools", "h11")
        for kind in parsers if asked.only != "routes" else ():
            many = replace(plan, count=asked.streams)
            found[f"raw streams, {kind}"] = fuzz_parser(kind, many)
    except AssertionError as fault:
        print(table(found))
        sys.exit(f"fuzz: {fault}")
    print(table(found))


if __name__ == "__main__":
    main()
