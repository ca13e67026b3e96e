"""Upload and download of 500 MB: the coordinator beside a bare Starlette stream, the volunteer's
transfers beside bare httpx.

    python -m tests.benchmarks.bench_transfers --json transfers.json
    python -m tests.benchmarks.bench_transfers --megabytes 50 --pairs 2
    python -m tests.benchmarks.bench_transfers --only "volunteer's upload" "volunteer's download"

A real `coordinator serve` on SQLite: an upload is granted, hashed, synced and registered before it
is answered. The bare server is uvicorn and Starlette: the body to a file and fsync, a file in 1 MiB
reads. Clients are blocking sockets that compute nothing; for the volunteer's own transfers both
sides talk to the coordinator, and bare httpx writes what it gets to a file, without a hash. Sides
take turns after one turn to warm up; a ratio is the median over the pairs. Memory is the most
resident memory during our side of a row, above what the coordinator had before the first of them:
what a row leaves in the heap counts for the next.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from sqlalchemy import insert, update

from coordinator.config import Settings
from coordinator.database import datasets
from coordinator.database.tables.datasets import dataset_blobs
from coordinator.database.tables.runs import runs
from coordinator.services import opened
from shared.protocol.versions import BlobRef
from shared.units import MIB
from tests.benchmarks.bench_rounds import prepare
from tests.benchmarks.transfer_sides import (
    OWN_BYTES,
    ServerSides,
    Uploads,
    VolunteerSides,
    claim,
)
from tests.benchmarks.wire import Bare, Memory, until_idle
from tests.support.server_process import Process

CLIENTS = 8
MEMORY_GOAL_MB = 64.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """Two sides that do the same with `clients` files at once."""

    what: str
    ours: Callable[[], float]  # seconds
    bare: Callable[[], float]
    goal: float | None  # of the ratio of their rates
    clients: int = 1
    memory: bool = False  # whether the goal for the coordinator's memory is about this


async def stock(data_dir: Path, path: Path, size: int) -> BlobRef:
    """A run whose updates may be this large, and a blob of this size that volunteers may read."""
    await prepare(data_dir, CLIENTS)
    with path.open("rb") as file:
        sha = hashlib.file_digest(file, "sha256").hexdigest()
    copy = data_dir / "blobs" / "tmp" / "served"
    copy.write_bytes(path.read_bytes())
    async with opened(Settings(data_dir=str(data_dir))) as services:
        await services.blobs.put_file(sha, copy)
        now = time.time()

        def note(conn: Any) -> None:
            datasets.register(conn, [(sha, size, "chunk")], now, services.blobs.serials)
            conn.execute(insert(dataset_blobs).values(dataset_id=1, sha256=sha, served=True))
            conn.execute(update(runs).values(parameters=size // 4))

        await services.db.write(note)
    return BlobRef(sha256=sha, size=size)


def rows_of(server: ServerSides, volunteer: VolunteerSides) -> tuple[Row, ...]:
    """What is measured, the many clients last: their memory stays in the heap."""

    def of(what: str, side: str, goal: float | None, clients: int) -> Row:
        ours, bare = getattr(server, side), getattr(server, f"bare_{side}")
        return Row(
            what=what,
            ours=partial(ours, clients),
            bare=partial(bare, clients),
            goal=goal,
            clients=clients,
            memory=True,
        )

    return (
        of("upload", "upload", 0.6, 1),
        of("download", "download", 0.8, 1),
        Row(
            what="volunteer's upload",
            ours=volunteer.upload,
            bare=volunteer.httpx_upload,
            goal=0.9,
        ),
        Row(
            what="volunteer's download",
            ours=volunteer.download,
            bare=volunteer.httpx_download,
            goal=0.9,
        ),
        of(f"upload, {CLIENTS} clients", "upload", None, CLIENTS),
        of(f"download, {CLIENTS} clients", "download", None, CLIENTS),
    )


def compare(row: Row, size: int, pairs: int, pid: int, idle: int) -> dict[str, Any]:
    """Medians of both sides and of their ratio, and how far the coordinator's memory rose above
    `idle` bytes.
    """
    seen: list[tuple[float, float]] = []
    peak = 0
    for turn in range(pairs + 1):
        spent = {}
        for side in (row.ours, row.bare) if turn % 2 else (row.bare, row.ours):
            with Memory(pid) as memory:
                spent[side] = side()
            if side is row.ours:
                peak = max(peak, memory.peak)
        if turn:
            seen.append((spent[row.ours], spent[row.bare]))
    megabytes = size * row.clients / 1e6
    ratio = statistics.median(bare / ours for ours, bare in seen)
    above = (peak - idle) / MIB
    found = {
        "what": row.what,
        "pairs": pairs,
        "ours_mb_per_s": round(megabytes / statistics.median(ours for ours, _ in seen)),
        "bare_mb_per_s": round(megabytes / statistics.median(bare for _, bare in seen)),
        "ratio": round(ratio, 3),
        "ratio_min": round(min(bare / ours for ours, bare in seen), 3),
        "ratio_max": round(max(bare / ours for ours, bare in seen), 3),
        "goal": row.goal,
        "reached": None if row.goal is None else ratio >= row.goal,
    }
    if row.memory:
        found |= {
            "memory_mb": round(above, 1),
            "memory_goal_mb": MEMORY_GOAL_MB,
            "memory_reached": above <= MEMORY_GOAL_MB,
        }
    return found


def measure(size: int, pairs: int, only: Sequence[str], directory: Path) -> list[dict[str, Any]]:
    folder = directory / "bare"
    folder.mkdir()
    served = folder / "served"
    served.write_bytes(secrets.token_bytes(size))
    ref = asyncio.run(stock(directory / "data", served, size))
    uploads, parts = Uploads(memoryview(served.read_bytes())[:-OWN_BYTES]), count()
    unlimited = {f"COORDINATOR_RATE_{kind}": "off" for kind in ("IP", "WORKER", "REGISTER")}
    unlimited["COORDINATOR_UPLOAD_QUOTA_BYTES"] = str(1 << 45)
    with Process(directory / "data", "--port", "0", **unlimited) as server, Bare(folder) as bare:
        leases = [claim(server.port, number) for number in range(CLIENTS)]
        common: dict[str, Any] = {
            "server": server,
            "folder": folder,
            "uploads": uploads,
            "served": ref,
            "parts": parts,
        }
        sides = ServerSides(bare=bare, leases=leases, **common)
        own = VolunteerSides(lease=leases[0], **common)
        pid = server.child.pid
        until_idle(pid)
        with Memory(pid) as memory:
            idle = memory.base
        rows = [row for row in rows_of(sides, own) if not only or row.what in only]
        found = []
        for row in rows:
            few = pairs if row.clients == 1 else max(1, pairs // 3)
            found.append(compare(row, size, few, pid, idle))
            print(line(found[-1]), flush=True)
        return found


def line(row: dict[str, Any]) -> str:
    goal = "" if row["goal"] is None else f"  goal {row['goal']}: {row['reached']}"
    text = (
        f"{row['what']:<21} {row['ours_mb_per_s']:>5} MB/s beside {row['bare_mb_per_s']:>5}: "
        f"{row['ratio']:.2f}"
        f" ({row['ratio_min']:.2f} to {row['ratio_max']:.2f}, {row['pairs']} pairs){goal}"
    )
    if "memory_mb" in row:
        text += (
            f"  memory +{row['memory_mb']} MB, goal {MEMORY_GOAL_MB:.0f}: {row['memory_reached']}"
        )
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--pairs", type=int, default=5, help="a third of it with eight clients")
    parser.add_argument("--only", nargs="*", default=[], metavar="ROW", help="by name")
    parser.add_argument("--directory", type=Path, help="where the files are made (and removed)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    size = options.megabytes * 1_000_000
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        rows = measure(size, options.pairs, options.only, Path(name))
    if options.json:
        options.json.write_text(json.dumps({"bytes": size, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
