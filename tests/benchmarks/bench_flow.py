"""Small tasks through three replicas behind haproxy, on PostgreSQL with synced commits.

    python -m tests.benchmarks.bench_flow --json flow.json
    python -m tests.benchmarks.bench_flow --workers 64 --seconds 60

Every worker claims, begins, uploads in two pieces and submits made-up numbers for a model of a
thousand parameters, as fast as it is served. It lets one task in ten go, and one update in twenty
is broken, which the coordinator must reject. Volunteers, balancer, database and replicas share
this machine: CPU seconds a task say what a larger one would need.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import psutil
import structlog

from coordinator.config import Settings
from coordinator.database import runs
from coordinator.runs.definition import definition
from coordinator.services import opened
from tests.support.balancer import balanced
from tests.support.databases import prepare_postgres, start_postgres
from tests.support.load_clients import Diary, Numbers, losses
from tests.support.local_coordinator import RUN, local_coordinator
from tests.support.server_process import Process, command

T = TypeVar("T")

REPLICAS = 3
WARM_S = 5.0
GOAL = "p95 of a submission <= 500 ms, nothing refused, nothing lost, check clean"
FLOW = RUN.replace('preset = "fedavg"', 'preset = "diloco"\nmax_staleness = 1000').replace(
    "quorum = 2", "quorum = 64"
)
UNLIMITED = {f"COORDINATOR_RATE_{who}": "off" for who in ("IP", "WORKER", "REGISTER")}


class TimedNumbers(Numbers):
    """Worker that notes how long each submission took, in seconds."""

    submissions: list[float]

    async def post(self, path: str, kind: type[T], body: Any, *, done: int = 0) -> T | None:
        began = time.perf_counter()
        reply = await super().post(path, kind, body, done=done)
        if path.endswith("/submit"):
            self.submissions.append(time.perf_counter() - began)
        return reply


class CpuTime:
    """CPU seconds of processes and their children since the last look."""

    def __init__(self, **roots: int) -> None:
        self._roots = {name: psutil.Process(pid) for name, pid in roots.items()}
        self._then = self._now()

    def _now(self) -> dict[str, float]:
        found = {}
        for name, root in self._roots.items():
            times = [each.cpu_times() for each in (root, *root.children(recursive=True))]
            ended = root.cpu_times()  # of children that are no more
            found[name] = sum(t.user + t.system for t in times) + (
                ended.children_user + ended.children_system
            )
        return found

    def spent(self) -> dict[str, float]:
        then, self._then = self._then, self._now()
        return {name: round(now - then[name], 2) for name, now in self._then.items()}


@contextmanager
def replicas(folder: Path, where: dict[str, str]) -> Iterator[list[Process]]:
    """Serve one database and one folder of blobs by several processes with one key."""
    with ExitStack() as stack:
        found = []
        for number in range(REPLICAS):
            home = folder / f"r{number}"
            home.mkdir(exist_ok=True)
            if number:
                shutil.copy(folder / "r0" / "signing.key", home)
            options = [f"--{name}={value}" for name, value in where.items()]
            found.append(stack.enter_context(Process(home, "--port=0", *options, **UNLIMITED)))
        yield found


async def flow(
    url: str, pids: dict[str, int], schema: Any, options: argparse.Namespace, folder: Path
) -> tuple[dict[str, Any], Diary, list[TimedNumbers]]:
    """Let workers work; return the row, what they remember, and themselves."""
    diary, submissions = Diary(), list[float]()
    crowd = [
        TimedNumbers(url, f"Nr {number}", schema, diary, folder)
        for number in range(options.workers)
    ]
    for who in crowd:
        who.submissions = submissions
    await asyncio.gather(*(who.join() for who in crowd))
    async with asyncio.TaskGroup() as group:
        for who in crowd:
            group.create_task(who.work())
        await asyncio.sleep(WARM_S)
        cpu, judged = CpuTime(**pids), len(diary.verdicts)
        submissions.clear()
        began = time.perf_counter()
        await asyncio.sleep(options.seconds)
        took, done = time.perf_counter() - began, len(diary.verdicts) - judged
        spent, times = cpu.spent(), sorted(submissions)
        for who in crowd:
            who.stopping = True
    row: dict[str, Any] = {
        "workers": options.workers,
        "tasks_per_s": round(done / took, 1),
        "submit_p50_ms": round(1e3 * statistics.median(times), 1),
        "submit_p95_ms": round(1e3 * times[int(0.95 * len(times))], 1),
        **{f"{name}_ms_a_task": round(1e3 * each / done, 2) for name, each in spent.items()},
        "refused": len(diary.refusals),
    }
    return row, diary, crowd


async def measure(
    options: argparse.Namespace, folder: Path, database: str, postgres: int
) -> dict[str, Any]:
    where = {"database": database, "blobs": str(folder / "blobs")}
    async with local_coordinator(folder / "r0", **where) as home:
        await home.start_run(FLOW)
        run = await home.coordinator.db.read(lambda conn: runs.by_name(conn, "tiny"))
        schema = definition(run).schema
    with replicas(folder, where) as served:
        pids = {f"replica{number}": each.child.pid for number, each in enumerate(served)}
        pids["postgresql"] = postgres
        async with balanced(*(each.port for each in served)) as url:
            row, diary, crowd = await flow(url, pids, schema, options, folder)
            for each in served:
                each.stop()
    settings = Settings(data_dir=str(folder / "r0"), database=database, blobs=where["blobs"])
    async with opened(settings) as coordinator:
        wrong = await losses(coordinator, diary, crowd)
    for who in crowd:
        await who.http.aclose()
    named = [f"--{name}={value}" for name, value in where.items()]
    checked = command("check", f"--data-dir={folder / 'r0'}", *named)
    if checked.returncode:
        wrong += [checked.stdout[-2000:] + checked.stderr[-2000:]]
    row |= {"wrong": wrong, "check": checked.returncode, "goal": GOAL}
    good = not wrong and not checked.returncode and row["submit_p95_ms"] <= 500
    return row | {"reached": good and not row["refused"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    server = start_postgres()
    try:
        asyncio.run(prepare_postgres(server))
        with tempfile.TemporaryDirectory() as name:
            database = asyncio.run(server.fresh())
            row = asyncio.run(measure(options, Path(name), database, server.process.pid))
    finally:
        server.stop()
    print("\n".join(f"{name:22} {value}" for name, value in row.items()))
    if options.json:
        options.json.write_text(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
