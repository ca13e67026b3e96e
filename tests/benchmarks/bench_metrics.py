"""Cost of a scrape of the metrics: CPU of the whole process, the database included.

    python -m tests.benchmarks.bench_metrics --runs 100 --workers 10000 --json metrics.json

So many running runs with open tasks, so many machines of as many volunteers, half of them at work,
and some refusals for other reasons of every run, as rows of the database and counts in memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path

import httpx
from sqlalchemy import Connection, insert, update

from coordinator.config import Settings
from coordinator.database.tables.accounts import workers
from coordinator.database.tables.tasks import tasks
from coordinator.http.app import create_app, opened
from coordinator.upkeep.overview_cache import CENSUS_S
from tests.support.run_rows import add_run, add_worker

REASONS = ("", "stale", "norm", "loss", "replayed")
HARDWARE = '{"cpu": "a machine with some memory and a long name"}' * 20


def fill(conn: Connection, runs: int, machines: int) -> None:
    """Put runs and machines into a database, every second machine with a task in hand."""
    ids = [add_run(conn, f"run-{number}", counts=(64, 64)) for number in range(runs)]
    people = [add_worker(conn) for _ in range(machines)]
    conn.execute(update(workers).values(hardware=HARDWARE, benchmark="[]" * 200))
    common = {"kind": "train", "pass_no": 1, "seed": 1, "steps": 10, "batch_size": 2}
    common |= {"price_micro": 1, "device": "cpu", "returned": False, "failures": 0, "timeouts": 0}
    rows = [
        common
        | {"run_id": ids[number % runs], "start": number, "stop": number + 1, "options": "{}"}
        | {"state": "doing" if number % 2 else "todo", "attempt": 1}
        | {"worker_id": who.worker_id, "volunteer_id": who.volunteer_id}
        for number, who in enumerate(people)
    ]
    conn.execute(insert(tasks), rows)


async def measure(runs: int, machines: int, scrapes: int) -> dict[str, float]:
    """Return the CPU of a scrape that reads the database, and of one that does not."""
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(data_dir=folder, space_floor_bytes=0, rate_ip="off")
        async with opened(settings) as coordinator:
            await coordinator.db.write(lambda conn: fill(conn, runs, machines))
            for number in range(runs):
                for reason in REASONS:
                    coordinator.intake.decided[f"run-{number}", "rejected", reason] += 1
            transport = httpx.ASGITransport(app=create_app(coordinator))
            async with httpx.AsyncClient(
                transport=transport, base_url="http://house.localhost"
            ) as client:
                answer = await client.get("/metrics")
                found: dict[str, list[float]] = {"read": [], "kept": []}
                for _ in range(scrapes):
                    await asyncio.sleep(CENSUS_S + 0.2)
                    for kind in found:
                        before = time.process_time()
                        answer = await client.get("/metrics")
                        found[kind].append(1e3 * (time.process_time() - before))
                assert answer.status_code == 200
    return {
        "runs": float(runs),
        "workers": float(machines),
        "scrape_cpu_ms": statistics.median(found["read"]),
        "scrape_cpu_ms_kept": statistics.median(found["kept"]),
        "bytes": float(len(answer.content)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--workers", type=int, default=10_000)
    parser.add_argument("--scrapes", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = asyncio.run(measure(options.runs, options.workers, options.scrapes))
    print(json.dumps(found, indent=2))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
