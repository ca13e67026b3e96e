"""Backups while clients submit: how much longer a submission takes, and the bytes of the second.

    python -m tests.benchmarks.bench_backup --json backup.json --gigabytes 10

A real `coordinator serve` on SQLite; 20 clients of this process hand in updates of a tiny model all
the time, beside `coordinator backup DIR --keep 3` of blobs that a store of this size would hold.
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
from functools import partial
from pathlib import Path

import numpy as np

from coordinator.config import Settings
from coordinator.database import datasets
from coordinator.services import opened
from shared.clock import SystemClock
from shared.protocol import endpoints
from shared.protocol.accounts import RegisterRequest
from shared.protocol.leases import ClaimRequest
from shared.tensors.codec import codec
from shared.tensors.spec import Schema
from tests.benchmarks.bench_flow import UNLIMITED
from tests.benchmarks.bench_rounds import prepare
from tests.benchmarks.handing import Handing
from tests.support.server_process import COORDINATOR, Process
from volunteer.net.api import Api
from volunteer.net.client import Client
from volunteer.net.tls import Address
from volunteer.net.transfers import Transfers
from volunteer.storage.blob_cache import Cache

CLIENTS = 20
ALONE_S = 15.0
FILE_BYTES = 64 << 20
GOAL_RATIO, GOAL_SHARE = 2.0, 0.1


async def fill(base: Path, gigabytes: float) -> None:
    """Add files of random bytes to the store."""
    random = np.random.default_rng(1)
    async with opened(Settings(data_dir=str(base))) as services:
        for _ in range(int(gigabytes * 1e9) // FILE_BYTES):
            data = random.bytes(FILE_BYTES)
            path = services.blobs.scratch() / secrets.token_hex(8)
            path.write_bytes(data)
            sha = hashlib.sha256(data).hexdigest()
            await services.blobs.put_file(sha, path)
            rows = [(sha, FILE_BYTES, "chunk")]
            await services.db.write(partial(datasets.register_referenced, rows=rows, now=0.0))


class Crew:
    """Clients that hand in updates until they are stopped, and how long each submission took."""

    def __init__(self, url: str, schema: Schema, folder: Path) -> None:
        self.took: list[tuple[float, float]] = []  # when it ended, and seconds
        self._url, self._schema, self._folder = url, schema, folder

    async def work(self, number: int) -> None:
        worker, secret = secrets.token_hex(16), secrets.token_hex(32)
        clock, random = SystemClock(), np.random.default_rng(number)
        api = Api(Client(Address(url=self._url), clock=clock, token=f"{worker}.{secret}"))
        await api.call(
            endpoints.REGISTER,
            body=RegisterRequest(
                volunteer_id=worker,
                worker_id=worker,
                secret=secret,
                nickname=f"bench-{number}",
                workloads=("gpt",),
            ),
        )
        transfers = Transfers(api, Cache(self._folder / f"cache{number}", 1 << 30))
        path = self._folder / f"update{number}"
        while True:
            lease = (await api.claim(ClaimRequest(claim_id=secrets.token_hex(16)))).lease
            if lease is None:
                continue
            begun = await api.begin(lease.task, lease.attempt)
            delta = {
                spec.name: random.normal(0, 1e-5, spec.shape).astype(np.float32)
                for spec in self._schema
            }
            path.unlink(missing_ok=True)
            handing = Handing(
                lease, begun, codec("float32").encode(delta, self._schema, path), "float32"
            )
            await handing.upload(transfers, path)
            began = time.monotonic()
            await handing.submit(api)
            self.took.append((time.monotonic(), time.monotonic() - began))

    def p95_ms(self, since: float) -> float:
        found = [spent for at, spent in self.took if at >= since]
        return 1e3 * statistics.quantiles(found, n=20)[-1]


async def backed_up(base: Path, to: Path) -> tuple[float, int]:
    """Run the command; return its seconds, and the bytes that are in no older backup."""
    began, before = time.monotonic(), set(to.glob("*"))
    done = await asyncio.create_subprocess_exec(
        *COORDINATOR, "backup", str(to), "--keep=3", f"--data-dir={base}"
    )
    assert await done.wait() == 0
    (new,) = set(to.glob("*")) - before
    files = [path.stat() for path in new.rglob("*") if path.is_file()]
    written = sum(file.st_size for file in files if file.st_nlink == 1)
    return time.monotonic() - began, written


async def measure(folder: Path, gigabytes: float) -> list[dict[str, float | str]]:
    base = folder / "data"
    schema = await prepare(base, CLIENTS)
    await fill(base, gigabytes)
    with Process(base, "--port=0", **UNLIMITED) as server:
        clients = Crew(server.url, schema, folder)
        rows: list[dict[str, float | str]] = []
        working = [asyncio.create_task(clients.work(n)) for n in range(CLIENTS)]
        await asyncio.sleep(ALONE_S)
        since = time.monotonic()
        await asyncio.sleep(ALONE_S)
        alone = clients.p95_ms(since)
        for what in ("first", "second"):
            since = time.monotonic()
            seconds, written = await backed_up(base, folder / "saved")
            p95 = clients.p95_ms(since)
            rows.append(
                {"backup": what, "seconds": round(seconds, 1), "bytes": written}
                | {"p95_ms": round(p95, 1), "alone_ms": round(alone, 1)}
                | {"submissions": sum(at >= since for at, _ in clients.took)}
            )
        for task in working:
            task.cancel()
        for task in working:
            assert not task.done() or task.cancelled(), task.exception()
        server.stop()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=10.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        rows = asyncio.run(measure(Path(name), options.gigabytes))
    for row in rows:
        print(row)
    first, second = rows
    share = float(second["bytes"]) / float(first["bytes"])
    ratio = max(float(row["p95_ms"]) / float(row["alone_ms"]) for row in rows)
    reached = share <= GOAL_SHARE and ratio <= GOAL_RATIO
    print(f"p95 x {ratio:.2f}, the second {share:.1%} of the bytes; reached: {reached}")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
