"""A machine that does the tasks of any workload, one request after another, honestly or not."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from sqlalchemy import Connection, select
from typing_extensions import override

from coordinator.database.tables.accounts import volunteers
from shared import decoding
from shared.protocol.contributions import Verdict
from shared.protocol.leases import BeginReply, ClaimReply, Lease
from shared.protocol.versions import VersionManifest
from shared.tensors.codec import codec
from shared.tensors.frame import open_frame
from shared.tensors.update import Delta
from shared.workloads.base import ChunkRef, Data, DatasetManifest, load
from shared.workloads.gomoku.records import GameRecord
from shared.workloads.gomoku.records import decode as read_games
from shared.workloads.gomoku.records import encode as write_games
from tests.support.local_coordinator import LocalCoordinator, Worker, decode

Change = Callable[[list[GameRecord]], list[GameRecord]]
NO_DATA = DatasetManifest(name="", kind="", licence="", source="", chunks=())


class Held(Data):
    """Data of a task, from the coordinator's own blobs."""

    def __init__(self, home: LocalCoordinator, manifest: DatasetManifest) -> None:
        self.manifest = manifest
        self._files: dict[str, Path] = {}
        self._home = home

    @classmethod
    async def of(cls, home: LocalCoordinator, lease: Lease) -> Held:
        """The data of a task: its own, its dataset's, or none."""
        manifest = lease.data or NO_DATA
        if lease.data is None and lease.dataset:
            manifest = await home.coordinator.datasets.manifest(lease.dataset)
        return await cls(home, manifest).fetch()

    async def fetch(self) -> Held:
        refs: list[ChunkRef] = [*self.manifest.chunks, *self.manifest.assets.values()]
        for ref in refs:
            assert await self._home.coordinator.datasets.may_read(ref.sha256)
            self._files[ref.sha256] = await self._home.coordinator.blobs.local(ref.sha256)
        return self

    @override
    def chunk(self, index: int) -> Path:
        return self._files[self.manifest.chunks[index].sha256]

    @override
    def asset(self, name: str) -> Path:
        return self._files[self.manifest.assets[name].sha256]


class Player:
    """A machine that does tasks of every kind, honestly or not; `flops` is its measured speed."""

    def __init__(
        self, home: LocalCoordinator, worker: Worker, *, device: str = "cpu", flops: float = 0.0
    ) -> None:
        self.home = home
        self.worker = worker
        self.device = device
        self.flops = flops

    async def ask(self, *kinds: str) -> ClaimReply:
        body = {
            "claim_id": secrets.token_hex(8),
            "wait_s": 0,
            "codecs": ["float32"],
            "kinds": kinds,
            "device": self.device,
            "step_flops": self.flops,
        }
        return decode(await self.worker.post("/claims", body), ClaimReply)

    async def claim(self, *kinds: str) -> Lease:
        reply = await self.ask(*kinds)
        assert reply.lease is not None, reply.idle
        return reply.lease

    async def do(self, lease: Lease, change: Change | None = None) -> Verdict:
        """Play a whole task; `change` is a cheat's edit of its games."""
        begun = await self.worker.begin(lease)
        return await self.hand_in(lease, begun, await self.result(lease, begun, change))

    async def result(self, lease: Lease, begun: BeginReply, change: Change | None = None) -> bytes:
        assert begun.manifest is not None
        manifest = decoding.decode(begun.manifest.payload, VersionManifest)
        job = msgspec.structs.replace(
            lease.job, base_version=begun.version, base_sha256=manifest.weights.sha256
        )
        workload = load(job.workload)
        schema = workload.schema(job.config)
        path = await self.home.coordinator.blobs.local(manifest.weights.sha256)
        frame = open_frame(path, schema, copy_on_write=True)
        weights = {name: torch.from_numpy(frame.array(name)) for name in frame}
        data = await Held.of(self.home, lease)
        work = workload.begin(job, weights, data, "cpu")
        while not work.done:
            work.advance()
        report, tensors = work.result()
        if report.experience:
            return (
                write_games(change(read_games(report.experience))) if change else report.experience
            )
        out = self.home.coordinator.blobs.scratch() / f"made-{secrets.token_hex(4)}"
        arrays = {name: value.numpy() for name, value in tensors.items()}
        codec(lease.grant.codec).encode(Delta(frame, arrays, schema), schema, out)
        return out.read_bytes()

    async def hand_in(self, lease: Lease, begun: BeginReply, data: bytes) -> Verdict:
        await self.worker.upload(lease, data)
        said = self.worker.submission(lease, begun, data)
        reply = await self.worker.post(f"/tasks/{lease.task}/submit", said)
        return decode(reply, Verdict)

    async def standing(self) -> str:
        def read(conn: Connection) -> str:
            mine = volunteers.c.id == self.worker.volunteer_id
            return str(conn.execute(select(volunteers.c.standing).where(mine)).scalar_one())

        return await self.home.coordinator.db.read(read)
