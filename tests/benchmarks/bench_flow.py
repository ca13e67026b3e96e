"""Small tasks through several replicas, on PostgreSQL with synced commits.

    python -m tests.benchmarks.bench_flow --json flow.json
    python -m tests.benchmarks.bench_flow --workers 600 --clients 6 --rate 300 --idle 10000
    python -m tests.benchmarks.bench_flow --database postgresql://me@host/empty --replicas 4

Every worker claims, begins, uploads and submits made-up numbers for a model of a thousand
parameters, as fast as it is served, or all together `--rate` submissions a
second. It lets one task in ten go, and one update in twenty is broken, which the coordinator must
reject. Beside them `--idle` volunteers wait for another run and send heartbeats, as in bench_fleet,
straight to the replicas. Requests
go in turn to the replicas, by haproxy where it is installed. Volunteers (in `--clients` processes),
balancer, database and replicas share this machine: CPU milliseconds a task say what each needs.
PostgreSQL is started here unless `--database` names an empty database; its programs are found in
PATH. A pass of `--documents 40` has 385 tasks: more workers than that wait for its end together.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import random
import shutil
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import asyncpg
import httpx
import psutil
import structlog
from typing_extensions import override

from coordinator.config import Settings
from coordinator.database import runs
from coordinator.database.engine.open_database import migrate
from coordinator.runs.definition import definition
from coordinator.services import opened
from shared.protocol.contributions import UploadInfo, Verdict
from shared.protocol.leases import Lease
from shared.protocol.limits import API
from shared.tensors.spec import Schema
from shared.workloads.data.documents import Document
from shared.workloads.data.text_dataset import build_text
from tests.benchmarks.bench_fleet import BEAT_S, Waiting, join, run_on_uvloop
from tests.support.balancer import balanced
from tests.support.databases import deadlocks, prepare_postgres, start_postgres
from tests.support.load_clients import Diary, Held, Numbers, losses
from tests.support.local_coordinator import RUN, local_coordinator
from tests.support.server_process import Process, command

T = TypeVar("T")

WARM_S = 5.0
WAIT_S = 10.0  # longest wait for a task
BEATING = 50  # connections of one process for heartbeats
KEPT = 0.9  # share of the claimed tasks that is submitted
GOAL = "p95 of a submission <= 500 ms, nothing refused, nothing lost, check clean"
FLOW = RUN.replace('preset = "fedavg"', 'preset = "diloco"\noverlap = true\nmax_staleness = 1000')
UNLIMITED = {f"COORDINATOR_RATE_{who}": "off" for who in ("IP", "WORKER", "REGISTER")}
STEPS = ("claim", "begin", "upload", "piece", "submit")


# --- volunteers: the work of a process of its own ---


@dataclass(frozen=True)
class Person:
    """Volunteer of a process that has ended."""

    name: str
    volunteer_id: str


@dataclass(kw_only=True)
class Told:
    """What a process with volunteers has seen."""

    people: list[Person] = field(default_factory=list)
    times: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # by step
    done: int = 0  # verdicts while it was measured
    verdicts: list[tuple[Person, Verdict]] = field(default_factory=list)
    leases: list[Held] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    beats: list[float] = field(default_factory=list)  # what heartbeats of waiting ones took


class Turns:
    """Turns of the workers of one process, `rate` a second; no rate is no wait."""

    def __init__(self, rate: float) -> None:
        self._gap_s = 1.0 / rate if rate else 0.0
        self._next = 0.0

    async def turn(self) -> None:
        loop = asyncio.get_running_loop()
        at = max(self._next, loop.time() - 1.0)  # late turns of a second are made up for
        self._next = at + self._gap_s
        await asyncio.sleep(max(0.0, at - loop.time()) if self._gap_s else 0.0)


class Alternating(httpx.AsyncHTTPTransport):
    """Connections to all replicas, taken in turn."""

    def __init__(self, urls: list[str]) -> None:
        super().__init__(verify=False)
        self._ports = itertools.cycle(httpx.URL(url).port for url in random.sample(urls, len(urls)))

    @override
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        request.url = request.url.copy_with(port=next(self._ports))
        return await super().handle_async_request(request)


class TimedNumbers(Numbers):
    """Worker that notes how long each step took, in seconds."""

    def begin(self, urls: list[str], told: Told, turns: Turns) -> None:
        self.told, self.turns, self.wait_s, self.pieces = told, turns, WAIT_S, 1
        self.http = httpx.AsyncClient(
            base_url=urls[0] + API,
            headers=self.http.headers,
            timeout=self.http.timeout,
            transport=Alternating(urls),
        )

    @override
    async def post(self, path: str, kind: type[T], body: Any, *, done: int = 0) -> T | None:
        began = time.perf_counter()
        reply = await super().post(path, kind, body, done=done)
        step = {"claims": "claim", "uploads": "upload"}.get(word := path.rpartition("/")[2], word)
        self.told.times[step].append(time.perf_counter() - began)
        return reply

    @override
    async def _put(self, info: UploadInfo, data: bytes, body: Any) -> UploadInfo | None:
        began = time.perf_counter()
        found = await super()._put(info, data, body)
        self.told.times["piece"].append(time.perf_counter() - began)
        return found

    @override
    async def _claim(self) -> Lease | None:
        await self.turns.turn()
        return await super()._claim()


@dataclass(frozen=True, kw_only=True)
class Crowd:
    """Volunteers of one process."""

    number: int
    urls: list[str]
    schema: Schema
    folder: Path
    workers: int
    rate: float
    seconds: float
    ports: list[int]
    idle: list[str]  # tokens of volunteers that wait for another run

    async def flow(self, started: Any) -> Told:
        """Join, wait until every process has, and work; return what was seen."""
        diary, told, turns = Diary(), Told(), Turns(self.rate)
        crowd = [
            TimedNumbers(self.urls[0], f"Nr {self.number}-{n}", self.schema, diary, self.folder)
            for n in range(self.workers)
        ]
        for who in crowd:
            who.begin(self.urls, told, turns)
        await asyncio.gather(*(who.join() for who in crowd))
        waiting = Waiting(self.ports, self.idle, min(len(self.idle), BEATING))
        with waiting.begun():
            if self.idle:
                await asyncio.sleep(BEAT_S)  # everybody is there
            await asyncio.to_thread(started.wait)
            async with asyncio.TaskGroup() as group:
                for who in crowd:
                    group.create_task(who.work())
                await asyncio.sleep(WARM_S)
                told.times.clear()
                waiting.beats.clear()
                judged = len(diary.verdicts)
                await asyncio.sleep(self.seconds)
                told.done = len(diary.verdicts) - judged
                times, told.times = dict(told.times), defaultdict(list)
                told.beats = [*waiting.beats]
                for who in crowd:
                    who.stopping = True
        for who in crowd:
            await who.http.aclose()
        told.times, told.leases = times, diary.leases
        told.refusals = diary.refusals + [f"idle: {each}" for each in waiting.refused]
        people = {who.volunteer_id: Person(who.name, who.volunteer_id) for who in crowd}
        told.people = [*people.values()]
        told.verdicts = [(people[who.volunteer_id], verdict) for who, verdict in diary.verdicts]
        return told


def _flow(crowd: Crowd, started: Any, results: Any) -> None:
    try:
        results.put(run_on_uvloop(crowd.flow(started)))
    except BaseException as error:
        started.abort()
        results.put(repr(error))
        raise


# --- the servers ---


class CpuTime:
    """CPU seconds of processes and their children since the last look, by kind."""

    def __init__(self, **pids: list[int]) -> None:
        self._roots = {
            name: [psutil.Process(pid) for pid in some] for name, some in pids.items() if some
        }
        self._then = self._now()

    def _now(self) -> Counter[str]:
        found = Counter[str]()
        for name, roots in self._roots.items():
            for root in roots:
                own = root.cpu_times()
                found[name] += own.user + own.system
                below = "merging" if name == "replicas" else name
                # of children that are no more, and of living ones
                found[below] += own.children_user + own.children_system
                for each in root.children(recursive=True):
                    times = each.cpu_times()
                    found[below] += times.user + times.system
        return found

    def spent(self) -> Counter[str]:
        now = self._now()
        return Counter({name: now[name] - self._then[name] for name in now})


@contextmanager
def replicas(folder: Path, count: int, where: dict[str, str]) -> Iterator[list[Process]]:
    """Serve one database and one folder of blobs by several processes with one key."""
    with ExitStack() as stack:
        found = []
        for number in range(count):
            home = folder / f"r{number}"
            home.mkdir(exist_ok=True)
            if number:
                shutil.copy(folder / "r0" / "signing.key", home)
            options = [f"--{name}={value}" for name, value in where.items()]
            found.append(Process(home, "--port=0", *options, **UNLIMITED))
        for each in found:
            stack.enter_context(each)
        yield found


@asynccontextmanager
async def before(served: list[Process]) -> AsyncIterator[list[str]]:
    """Yield the addresses that volunteers use in turn: the balancer's, or those of the replicas."""
    if shutil.which("haproxy") is None:
        yield [each.url for each in served]
        return
    async with balanced(*(each.port for each in served)) as url:
        yield [url]


