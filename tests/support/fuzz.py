"""Fuzzing of a running coordinator: bodies of every route, and raw bytes at both parsers.

    make fuzz MINUTES=10        the minutes are shared between the routes and the parsers
    make fuzz MINUTES=300 FUZZ_ARGS='--only routes --database postgresql'
    make fuzz MINUTES=60 FUZZ_ARGS='--only routes --route /claims --seed 7'

Nothing may be answered with 500, hang, or make the server's memory grow by 64 MB. 503 and 507 are
answers that a coordinator gives on purpose and are counted apart. What was sent is drawn from the
seed, the route and a number, so that a fault can be sent again alone; it is printed as it happens,
with its body, and the whole body is kept below `build/fuzz`. No answer in five minutes is a hang,
one that takes ten seconds is counted as slow; the clock stands still while this program does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
from typing_extensions import override

from shared.protocol import endpoints
from shared.protocol.endpoint import Endpoint
from shared.protocol.endpoints import ENDPOINTS, V1
from shared.protocol.limits import API
from tests.support.databases import prepare_postgres, start_postgres
from tests.support.fuzz_line import Line
from tests.support.fuzz_streams import fuzz_parser
from tests.support.fuzz_watch import PATIENCE_S, TOGETHER, Plan, Watch, flat, watched
from tests.support.local_coordinator import local_coordinator
from tests.support.lying_coordinator import EXTREMES, extreme
from tests.support.server_process import Process

BODIES, STREAMS = 10_000, 100_000
SHOWN = 1500  # characters of a body
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
    "name": lambda rng: f"name {rng.getrandbits(24):x}",
    "prompt": lambda rng: "1 plus 1",
    "max_tokens": lambda rng: 4,
}


def fitted(value: Any, rng: random.Random) -> Any:
    """Return the value with mostly fitting fields."""
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

    @override
    def __str__(self) -> str:
        shown = repr(self.body)
        more = f"... {len(self.body)} bytes" if len(shown) > SHOWN else ""
        return (
            f"{self.route}, number {self.number}: {self.method} {self.where}\n"
            f"  headers {self.headers}\n  body {shown[:SHOWN]}{more}"
        )


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


async def answer_to(line: Line, sent: Sent, watch: Watch) -> int:
    """Send a request; return the status of the answer, 1 where the connection was closed ahead of
    it.
    """
    try:
        async with watch.patience(sent):
            status, said = await line.ask(sent.method, sent.where, sent.headers, sent.body)
    except TimeoutError:
        watch.fault("a hang", sent, sent.body)
        await line.close()
        return 2
    except ConnectionResetError:
        return 1
    except OSError as error:
        watch.fault(f"{type(error).__name__}: {error}", sent, sent.body)
        return 2
    if status >= 500 and status not in PURPOSE:
        watch.fault(f"answered {status}: {said[:300]!r}", sent, sent.body)
    return status


def fuzzed(only: str = "") -> list[Endpoint[Any]]:
    """Every route that somebody else than the organiser may call."""
    every = (one for one in (*ENDPOINTS, *V1) if one.auth != "admin")
    return [one for one in every if only in f"{one.method} {one.path}"]


async def routes(
    port: int,
    tokens: dict[str, str],
    known: dict[str, str],
    plan: Plan,
    watch: Watch,
) -> dict[str, Counter[int]]:
    """Send so many bodies to each route, or as many as time allows."""
    found: dict[str, Counter[int]] = {}
    wanted = fuzzed(plan.route)
    lines = [Line(port) for _ in range(TOGETHER)]
    with watched(watch):
        for numbers in plan.batches():
            for endpoint in wanted:
                sent = [asked_of(endpoint, n, plan.seed, tokens, known) for n in numbers]
                asked = zip(lines, sent, strict=False)
                statuses = await asyncio.gather(
                    *(answer_to(line, one, watch) for line, one in asked)
                )
                watch.done += len(sent)
                where = f"{endpoint.method} {endpoint.path}"
                found.setdefault(where, Counter()).update(statuses)
            if time.monotonic() > plan.until or watch.ended:
                break
    for line in lines:
        await line.close()
    return found


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
    with httpx.Client(base_url=f"http://127.0.0.1:{port}{API}", timeout=PATIENCE_S) as client:
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
    server = Process(path, "--port", "0", "--log-level", "error", **off)
    server.start_s = PATIENCE_S
    with server:
        tokens = {"worker": enrolled(server.port)}
        known = {"run": "tiny", "dataset": "sums", "task": "1", "version": "0"}
        process = psutil.Process(server.child.pid)
        many = len(fuzzed(plan.route))
        warm = Watch("warm-up", TOGETHER * many, process, plan.folder)
        asyncio.run(routes(server.port, tokens, known, plan.begun(TOGETHER, 60), warm))
        watch = Watch("routes", plan.count * many, process, plan.folder, warm.faults)
        with flat(process) as grown:
            found = asyncio.run(routes(server.port, tokens, known, plan.begun(seed=1), watch))
            print(f"coordinator: {grown() / 2**20:+.0f} MB, {watch.slow} slow answers")
        server.stop()
        watch.check()
        assert not any("Traceback" in line for line in server.errors), server.errors[-20:]
    return found


def table(found: dict[str, Counter[Any]]) -> str:
    """Return a table of requests and their answers."""
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
    options.add_argument("--first", type=int, default=0, help="number to begin with")
    options.add_argument("--bodies", type=int, default=BODIES, help="for each route")
    options.add_argument("--streams", type=int, default=STREAMS, help="to the parser")
    options.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    options.add_argument("--keep", type=Path, default=Path("build/fuzz"), help="bodies of faults")
    asked = options.parse_args()
    third = asked.minutes * 60 / 3
    found: dict[str, Counter[Any]] = {}
    plan = Plan(
        count=asked.bodies,
        seconds=third,
        seed=asked.seed,
        route=asked.route,
        first=asked.first,
        folder=asked.keep,
    )
    try:
        if asked.only != "streams":
            with database_of(asked.database) as url, tempfile.TemporaryDirectory() as folder:
                found |= fuzz_routes(Path(folder), plan, url)
        if asked.only != "routes":
            found["raw streams"] = fuzz_parser(replace(plan, count=asked.streams))
    except AssertionError as fault:
        print(table(found))
        sys.exit(f"fuzz: {fault}")
    print(table(found))


if __name__ == "__main__":
    main()
