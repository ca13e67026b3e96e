"""Upload and download of 500 MB: the coordinator beside a bare Starlette stream, the volunteer's transfers beside bare httpx.

    python -m tests.benchmarks.bench_transfers --json transfers.json
    python -m tests.benchmarks.bench_transfers --megabytes 50 --repeats 2

A real `coordinator serve` on SQLite: an upload is granted, hashed, synced and registered before it is answered. The bare server
is uvicorn and Starlette: the body to a file and fsync, a file in 1 MiB reads. Clients are blocking sockets that compute nothing;
for the volunteer's own transfers both sides talk to the coordinator, and bare httpx sends the body in one piece and writes
what it gets to a file, without a hash or a sync. Sides take turns; a ratio is the median over the pairs. Memory is resident
memory above what the server had when it was idle.
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
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import insert, update

from coordinator.config import Settings
from coordinator.store import datasets
from coordinator.store.tables import dataset_blobs, runs
from coordinator.wiring import opened
from shared.clock import SystemClock
from shared.protocol import BlobRef, UploadRequest
from tests.benchmarks.bench_rounds import prepare
from tests.benchmarks.wire import Bare, Connection, Memory, until_idle
from tests.e2e.processes import Process
from volunteer.api import Api
from volunteer.cache import Cache
from volunteer.client import Client
from volunteer.tls import Address
from volunteer.transfer import SEND_BYTES, Transfers

API = "/api/v1"
CLIENTS = 8
MEMORY_GOAL_MB = 64.0
GOALS = {"upload": 0.6, "download": 0.8, "volunteer's upload": 0.9, "volunteer's download": 0.9}


@dataclass(frozen=True, kw_only=True)
class Lease:
    """A worker and what it may upload for."""

    token: str
    task: int
    attempt: int


@dataclass(kw_only=True)
class Bench:
    """Both servers, the bytes, and the leases to upload them for."""

    server: Process
    bare: Bare
    folder: Path
    rest: memoryview  # of every upload, after a beginning of its own
    served: BlobRef  # to download
    leases: Sequence[Lease] = ()
    part: Iterator[int] = field(default_factory=count)

    @property
    def size(self) -> int:
        return self.served.size

    def fresh(self) -> tuple[list[bytes | memoryview], str]:
        """Bytes that the store does not have yet, and their hash."""
        body: list[bytes | memoryview] = [
            secrets.token_bytes(self.size - len(self.rest)),
            self.rest,
        ]
        digest = hashlib.sha256()
        for piece in body:
            digest.update(piece)
        return body, digest.hexdigest()

    def forget(self, sha256: str) -> None:
        """Make room again."""
        (self.server.data_dir / "blobs" / sha256[:2] / sha256).unlink()

    # --- the server's side, measured with raw sockets ---

    def upload(self, clients: int) -> float:
        """Seconds until the last of `clients` uploads was stored."""
        work = [(lease, next(self.part), self.fresh()) for lease in self.leases[:clients]]

        def one(lease: Lease, part: int, body: Sequence[bytes | memoryview], sha: str) -> None:
            request = {"task": lease.task, "attempt": lease.attempt, "part": part, "tries": 0}
            with Connection(self.server.port, lease.token) as connection:
                info = connection.call(
                    f"{API}/uploads", {**request, "sha256": sha, "size": self.size}
                )
                path = f"{API}/uploads/{info['upload_id']}"
                status, said = connection.send("PUT", path, body, ["Upload-Offset: 0"])
                assert status == 200, said
                assert json.loads(said)["complete"], said

        spent = together([partial(one, lease, part, *fresh) for lease, part, fresh in work])
        for _, _, (_, sha) in work:
            self.forget(sha)
        return spent

    def bare_upload(self, clients: int) -> float:
        body, _ = self.fresh()

        def one(number: int) -> None:
            with Connection(self.bare.port) as connection:
                status, said = connection.send("PUT", f"/up/{number}", body)
                assert status == 200, said

        spent = together([partial(one, number) for number in range(clients)])
        for number in range(clients):
            (self.folder / str(number)).unlink()
        return spent

    def download(self, clients: int) -> float:
        path = f"{API}/blobs/{self.served.sha256}"

        def one(lease: Lease) -> None:
            with Connection(self.server.port, lease.token) as connection:
                assert connection.fetch(path) == self.size

        return together([partial(one, lease) for lease in self.leases[:clients]])

    def bare_download(self, clients: int) -> float:
        def one() -> None:
            with Connection(self.bare.port) as connection:
                assert connection.fetch("/down/served") == self.size

        return together([one] * clients)

    # --- the volunteer's side ---

    def volunteer_upload(self) -> float:
        path, sha = self._file()
        lease = self.leases[0]

        async def send(transfers: Transfers) -> None:
            request = UploadRequest(
                task=lease.task,
                attempt=lease.attempt,
                part=next(self.part),
                tries=0,
                sha256=sha,
                size=self.size,
            )
            assert (await transfers.upload(request, path, lambda done: None)).complete

        spent = self._with_transfers(send)
        self.forget(sha)
        return spent

    def httpx_upload(self) -> float:
        path, sha = self._file()
        lease = self.leases[0]
        head = {"Authorization": f"Bearer {lease.token}"}
        request = {"task": lease.task, "attempt": lease.attempt, "part": next(self.part)}

        async def body() -> AsyncIterator[bytes]:
            with path.open("rb") as file:
                while data := file.read(SEND_BYTES):
                    yield data

        async def send() -> float:
            async with httpx.AsyncClient(base_url=self.server.url, timeout=120) as client:
                began = time.perf_counter()
                said = {**request, "tries": 0, "sha256": sha, "size": self.size}
                info = (await client.post(f"{API}/uploads", json=said, headers=head)).json()
                headers = {**head, "Upload-Offset": "0", "Content-Length": str(self.size)}
                where = f"{API}/uploads/{info['upload_id']}"
                answer = await client.put(where, headers=headers, content=body())
                assert answer.json()["complete"], answer.text
                return time.perf_counter() - began

        spent = asyncio.run(send())
        self.forget(sha)
        return spent

    def volunteer_download(self) -> float:
        async def fetch(transfers: Transfers) -> None:
            (await transfers.fetch(self.served, lambda done: None)).unlink()

        return self._with_transfers(fetch)

    def httpx_download(self) -> float:
        path = self.folder / "fetched"
        head = {"Authorization": f"Bearer {self.leases[0].token}"}
        url = f"{API}/blobs/{self.served.sha256}"

        async def fetch() -> float:
            async with httpx.AsyncClient(base_url=self.server.url, timeout=120) as client:
                began = time.perf_counter()
                with path.open("wb") as file:
                    async with client.stream("GET", url, headers=head) as answer:
                        async for piece in answer.aiter_raw():
                            file.write(piece)
                return time.perf_counter() - began

        spent = asyncio.run(fetch())
        assert path.stat().st_size == self.size
        path.unlink()
        return spent

    def _file(self) -> tuple[Path, str]:
        body, sha = self.fresh()
        path = self.folder / "outgoing"
        with path.open("wb") as file:
            file.writelines(body)
        return path, sha

    def _with_transfers(self, work: Callable[[Transfers], Any]) -> float:
        async def run() -> float:
            client = Client(
                Address(url=self.server.url), clock=SystemClock(), token=self.leases[0].token
            )
            transfers = Transfers(Api(client), Cache(self.folder / "cache", 8 << 30))
            began = time.perf_counter()
            await work(transfers)
            spent = time.perf_counter() - began
            await client.close()
            return spent

        return asyncio.run(run())


def together(work: Sequence[Callable[[], None]]) -> float:
    """Seconds until all have ended that began at once."""
    with ThreadPoolExecutor(len(work)) as threads:
        began = time.perf_counter()
        for done in [threads.submit(each) for each in work]:
            done.result()
        return time.perf_counter() - began


def claim(port: int, number: int) -> Lease:
    """A registered worker with a lease."""
    name, secret = secrets.token_hex(16), secrets.token_hex(32)
    with Connection(port, f"{name}.{secret}") as connection:
        account = {"volunteer_id": name, "worker_id": name, "secret": secret}
        about = {"nickname": f"bench-{number}", "workloads": ["gpt"]}
        connection.call(f"{API}/workers/register", {**account, **about})
        wish = {"claim_id": secrets.token_hex(16), "step_flops": 1e9}
        lease = connection.call(f"{API}/claims", wish)["lease"]
    return Lease(token=f"{name}.{secret}", task=lease["task"], attempt=lease["attempt"])


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
            datasets.register(conn, [(sha, size, "chunk")], now)
            conn.execute(insert(dataset_blobs).values(dataset_id=1, sha256=sha, served=True))
            conn.execute(update(runs).values(parameters=size // 4))

        await services.db.write(note)
    return BlobRef(sha256=sha, size=size)


def pairs(
    what: str, size: int, sides: Sequence[Callable[[], float]], repeats: int
) -> dict[str, Any]:
    """Medians of both sides and of their ratio, after one turn to warm up."""
    seen: list[tuple[float, float]] = []
    for turn in range(repeats + 1):
        order = (0, 1) if turn % 2 else (1, 0)
        spent = {index: sides[index]() for index in order}
        if turn:
            seen.append((spent[0], spent[1]))
    ratios = [bare / ours for ours, bare in seen]
    goal = GOALS.get(what)
    return {
        "what": what,
        "ours_mb_per_s": round(size / 1e6 / statistics.median(ours for ours, _ in seen)),
        "bare_mb_per_s": round(size / 1e6 / statistics.median(bare for _, bare in seen)),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
        "goal": goal,
        "reached": None if goal is None else statistics.median(ratios) >= goal,
    }


def memory(what: str, pid: int, run: Callable[[], object]) -> dict[str, Any]:
    with Memory(pid) as seen:
        run()
    above = round(seen.above_mb, 1)
    base = round(seen.base / (1 << 20))
    goal = MEMORY_GOAL_MB
    return {
        "what": what,
        "mb_above": above,
        "base_mb": base,
        "goal": goal,
        "reached": above <= goal,
    }


def measure(size: int, repeats: int, directory: Path) -> dict[str, Any]:
    folder = directory / "bare"
    folder.mkdir()
    served = folder / "served"
    served.write_bytes(secrets.token_bytes(size))
    ref = asyncio.run(stock(directory / "data", served, size))
    far = {f"COORDINATOR_RATE_{kind}": "off" for kind in ("IP", "WORKER", "REGISTER")}
    quota = {"COORDINATOR_UPLOAD_QUOTA_BYTES": str(1 << 45)}
    rest = memoryview(served.read_bytes())[64:]
    with (
        Process(directory / "data", "--port", "0", **far, **quota) as server,
        Bare(folder) as bare,
    ):
        bench = Bench(server=server, bare=bare, folder=folder, rest=rest, served=ref)
        bench.leases = [claim(server.port, number) for number in range(CLIENTS)]
        pid = server.child.pid
        until_idle(pid)
        # Memory first: what a process once had, its heap keeps.
        remembered = [
            memory(f"{what}, {clients} clients", pid, partial(run, clients))
            for clients in (1, CLIENTS)
            for what, run in (("download", bench.download), ("upload", bench.upload))
        ]
        rows = [
            pairs("upload", size, (lambda: bench.upload(1), lambda: bench.bare_upload(1)), repeats),
            pairs(
                "download",
                size,
                (lambda: bench.download(1), lambda: bench.bare_download(1)),
                repeats,
            ),
            pairs(
                "volunteer's upload", size, (bench.volunteer_upload, bench.httpx_upload), repeats
            ),
            pairs(
                "volunteer's download",
                size,
                (bench.volunteer_download, bench.httpx_download),
                repeats,
            ),
        ]
        few = max(1, repeats // 3)
        rows += [
            pairs(
                f"upload, {CLIENTS} clients",
                size * CLIENTS,
                (lambda: bench.upload(CLIENTS), lambda: bench.bare_upload(CLIENTS)),
                few,
            ),
            pairs(
                f"download, {CLIENTS} clients",
                size * CLIENTS,
                (lambda: bench.download(CLIENTS), lambda: bench.bare_download(CLIENTS)),
                few,
            ),
        ]
    return {"bytes": size, "rows": rows, "memory": remembered}


def show(found: dict[str, Any]) -> None:
    print(
        f"{found['bytes'] / 1e6:.0f} MB              ours MB/s  bare MB/s  ratio  (least, most)   goal  reached"
    )
    for row in found["rows"]:
        spread = f"({row['ratio_min']:.2f}, {row['ratio_max']:.2f})"
        goal = "" if row["goal"] is None else f"{row['goal']:6}  {row['reached']}"
        print(
            f"{row['what']:<21} {row['ours_mb_per_s']:>9} {row['bare_mb_per_s']:>10}"
            f" {row['ratio']:>6.2f}  {spread:<14} {goal}"
        )
    print("\ncoordinator's memory  MB above idle  idle MB   goal  reached")
    for row in found["memory"]:
        print(
            f"{row['what']:<21} {row['mb_above']:>13} {row['base_mb']:>8}  <={row['goal']:.0f}  {row['reached']}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="where the files are made (and removed)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        found = measure(options.megabytes * 1_000_000, options.repeats, Path(name))
    show(found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