async def postmaster(database: str) -> list[int]:
    """Return the process of a database's server, if it is of this machine."""
    conn = await asyncpg.connect(database.replace("+asyncpg", ""))
    try:
        backend = psutil.Process(await conn.fetchval("SELECT pg_backend_pid()"))
        return [backend.ppid()] if backend.name().startswith("postgres") else []
    except psutil.NoSuchProcess:
        return []
    finally:
        await conn.close()


def work(crowds: list[Crowd], pids: dict[str, list[int]]) -> tuple[list[Told], Counter[str], float]:
    """Let the crowds work; return what they have seen, and CPU and wall seconds meanwhile."""
    spawn = multiprocessing.get_context("spawn")
    started, results = spawn.Barrier(len(crowds) + 1), spawn.Queue()
    clients = [spawn.Process(target=_flow, args=(crowd, started, results)) for crowd in crowds]
    for client in clients:
        client.start()
    try:
        started.wait()
        time.sleep(WARM_S)
        cpu = CpuTime(**pids, clients=[client.pid for client in clients if client.pid])
        began = time.perf_counter()
        time.sleep(crowds[0].seconds)
        spent, took = cpu.spent(), time.perf_counter() - began
        told = [results.get() for _ in clients]
    finally:
        for client in clients:
            client.join(30)
            client.kill()
    assert all(isinstance(each, Told) for each in told), told
    return told, spent, took


