"""Cost of `coordinator top`: time to its first picture, and what it costs the server.

    python -m tests.benchmarks.bench_top --json top.json

A real server with so many runs and machines as rows of its database; the monitor runs in a terminal
of its own. The CPU of the server is that of its whole process, with the monitor less without.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path

import psutil

from coordinator.config import Settings
from coordinator.http.app import opened
from tests.benchmarks.bench_metrics import fill
from tests.support.server_process import COORDINATOR, Process
from tests.tui.terminal import Terminal

WORDS = "volunteers"  # of the first picture


async def prepare(folder: Path, runs: int, machines: int) -> None:
    """Put runs and machines into a data directory."""
    async with opened(Settings(data_dir=str(folder), space_floor_bytes=0)) as coordinator:
        await coordinator.db.write(lambda conn: fill(conn, runs, machines))


def share(server: psutil.Process, seconds: float) -> float:
    """Return the share of a core that a process takes."""
    before = spent_by(server)
    time.sleep(seconds)
    return (spent_by(server) - before) / seconds


def spent_by(process: psutil.Process) -> float:
    """Return the CPU seconds of a process."""
    return float(sum(process.cpu_times()[:2]))


def measure(folder: Path, repeats: int, seconds: float) -> dict[str, float]:
    """Return the seconds to the first picture, and the shares of a core of the server."""
    server = Process(folder, "--port", "0")
    try:
        url, token = server.started().url, str(server.token_file)
        command = [*COORDINATOR, "top", "--server", url, "--token-file", token]
        spent, seen = [], []
        for _ in range(repeats + 1):
            began = time.perf_counter()
            with Terminal(command) as terminal:
                terminal.see(WORDS)
                seen.append(time.perf_counter() - began)
                spent.append(spent_by(psutil.Process(terminal.child.pid)))
        alone = share(psutil.Process(server.child.pid), seconds)
        with Terminal(command) as terminal:
            terminal.see(WORDS)
            watched = share(psutil.Process(server.child.pid), seconds)
    finally:
        server.stop()
    return {
        "first_picture_cpu_s": statistics.median(spent[1:]),
        "first_picture_s": statistics.median(seen[1:]),
        "server_core_share_alone": alone,
        "server_core_share_watched": watched,
        "server_core_share_of_top": watched - alone,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "server"
        asyncio.run(prepare(folder, asked.runs, asked.workers))
        found = measure(folder, asked.repeats, asked.seconds)
    for key, value in found.items():
        print(f"{key:32} {value:12.4g}")
    if asked.json:
        asked.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
