"""A whole coordinator in this process, over ASGI, with a clock that stands still until advanced."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
import numpy as np

from coordinator.config import Settings
from coordinator.database import runs
from coordinator.database.engine.open_database import file_of
from coordinator.http.app import Coordinator, create_app, opened
from coordinator.runs.datasets import Build
from coordinator.runs.definition import definition
from shared import decoding
from shared.proofs import proof_of_work
from shared.protocol.accounts import RegisterReply
from shared.protocol.base import ErrorBody
from shared.protocol.contributions import SubmitRequest, UploadInfo, Verdict
from shared.protocol.leases import BeginReply, ClaimReply, Lease
from shared.protocol.limits import API
from shared.tensors.codec import codec
from tests.support.databases import empty_sqlite
from tests.support.measured_drifts import measure_once
from tests.support.sums import build_sums
from tests.support.virtual_clock import VirtualClock

T = TypeVar("T")

measure_once()

RUN = """
name = "tiny"
workload = "gpt"
dataset = "sums"
[model]
block_size = 8
n_layer = 1
n_head = 1
n_embd = 8
dropout = 0.0
[task]
local_steps = 2
batch_size = 2
min_steps = 1
[plan]
preset = "fedavg"
quorum = 2
codec = "float32"
"""


class LocalCoordinator:
    """Coordinator with its application and its clients."""

    def __init__(self, coordinator: Coordinator, clock: VirtualClock) -> None:
        self.coordinator = coordinator
        self.clock = clock
        self.transport: httpx.AsyncBaseTransport = httpx.ASGITransport(
            app=create_app(coordinator), raise_app_exceptions=False
        )

    def client(self, token: str = "") -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return httpx.AsyncClient(
            transport=self.transport, base_url="http://house.localhost", headers=headers
        )

    @property
    def admin(self) -> httpx.AsyncClient:
        token = self.coordinator.settings.admin_token_file.read_text().strip()
        return self.client(f"admin.{token}")

    async def start_run(self, text: str = RUN, build: Build | None = None) -> str:
        """A tiny dataset, or the one that is built, and a running run on it; its name."""
        await self.coordinator.datasets.add(build or build_sums)
        run = await self.coordinator.runs.create(text)
        await self.coordinator.runs.start(run.name)
        return run.name

    async def join(self, name: str, **more: Any) -> Worker:
        """A registered worker."""
        worker = Worker(self, name)
        reply = await worker.post("/workers/register", worker.registration(**more))
        decode(reply, RegisterReply)
        return worker

    async def stranger(self, name: str) -> Worker:
        """A worker of an account that nobody vouches for, which made its proof of work."""
        found = Worker(self, name)
        given = await self.coordinator.volunteers.challenge(found.volunteer_id, "")
        nonce = proof_of_work.solve(given.challenge, given.bits, lambda _: True)
        proof = {"challenge": given.challenge, "nonce": f"{nonce:x}"}
        decode(await found.post("/workers/register", found.registration(**proof)), RegisterReply)
        return found


class Worker:
    """One volunteer's machine, as far as HTTP goes."""

    def __init__(self, local_coordinator: LocalCoordinator, name: str) -> None:
        self.house = local_coordinator
        self.name = name
        self.volunteer_id = secrets.token_hex(16)
        self.worker_id = secrets.token_hex(16)
        self.secret = secrets.token_urlsafe(32)
        self.http = local_coordinator.client(f"{self.worker_id}.{self.secret}")

    def registration(self, **more: Any) -> dict[str, Any]:
        return {
            "volunteer_id": self.volunteer_id,
            "worker_id": self.worker_id,
            "secret": self.secret,
            "nickname": self.name,
            "workloads": ["gpt"],
        } | more

    async def post(self, path: str, body: Any = None) -> httpx.Response:
        content = b"" if body is None else msgspec.json.encode(body)
        return await self.http.post(API + path, content=content)

    async def get(self, path: str, **headers: str) -> httpx.Response:
        return await self.http.get(API + path, headers=headers)

    async def verdict(self, contribution: int) -> Verdict:
        """Return the newest verdict on one of this volunteer's contributions."""
        told = decode(await self.get("/contributions"), tuple[Verdict, ...])
        return next(each for each in told if each.contribution == contribution)

    async def claim(self, wait_s: float = 0.0, claim_id: str = "") -> Lease:
        claim_id = claim_id or secrets.token_hex(16)
        body = {"claim_id": claim_id, "wait_s": wait_s, "codecs": ["float32"]}
        reply = decode(await self.post("/claims", body), ClaimReply)
        assert reply.lease is not None, reply.idle
        return reply.lease

    async def begin(self, lease: Lease) -> BeginReply:
        body = {"attempt": lease.attempt}
        return decode(await self.post(f"/tasks/{lease.task}/begin", body), BeginReply)

    async def newest(self, lease: Lease, known: int = -1) -> BeginReply:
        """Ask for the newest version in the course of a lease."""
        body = {"attempt": lease.attempt, "newest": True, "known": known}
        return decode(await self.post(f"/tasks/{lease.task}/begin", body), BeginReply)

    async def part(
        self, lease: Lease, begun: BeginReply, part: int, tries: int = 0, seed: int | None = None
    ) -> Verdict:
        """Upload and submit one gradient of a lease in parts, for the version that began."""
        data = await self.update(
            lease.run, 1000 * lease.task + 10 * part + tries if seed is None else seed
        )
        reply = await self.announce(lease, data, part=part, tries=tries)
        if reply.status_code != 410:  # submitted before: its reply was lost
            await self.put(decode(reply, UploadInfo).upload_id, 0, data)
        job, every = lease.job, lease.part_steps
        steps = min(every, job.steps - part * every)
        samples = min(steps * job.batch_size, job.stop - job.start - part * every * job.batch_size)
        said = msgspec.structs.replace(
            self.submission(lease, begun, data),
            part=part,
            tries=tries,
            steps=steps,
            samples=samples,
        )
        return decode(await self.post(f"/tasks/{lease.task}/submit", said), Verdict)

    async def update(self, run: str, seed: int = 0, scale: float = 1e-3) -> bytes:
        """The bytes of an honest-looking update."""
        row = await self.house.coordinator.db.read(lambda conn: runs.by_name(conn, run))
        about = definition(row)
        rng = np.random.default_rng(seed)
        tensors = {
            s.name: (rng.standard_normal(s.shape) * scale).astype(np.float32) for s in about.schema
        }
        path = self.house.coordinator.blobs.scratch() / f"made-{secrets.token_hex(4)}"
        codec(about.plan.codec).encode(tensors, about.schema, path)
        data = path.read_bytes()
        path.unlink()
        return data

    async def announce(self, lease: Lease, data: bytes, **more: Any) -> httpx.Response:
        body = {
            "task": lease.task,
            "attempt": lease.attempt,
            "part": 0,
            "tries": 0,
            "sha256": hashlib.sha256(data).hexdigest(),
            "size": len(data),
        } | more
        return await self.post("/uploads", body)

    async def put(self, upload_id: str, offset: int, data: Any) -> httpx.Response:
        headers = {"Upload-Offset": str(offset)}
        return await self.http.put(f"{API}/uploads/{upload_id}", content=data, headers=headers)

    async def upload(self, lease: Lease, data: bytes) -> UploadInfo:
        info = decode(await self.announce(lease, data), UploadInfo)
        return decode(await self.put(info.upload_id, info.offset, data[info.offset :]), UploadInfo)

    def submission(self, lease: Lease, begun: BeginReply, data: bytes) -> SubmitRequest:
        return SubmitRequest(
            attempt=lease.attempt,
            base_version=begun.version,
            codec=lease.grant.codec,
            sha256=hashlib.sha256(data).hexdigest(),
            size=len(data),
            steps=lease.job.steps,
            samples=lease.job.stop - lease.job.start,
            loss_first=5.0,
            loss_last=4.9,
            train_s=1.0,
        )

    async def work(self, seed: int = 0) -> Verdict:
        """Do a whole task: claim, begin, upload, submit."""
        lease = await self.claim()
        return await self.hand_in(lease, await self.begin(lease), seed)

    async def hand_in(self, lease: Lease, begun: BeginReply, seed: int = 0) -> Verdict:
        """Upload and submit a whole task."""
        data = await self.update(lease.job.run, seed)
        await self.upload(lease, data)
        return await self.submit(lease, begun, data)

    async def submit(self, lease: Lease, begun: BeginReply, data: bytes) -> Verdict:
        """Submit what was uploaded."""
        said = self.submission(lease, begun, data)
        return decode(await self.post(f"/tasks/{lease.task}/submit", said), Verdict)