def row_of(
    options: argparse.Namespace, told: list[Told], spent: Counter[str], took: float
) -> dict[str, Any]:
    done = sum(each.done for each in told)
    row: dict[str, Any] = {
        "workers": options.workers,
        "replicas": options.replicas,
        "tasks_per_s": round(done / took, 1),
    }
    for step in STEPS:
        times = sorted(itertools.chain.from_iterable(each.times.get(step, ()) for each in told))
        row[f"{step}_p50_ms"] = round(1e3 * statistics.median(times), 1)
        row[f"{step}_p95_ms"] = round(1e3 * times[int(0.95 * len(times))], 1)
    if beats := sorted(itertools.chain.from_iterable(each.beats for each in told)):
        row |= {"idle": options.idle, "beats_per_s": round(len(beats) / took, 1)}
        row["beat_p95_ms"] = round(1e3 * beats[int(0.95 * len(beats))], 1)
    row |= {f"{name}_ms_a_task": round(1e3 * each / done, 2) for name, each in spent.items()}
    row |= {f"{name}_cores": round(each / took, 2) for name, each in spent.items()}
    refused = Counter(refusal.partition(": ")[2][:40] for each in told for refusal in each.refusals)
    return row | {"refused": dict(refused)}


async def measure(options: argparse.Namespace, folder: Path, database: str) -> dict[str, Any]:
    where: dict[str, Any] = {"database": database, "blobs": str(folder / "blobs")}
    quorum = max(64, round(2 * options.rate))  # a merge each two seconds
    async with local_coordinator(folder / "r0", **where) as home:
        documents = [
            Document(str(n), f"{n} plus {n} is {n + n};\n" * 40) for n in range(options.documents)
        ]
        data = partial(build_text, "sums", documents, vocab_size=300, chunk_tokens=2048)
        await home.start_run(FLOW.replace("quorum = 2", f"quorum = {quorum}"), data)
        run = await home.coordinator.db.read(lambda conn: runs.by_name(conn, "tiny"))
        schema = definition(run).schema
    settings = Settings(**where, data_dir=str(folder / "r0"), rate_register="off")
    tokens = await join(settings, options.idle)
    with replicas(folder, options.replicas, where) as served:
        pids = {
            "replicas": [each.child.pid for each in served],
            "postgresql": await postmaster(database),
        }
        async with before(served) as urls:
            crowds = [
                Crowd(
                    number=number,
                    urls=urls,
                    schema=schema,
                    folder=folder,
                    workers=max(1, options.workers // options.clients),
                    rate=options.rate / options.clients / KEPT,
                    seconds=options.seconds,
                    ports=[each.port for each in served],
                    idle=tokens[number :: options.clients],
                )
                for number in range(options.clients)
            ]
            told, spent, took = await asyncio.to_thread(work, crowds, pids)
            for each in served:
                each.stop()
    row = row_of(options, told, spent, took)
    diary = Diary(
        verdicts=[one for each in told for one in each.verdicts],
        leases=[one for each in told for one in each.leases],
        refusals=[one for each in told for one in each.refusals],
    )
    async with opened(settings) as coordinator:
        wrong = await losses(coordinator, diary, [one for each in told for one in each.people])
    named = [f"--{name}={value}" for name, value in where.items()]
    checked = await asyncio.to_thread(command, "check", f"--data-dir={folder / 'r0'}", *named)
    if checked.returncode:
        wrong += [checked.stdout[-2000:] + checked.stderr[-2000:]]
    row |= {"deadlocks": await deadlocks(database), "wrong": wrong[:20]}
    row |= {"check": checked.returncode, "goal": GOAL}
    good = not wrong and not checked.returncode and row["submit_p95_ms"] <= 500
    return row | {"reached": good and not row["refused"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--clients", type=int, default=1, help="processes of volunteers")
    parser.add_argument("--rate", type=float, default=0.0, help="submissions a second; 0: all")
    parser.add_argument("--idle", type=int, default=0, help="volunteers that wait")
    parser.add_argument("--documents", type=int, default=1500, help="size of a pass")
    parser.add_argument("--database", default="", help="an empty one; else one is started here")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    server = None if options.database else start_postgres("max_connections=300")
    try:
        if server is None:
            database = options.database
            asyncio.run(migrate(database))
        else:
            asyncio.run(prepare_postgres(server))
            database = asyncio.run(server.fresh())
        with tempfile.TemporaryDirectory() as name:
            row = asyncio.run(measure(options, Path(name), database))
    finally:
        if server is not None:
            server.stop()
    print("\n".join(f"{name:22} {value}" for name, value in row.items()))
    if options.json:
        options.json.write_text(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
