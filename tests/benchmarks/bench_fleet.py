"""Many volunteers on few machines: waiting ones on one process, and a merge in shards on a replica
with little memory.

    python -m tests.benchmarks.bench_fleet --json fleet.json
    python -m tests.benchmarks.bench_fleet --volunteers 10000 --shared 200 --seconds 120 --parameters 124

Every volunteer holds two connections, one for a heartbeat each half minute and one that waits half
a minute for a task; there is none. With `--shared` all heartbeats go over so many connections, as
from a balancer, which uses one again for another client. All claims begin together, so they expire together. The server
is `coordinator serve`'s, with one process, SQLite and limits out of reach.

The merge is done by a process of its own whose data may grow by 200 MB and no more (RLIMIT_DATA);
one fails that takes more. Weights and contributions are float32 and lie in an S3 store of this
process with `--store`, else in files.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import resource
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil

from coordinator.config import Constants, Settings
from coordinator.services import opened
from shared.programs import gc_freeze
from shared.protocol.accounts import RegisterRequest
from shared.protocol.limits import API
from tests.benchmarks.wire import MIB, Memory, until_idle
from tests.support.local_coordinator import RUN, local_coordinator

BEAT_S = 30.0
FAR = 10_000_000
TOGETHER = 100  # registrations
LIMIT_MB = 200
MERGE = (
    RUN.replace('preset = "fedavg"', 'preset = "diloco"\nshards = {shards}')
    .replace("n_layer = 1", "n_layer = {layers}")
    .replace("n_head = 1", "n_head = 12")
    .replace("n_embd = 8", "n_embd = 768")
)
LAYER = 12 * 768 * 768  # parameters
# volunteers' addresses, of which each may hold 2,048 connections
HOMES = itertools.cycle([f"127.0.1.{number}" for number in range(1, 101)])


# --- volunteers that wait ---


async def join(settings: Settings, volunteers: int) -> list[str]:
    """Register volunteers; return their tokens."""
    async with opened(settings) as services:

        async def joined(number: int) -> str:
            name, secret = secrets.token_hex(16), secrets.token_hex(32)
            request = RegisterRequest(
                volunteer_id=name,
                worker_id=name,
                secret=secret,
                nickname=f"idle-{number}",
                workloads=("gpt",),
            )
            await services.volunteers.register(request)
            return f"{name}.{secret}"

        tokens = []
        for first in range(0, volunteers, TOGETHER):
            some = range(first, min(volunteers, first + TOGETHER))
            tokens += await asyncio.gather(*(joined(number) for number in some))
    return tokens


class Line:
    """One connection of a volunteer, or of a balancer in front of many."""

    def __init__(self, port: int, path: str, body: dict[str, Any]) -> None:
        self._port, self._path, self._body = port, path, body
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, token: str) -> None:
        """Send the request once. Raises AssertionError unless it is answered with 200."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(
                "127.0.0.1", self._port, local_addr=(next(HOMES), 0)
            )
        reader, writer = self._streams
        body = json.dumps(self._body | {"claim_id": secrets.token_hex(16)}).encode()
        writer.write(
            f"POST {API}{self._path} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            f"Authorization: Bearer {token}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        said = await reader.readexactly(size)
        assert head.startswith(b"HTTP/1.1 200"), (head, said)


class Waiting:
    """Volunteers that wait for a task: what their heartbeats took, the queue for a line included,
    and what was refused.
    """

    def __init__(self, ports: list[int], tokens: list[str], shared: int) -> None:
        self.beats: list[float] = []
        self.refused: list[str] = []
        self._tokens, self._own = tokens, not shared
        self._lines: asyncio.Queue[Line] = asyncio.LifoQueue()
        for number in range(shared or len(tokens)):
            body: dict[str, Any] = {"tasks": [], "news_since": 0}
            self._lines.put_nowait(Line(ports[number % len(ports)], "/workers/heartbeat", body))
        body = {"step_flops": 1e9, "wait_s": BEAT_S, "runs": ["another"]}
        self._claims = [
            Line(ports[number % len(ports)], "/claims", body) for number in range(len(tokens))
        ]

    async def heartbeats(self, token: str, first: float) -> None:
        own = await self._lines.get() if self._own else None
        await asyncio.sleep(first)
        while True:
            began = time.perf_counter()
            line = own or await self._lines.get()
            try:
                await line.ask(token)
                self.beats.append(time.perf_counter() - began)
            except (AssertionError, OSError, EOFError) as error:
                self.refused.append(str(error)[:200])
            finally:
                if own is None:
                    self._lines.put_nowait(line)
            await asyncio.sleep(BEAT_S - (time.perf_counter() - began))

    async def claims(self, token: str, line: Line) -> None:
        while True:
            try:
                await line.ask(token)
            except (AssertionError, OSError, EOFError) as error:
                self.refused.append(str(error)[:200])
                await asyncio.sleep(1.0)

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Wait inside the block."""
        each = BEAT_S / max(1, len(self._tokens))
        jobs = [
            asyncio.create_task(self.heartbeats(token, number * each))
            for number, token in enumerate(self._tokens)
        ]
        for token, line in zip(self._tokens, self._claims, strict=True):
            jobs.append(asyncio.create_task(self.claims(token, line)))
        try:
            yield
        finally:
            for job in jobs:
                job.cancel()


async def wait(
    port: int, pid: int, tokens: list[str], seconds: float, shared: int
) -> dict[str, Any]:
    """Wait as many volunteers do; return what heartbeats took."""
    waiting = Waiting([port], tokens, shared)
    beats, refused = waiting.beats, waiting.refused
    with waiting.begun():
        await asyncio.sleep(BEAT_S)  # everybody is there
        process = psutil.Process(pid)
        beats.clear()
        spent, began = process.cpu_times(), time.perf_counter()
        await asyncio.sleep(seconds)
        took, now = time.perf_counter() - began, process.cpu_times()
    cuts = statistics.quantiles(beats, n=100)
    return {
        "volunteers": len(tokens),
        "beats_per_s": round(len(beats) / took, 1),
        "p50_ms": round(1e3 * cuts[49], 1),
        "p95_ms": round(1e3 * cuts[94], 1),
        "p99_ms": round(1e3 * cuts[98], 1),
        "refused": len(refused),
        "first_refusal": refused[0] if refused else "",
        "cores": round((now.user + now.system - spent.user - spent.system) / took, 2),
        "memory_mb": round(process.memory_info().rss / MIB),
        "goal": "p95 <= 100 ms, <= 1 core, <= 600 MB",
        "reached": cuts[94] <= 0.1 and not refused,
    }


async def serve(folder: Path) -> None:
    """Run the coordinator; print its port."""
    import uvicorn

    from coordinator.http.app import opened as opened_app
    from coordinator.http.server import listen, uvicorn_config

    quiet()
    settings = Settings(
        data_dir=str(folder),
        rate_worker="off",
        rate_ip="off",
        constants=Constants(connections_per_address=FAR),
    )
    listener = listen("127.0.0.1", 0)
    async with opened_app(settings, exclusive=True) as coordinator:
        print(listener.getsockname()[1], flush=True)
        gc_freeze.tune_for_server()
        await uvicorn.Server(uvicorn_config(coordinator)).serve(sockets=[listener])


def idle(volunteers: int, seconds: float, shared: int) -> dict[str, Any]:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[
        1
    ]  # 20,000: 7,000 volunteers, or 14,000 behind a balancer
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory) / "data"
        settings = Settings(data_dir=str(folder), rate_register="off")
        tokens = asyncio.run(join(settings, volunteers))
        command = [sys.executable, "-m", "tests.benchmarks.bench_fleet", "--serve", str(folder)]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout
            port = int(server.stdout.readline())
            until_idle(server.pid)
            row: dict[str, Any] = run_on_uvloop(wait(port, server.pid, tokens, seconds, shared))
            return row
        finally:
            server.kill()
            server.communicate()


def run_on_uvloop(work: Any) -> Any:
    from coordinator.http.server import loop_factory

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(work)


# --- a merge in shards ---


async def hand_in(folder: Path, blobs: str, layers: int, shards: int, updates: int) -> None:
    """A running run with updates that wait for a merge."""
    async with local_coordinator(folder, blobs=blobs) as home:
        await home.start_run(
            MERGE.format(layers=layers, shards=shards).replace("quorum = 2", f"quorum = {updates}")
        )
        for number in range(updates):
            worker = await home.join(f"volunteer-{number}")
            assert (await worker.work(number)).state == "accepted"


async def merge_within(folder: Path, blobs: str) -> dict[str, Any]:
    """Merge what is due with little memory: the work of a process of its own."""
    settings = Settings(data_dir=str(folder), blobs=blobs, constants=Constants(merge_threads=1))
    async with opened(settings) as coordinator:
        await coordinator.runs.queries.listing()
        used = int(Path("/proc/self/status").read_text().partition("VmData:")[2].split()[0]) << 10
        resource.setrlimit(resource.RLIMIT_DATA, (used + (LIMIT_MB << 20),) * 2)
        began = time.perf_counter()
        with Memory(os.getpid()) as memory:
            made = await coordinator.merger.merge_if_due(1)
        return {
            "merged": made,
            "seconds": round(time.perf_counter() - began, 1),
            "limit_mb": LIMIT_MB,
            "anonymous_mb": round(memory.anonymous_mb),
            "reached": made,
        }


def quiet() -> None:
    from coordinator.log import configure

    configure("warning", as_json=False)


@contextmanager
def store() -> Iterator[str]:
    """An S3 store of this process, for this process and its children."""
    import urllib.request

    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    url = f"http://127.0.0.1:{server.get_host_and_port()[1]}"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        os.environ[name] = "bench"
    os.environ |= {"AWS_ENDPOINT_URL": url, "AWS_DEFAULT_REGION": "us-east-1"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/bench", method="PUT")):
        pass
    try:
        yield "s3://bench"
    finally:
        server.stop()


def sharded(million: float, shards: int, updates: int, elsewhere: bool) -> dict[str, Any]:
    layers = max(1, round(million * 1e6 / LAYER))
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        folder = Path(directory) / "data"
        blobs = stack.enter_context(store()) if elsewhere else ""
        quiet()
        asyncio.run(hand_in(folder, blobs, layers, shards, updates))
        for path in (folder / "cache").glob("*"):
            if elsewhere and path.is_file():
                path.unlink()  # the replica that merges has received nothing itself
        command = [sys.executable, "-m", "tests.benchmarks.bench_fleet", "--merge", str(folder)]
        child = subprocess.run([*command, "--blobs", blobs], stdout=subprocess.PIPE, check=True)
        row: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return {"parameters_m": round(layers * LAYER / 1e6), "shards": shards, "updates": updates} | row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--volunteers", type=int, default=500)
    parser.add_argument("--shared", type=int, default=0, help="connections of all heartbeats")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--parameters", type=float, default=14.0, help="million")
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--updates", type=int, default=2)
    parser.add_argument("--store", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--merge", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--blobs", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        run_on_uvloop(serve(options.serve))
        return
    if options.merge:
        print(json.dumps(asyncio.run(merge_within(options.merge, options.blobs))))
        return
    rows: dict[str, Any] = {}
    if options.volunteers:
        rows["waiting volunteers"] = idle(options.volunteers, options.seconds, options.shared)
    if options.parameters:
        rows["merge in shards"] = sharded(
            options.parameters, options.shards, options.updates, options.store
        )
    for subject, row in rows.items():
        print(f"\n{subject}\n" + "\n".join(f"  {name:18} {value}" for name, value in row.items()))
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(rows)))


if __name__ == "__main__":
    main()
