"""What the benchmark of transfers compares: one file up or down, by us and by something bare, in
seconds.

Clients of the server's side are blocking sockets that compute nothing; the volunteer's own
transfers and bare httpx both talk to the coordinator.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from shared.clock import SystemClock
from shared.protocol.contributions import UploadRequest
from shared.protocol.versions import BlobRef
from tests.benchmarks.wire import Bare, Connection
from tests.support.server_process import Process
from volunteer.net.api import Api
from volunteer.net.client import Client
from volunteer.net.tls import Address
from volunteer.net.transfers import SEND_BYTES, Transfers
from volunteer.storage.blob_cache import Cache

API = "/api/v1"
OWN_BYTES = 64  # at the end of each upload, so that the store does not have it yet


@dataclass(frozen=True, kw_only=True)
class Lease:
    """A worker and the lease that it uploads for."""

    token: str
    task: int
    attempt: int


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


def together(work: Sequence[Callable[[], None]]) -> float:
    """Start all at once; return the seconds until the last one ended."""
    with ThreadPoolExecutor(len(work)) as threads:
        began = time.perf_counter()
        for done in [threads.submit(each) for each in work]:
            done.result()
        return time.perf_counter() - began


class Uploads:
    """Files of a size whose hashes are cheap to know: all begin alike."""

    def __init__(self, beginning: memoryview) -> None:
        self._beginning = beginning
        self._hash = hashlib.sha256(beginning)

    def fresh(self) -> tuple[list[bytes | memoryview], str]:
        """The parts of a file that the store does not have yet, and its hash."""
        own, digest = secrets.token_bytes(OWN_BYTES), self._hash.copy()
        digest.update(own)
        return [self._beginning, own], digest.hexdigest()


@dataclass(kw_only=True)
class ServerSides:
    """Raw sockets to the coordinator, and to the bare server."""

    server: Process
    bare: Bare
    folder: Path  # of the bare server
    uploads: Uploads
    served: BlobRef
    leases: Sequence[Lease]
    parts: Iterator[int]

    def upload(self, clients: int) -> float:
        """Seconds until the last of `clients` uploads was stored."""
        work = [(lease, next(self.parts), self.uploads.fresh()) for lease in self.leases[:clients]]

        def one(lease: Lease, part: int, body: Sequence[bytes | memoryview], sha: str) -> None:
            wish = {"task": lease.task, "attempt": lease.attempt, "part": part, "tries": 0}
            with Connection(self.server.port, lease.token) as connection:
                about = {"sha256": sha, "size": self.served.size}
                info = connection.call(f"{API}/uploads", wish | about)
                path = f"{API}/uploads/{info['upload_id']}"
                status, said = connection.send("PUT", path, body, ["Upload-Offset: 0"])
                assert status == 200, said
                assert json.loads(said)["complete"], said

        spent = together([partial(one, lease, part, *fresh) for lease, part, fresh in work])
        for _, _, (_, sha) in work:
            forget(self.server, sha)
        return spent

    def bare_upload(self, clients: int) -> float:
        body, _ = self.uploads.fresh()

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
                assert connection.fetch(path) == self.served.size

        return together([partial(one, lease) for lease in self.leases[:clients]])

    def bare_download(self, clients: int) -> float:
        def one() -> None:
            with Connection(self.bare.port) as connection:
                assert connection.fetch("/down/served") == self.served.size

        return together([one] * clients)


@dataclass(kw_only=True)
class VolunteerSides:
    """The volunteer's own transfers, and bare httpx: it sends the body in one piece, and writes
    what it gets to a file.
    """

    server: Process
    folder: Path
    uploads: Uploads
    served: BlobRef
    lease: Lease
    parts: Iterator[int]

    def upload(self) -> float:
        path, sha = self._file()

        async def send(transfers: Transfers) -> None:
            request = UploadRequest(
                task=self.lease.task,
                attempt=self.lease.attempt,
                part=next(self.parts),
                tries=0,
                sha256=sha,
                size=self.served.size,
            )
            assert (await transfers.upload(request, path, lambda done: None)).complete

        spent = self._with_transfers(send)
        forget(self.server, sha)
        return spent

    def httpx_upload(self) -> float:
        path, sha = self._file()
        wish = {"task": self.lease.task, "attempt": self.lease.attempt, "part": next(self.parts)}
        about = {"tries": 0, "sha256": sha, "size": self.served.size}

        async def body() -> AsyncIterator[bytes]:
            with path.open("rb") as file:
                while data := file.read(SEND_BYTES):
                    yield data

        async def send(client: httpx.AsyncClient) -> None:
            info = (await client.post(f"{API}/uploads", json=wish | about)).json()
            headers = {"Upload-Offset": "0", "Content-Length": str(self.served.size)}
            where = f"{API}/uploads/{info['upload_id']}"
            answer = await client.put(where, headers=headers, content=body())
            assert answer.json()["complete"], answer.text

        spent = self._with_httpx(send)
        forget(self.server, sha)
        return spent

    def download(self) -> float:
        async def fetch(transfers: Transfers) -> None:
            (await transfers.fetch(self.served, lambda done: None)).unlink()

        return self._with_transfers(fetch)

    def httpx_download(self) -> float:
        path = self.folder / "fetched"

        async def fetch(client: httpx.AsyncClient) -> None:
            with path.open("wb") as file:
                async with client.stream("GET", f"{API}/blobs/{self.served.sha256}") as answer:
                    async for piece in answer.aiter_raw():
                        file.write(piece)

        spent = self._with_httpx(fetch)
        assert path.stat().st_size == self.served.size
        path.unlink()
        return spent

    def _file(self) -> tuple[Path, str]:
        body, sha = self.uploads.fresh()
        path = self.folder / "outgoing"
        with path.open("wb") as file:
            file.writelines(body)
        return path, sha

    def _with_httpx(self, work: Callable[[httpx.AsyncClient], Any]) -> float:
        async def run() -> float:
            head = {"Authorization": f"Bearer {self.lease.token}"}
            url = self.server.url
            async with httpx.AsyncClient(base_url=url, headers=head, timeout=120) as client:
                began = time.perf_counter()
                await work(client)
                return time.perf_counter() - began

        return asyncio.run(run())

    def _with_transfers(self, work: Callable[[Transfers], Any]) -> float:
        async def run() -> float:
            where = Address(url=self.server.url)
            client = Client(where, clock=SystemClock(), token=self.lease.token)
            transfers = Transfers(Api(client), Cache(self.folder / "cache", 8 << 30))
            began = time.perf_counter()
            await work(transfers)
            spent = time.perf_counter() - began
            await client.close()
            return spent

        return asyncio.run(run())


def forget(server: Process, sha256: str) -> None:
    """Delete an uploaded file."""
    (server.data_dir / "blobs" / sha256[:2] / sha256).unlink()