def decode(response: httpx.Response, kind: type[T]) -> T:
    """The struct in a good response."""
    assert response.status_code < 300, response.text
    return decoding.decode(response.content, kind)


def refused(response: httpx.Response, status: int) -> ErrorBody:
    """The error in a refusal, which must have this status."""
    assert response.status_code == status, response.text
    body = decoding.decode(response.content, ErrorBody)
    assert body.request_id
    assert body.message
    return body


@asynccontextmanager
async def local_coordinator(path: Path, **settings: Any) -> AsyncIterator[LocalCoordinator]:
    """A coordinator in a directory of its own."""
    clock = VirtualClock()
    quiet: dict[str, Any] = {
        "space_floor_bytes": 0,
        "rate_ip": "",
        "rate_worker": "",
        "rate_register": "",
    }
    chosen = Settings(data_dir=str(path), **(quiet | settings))
    prepare(chosen)
    async with opened(chosen, clock) as coordinator:
        yield LocalCoordinator(coordinator, clock)


def prepare(settings: Settings) -> None:
    """Put an empty database at the default place of the settings; an existing one stays."""
    file = file_of(settings.database_url)
    used = settings.signing_key_file.exists()  # a database that is missing then stays missing
    if not settings.database and file is not None and not file.exists() and not used:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.write_bytes(empty_sqlite())
