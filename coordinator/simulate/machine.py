"""Machine of a simulated volunteer: it claims, fetches, trains, uploads and submits in virtual
time.

The machine calls the coordinator's services directly, and sleeps for the time of network and device
on the virtual clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import msgspec

from coordinator.accounts.accounts import Principal
from coordinator.database import contributions
from coordinator.simulate.labour import SETTLED, Labour, SimulatedUpdate
from coordinator.simulate.loop import LoopClock
from coordinator.simulate.scenario import Server, Workers
from shared.decoding import decode
from shared.errors import Cancelled, Gone, VolunteerError
from shared.files.deletions import delete_file
from shared.network.download_plan import routes
from shared.protocol.accounts import Benchmark, BenchmarkRequest, RegisterRequest
from shared.protocol.contributions import SubmitRequest, UploadRequest, Verdict
from shared.protocol.heartbeat import HeartbeatRequest, TaskBeat
from shared.protocol.leases import ClaimRequest, Lease
from shared.protocol.limits import HEARTBEAT_S
from shared.protocol.versions import BlobRef, VersionManifest
from shared.tensors.codec import CODECS
from shared.workloads.base import KINDS, DatasetManifest

if TYPE_CHECKING:
    from coordinator.database.tasks import Begun
    from coordinator.services import Coordinator
    from coordinator.simulate.pretended_play import PretendedPlay

BITS = 8e-6  # megabits in a byte
CLAIM_WAIT_S = 30.0
DEVICE = "cpu"
READ_BYTES = 1 << 20
GONE = (Gone, Cancelled)

State = Literal["away", "claim", "wait", "down", "prepare", "play", "train", "up"]


@dataclass(frozen=True, slots=True)
class LeasedUpdate:
    """Place of an update among the updates of its lease: its part, its try, and True for the last
    update.
    """

    part: int = 0
    tries: int = 0
    last: bool = True


class SimulatedMachine:
    """Simulated machine of a volunteer; runs until its time to leave, or until it is cancelled."""

    def __init__(self, world: SimulatedWorld, kind: Workers, number: int, seed: int) -> None:
        self._world = world
        self.kind = kind
        self.rng = random.Random(f"{seed} {kind.name} {number}")
        fast = 1 + kind.spread * self.rng.uniform(-1, 1)
        self.speed = kind.steps_per_s * fast
        self.plays = kind.episodes_per_s * fast
        self.trace = Trace(
            f"{kind.name}-{number}" if kind.count > 1 or number > 1 else kind.name, speed=self.speed
        )
        self.labour: Labour | None = None
        self._principal: Principal | None = None
        self._held: dict[int, int] = {}  # task -> attempt
        # by task; set when the coordinator cancels it
        self._cancelled: dict[int, asyncio.Event] = {}
        self._cached: set[str] = set()
        self._uploads: set[asyncio.Task[Verdict | None]] = set()
        self._swapping: asyncio.Task[None] | None = None
        # time and number of each version fetched during the present task of games
        self._newest: list[tuple[float, int]] = []

    # --- time ---

    def _enter(self, state: State) -> None:
        self.trace.enter(state, self._world.clock.monotonic())

    async def _request(self) -> None:
        """Wait for a round trip of varying length, so that no two machines act at the same
        instant.
        """
        latency_s = self.kind.latency_ms / 1000
        await self._world.clock.nap(latency_s * self.rng.uniform(1.0, 1.2) + 1e-6)

    async def _move(self, direction: str, size: float) -> None:
        """Move `size` bytes over this machine's link and the coordinator's link."""
        mbit = self.kind.up_mbit if direction == "up" else self.kind.down_mbit
        rate, busy = self._world.net.rate(direction, mbit), self._world.net.busy
        busy[direction] += 1
        try:
            await self._world.clock.nap(size * BITS / rate)
        finally:
            busy[direction] -= 1
        if direction == "up":
            self.trace.up_bytes += round(size)
        else:
            self.trace.down_bytes += round(size)

    # --- life ---

    async def register(self, workload: str) -> None:
        """Register a volunteer with one machine that has this workload."""
        ids = [self.rng.randbytes(16).hex() for _ in range(2)]
        register = RegisterRequest(
            volunteer_id=ids[0],
            worker_id=ids[1],
            secret=secrets.token_urlsafe(32),
            nickname=f"sim {self.trace.name}",
            workloads=(workload,),
        )
        done = await self._world.coordinator.volunteers.register(register)
        self._principal = Principal(
            volunteer_id=done.volunteer_id,
            worker_id=done.worker_id,
            nickname=done.nickname,
        )
        speed = Benchmark(
            device=DEVICE,
            fp32_flops=0.0,
            bf16_flops=0.0,
            step_flops=self._step_flops,
        )
        request = BenchmarkRequest(benchmarks=(speed,))
        await self._world.coordinator.volunteers.set_benchmark(self._who, request)

    @property
    def _step_flops(self) -> float:
        return self.speed * self._world.step_flops

    async def run(self) -> None:
        """Join, work, and leave."""
        leave_s = self.kind.leave_after_minutes * 60
        await self._world.clock.nap(self.kind.join_after_minutes * 60 + self.rng.uniform(0, 0.01))
        beating = asyncio.create_task(self._beats())
        try:
            while not leave_s or self._world.clock.monotonic() < leave_s:
                await self._turn()
        finally:
            beating.cancel()
            for upload in self._uploads:
                upload.cancel()
            self._enter("away")

    async def _beats(self) -> None:
        while True:
            await self._world.clock.nap(HEARTBEAT_S * self.rng.uniform(0.9, 1.1))
            if self.trace.state != "away":
                beats = tuple(TaskBeat(task=t, attempt=a) for t, a in self._held.items())
                request = HeartbeatRequest(tasks=beats)
                for order in await self._world.coordinator.renewals.beat(self._who, request):
                    if order.order in ("cancel", "gone") and order.task in self._cancelled:
                        self._cancelled[order.task].set()
                if self.trace.state == "play" and (not self._swapping or self._swapping.done()):
                    self._swapping = asyncio.create_task(self._swap())

    async def _swap(self) -> None:
        """Fetch the newest version for the episodes that begin from now on."""
        world = self._world
        head = (await world.coordinator.run_queries.beats())[0]
        manifest = await self._manifest(head.run, head.version)
        await self._fetch_weights(manifest)
        self._newest.append((world.clock.monotonic(), head.version))

    @property
    def _who(self) -> Principal:
        assert self._principal is not None, "register first"
        return self._principal

    async def _turn(self) -> None:
        """Do one task, if there is one."""
        if self.kind.waits:
            await self._until_merged()
        self._enter("up" if self._uploads else "claim")
        lease = await self._claim()
        if lease is None:
            return
        self._held[lease.task] = lease.attempt
        self._cancelled[lease.task] = asyncio.Event()
        try:
            await self._task(lease)
        except GONE:
            self._let_go(lease)
            self.trace.verdicts["gone"] += 1
        except _Vanished:
            await self._vanish()

    async def _until_merged(self) -> None:
        """Wait for the merge that contains this machine's last contribution."""
        self._enter("wait")
        if self._uploads:
            await asyncio.wait(self._uploads)
        world, who = self._world, self._who.worker_id
        watch = world.coordinator.signals.watch(f"run:{world.run}")
        while await world.coordinator.db.read(
            lambda conn: contributions.is_waiting(conn, world.run, who)
        ):
            await watch.wait(CLAIM_WAIT_S)

    async def _vanish(self) -> None:
        self._enter("away")
        self._held.clear()
        self._cancelled.clear()
        for upload in self._uploads:
            upload.cancel()
        self._uploads.clear()
        await self._world.clock.nap(self.kind.back_after_minutes * 60)

    async def _claim(self) -> Lease | None:
        await self._request()
        request = ClaimRequest(
            claim_id=self.rng.randbytes(16).hex(),
            device=DEVICE,
            step_flops=self._step_flops,
            kinds=tuple(kind for role in self.kind.roles for kind in KINDS[role]),
            codecs=tuple(CODECS),
            wait_s=CLAIM_WAIT_S,
        )
        reply = await self._world.coordinator.claims.claim(self._who, request)
        if reply.lease is None and reply.idle is not None:
            await self._world.clock.nap(max(0.2, reply.idle.retry_after_s))
        return reply.lease

    async def _task(self, lease: Lease) -> None:
        await self._fetch_data(lease)
        self._enter("wait")
        if lease.in_step and self._uploads:
            await asyncio.wait(self._uploads)
        await self._request()
        start = await self._world.coordinator.task_leases.begin(
            self._who, lease.task, lease.attempt
        )
        manifest = await self._manifest(start.run, start.version)
        await self._fetch_weights(manifest)
        if lease.part_steps or lease.redo:
            await self._parts(lease, start, manifest)
            return
        result = await self._train(lease, start, manifest)
        sending = asyncio.create_task(self._hand_in(lease, start, result))
        self._uploads.add(sending)
        sending.add_done_callback(self._uploads.discard)
        if lease.in_step:  # the next task may begin only after this upload
            self._enter("up")
            await asyncio.wait([sending])

    async def _parts(self, lease: Lease, start: Begun, manifest: VersionManifest) -> None:
        """Compute the gradients of a lease; each is submitted before the next, and a refused
        gradient is computed again.
        """
        job, part_steps = lease.job, lease.part_steps or lease.job.steps
        part = tries = pulled_at = 0
        while part * part_steps < job.steps:
            first, end = part * part_steps, min(job.steps, (part + 1) * part_steps)
            if tries or (lease.pull_every and first - pulled_at >= lease.pull_every):
                await self._request()
                start = await self._world.coordinator.task_leases.begin(
                    self._who, lease.task, lease.attempt, newest=True
                )
                manifest, pulled_at = await self._manifest(start.run, start.version), first
                await self._fetch_weights(manifest)
            stop = job.stop if end == job.steps else job.start + end * job.batch_size
            piece = msgspec.structs.replace(
                job, start=job.start + first * job.batch_size, stop=stop, steps=end - first
            )
            part_lease = msgspec.structs.replace(lease, job=piece)
            result = await self._train(part_lease, start, manifest)
            self._enter("up")
            verdict = await self._hand_in(
                part_lease, start, result, LeasedUpdate(part, tries, end == job.steps)
            )
            if verdict is None or (verdict.state == "rejected" and not verdict.redo):
                break
            part, tries = (part, tries + 1) if verdict.redo else (part + 1, 0)
        self._let_go(lease)

    def _let_go(self, lease: Lease) -> None:
        """Drop a lease, unless this machine has claimed the task again meanwhile."""
        if self._held.get(lease.task) == lease.attempt:
            del self._held[lease.task], self._cancelled[lease.task]

    async def _manifest(self, run: str, version: int) -> VersionManifest:
        signed = await self._world.coordinator.run_queries.manifest(run, version)
        return decode(signed.payload, VersionManifest)

    async def _fetch_data(self, lease: Lease) -> None:
        data = lease.data or self._world.dataset
        if data is None:
            return
        for index in lease.chunks:
            await self._fetch(
                BlobRef(sha256=data.chunks[index].sha256, size=data.chunks[index].size), 1.0
            )
        # the weights of the other side of a match
        for weights in data.assets.values() if lease.data else ():
            await self._fetch(BlobRef(sha256=weights.sha256, size=weights.size), self._world.scale)

    async def _fetch_weights(self, manifest: VersionManifest) -> None:
        """Fetch the weights by the route with the fewest bytes, like volunteers."""
        weights, ways = manifest.weights, routes(manifest, self._cached)
        if ways and weights.sha256 not in self._cached:
            for blob in ways[0].blobs:
                await self._fetch(blob, self._world.scale)
            self._cached.update(ways[0].hashes)
        await self._fetch(weights, self._world.scale)

    async def _fetch(self, ref: BlobRef, scale: float) -> None:
        if ref.sha256 in self._cached:
            return
        self._cached.add(ref.sha256)
        if self.trace.state != "play":
            self._enter("down")
        await self._request()
        await self._move("down", ref.size * scale)

    async def _train(
        self, lease: Lease, start: Begun, manifest: VersionManifest
    ) -> SimulatedUpdate:
        """Wait for the virtual time of the task, then compute the result, which takes no virtual
        time. Raises _Vanished if the machine is lost meanwhile, Gone for a cancelled task.
        """
        plays, world = lease.job.kind in KINDS["play"], self._world
        self._enter("prepare")
        await world.clock.nap(self.kind.overhead_s)
        self._enter("play" if plays else "train")
        pace = self.plays if plays else self.speed
        takes_s = lease.job.steps / (pace * (1 + self.kind.jitter * self.rng.uniform(-1, 1)))
        began_at = world.clock.monotonic()
        self._newest = [(0.0, start.version)]
        if (rate := self.kind.lost_per_hour / 3600) and (
            stays_s := self.rng.expovariate(rate)
        ) < takes_s:
            await world.clock.nap(stays_s)
            raise _Vanished
        cancelled = self._cancelled[lease.task]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(cancelled.wait(), takes_s)
        if cancelled.is_set():
            raise Gone("the coordinator cancelled the task")
        job = manifest.bound(lease.job)
        if plays:
            assert world.play is not None
            starts = [began_at + number * takes_s / job.steps for number in range(job.steps)]
            newest = [max(v for at, v in self._newest if at <= instant) for instant in starts]
            return world.play.hand_in(newest)
        self.trace.steps += job.steps
        if world.play is not None and lease.data is not None:
            files = [
                await world.coordinator.blobs.local(chunk.sha256) for chunk in lease.data.chunks
            ]
            self.trace.behind.update(world.play.behind(files, start.version))
        assert self.labour is not None
        weights = await world.coordinator.blobs.local(manifest.weights.sha256)
        return self.labour.do(lease.task, job, weights, lease.grant.codec)

    async def _hand_in(
        self, lease: Lease, start: Begun, result: SimulatedUpdate, turn: LeasedUpdate | None = None
    ) -> Verdict | None:
        """Upload and submit a result; return None if the request was refused, for example because
        the lease was lost.
        """
        whole, turn = turn is None, turn or LeasedUpdate()
        try:
            verdict = await self._submit(lease, start, result, turn)
        except GONE:
            self.trace.verdicts["gone"] += 1
        except VolunteerError as error:
            self.trace.verdicts[error.code] += 1
        else:
            settled = verdict.state in SETTLED  # the merge may come before the answer
            self.trace.verdicts[verdict.reason or ("accepted" if settled else verdict.state)] += 1
            return verdict
        finally:
            delete_file(result.path, "settled")
            if whole:
                self._let_go(lease)
            if (
                self.trace.state == "up" and len(self._uploads) == 1
            ):  # no other upload runs, and the machine is idle
                self._enter("claim")
        return None

    async def _submit(
        self, lease: Lease, start: Begun, result: SimulatedUpdate, turn: LeasedUpdate
    ) -> Verdict:
        coordinator, who = self._world.coordinator, self._who
        await self._request()
        announced = UploadRequest(
            task=lease.task,
            attempt=lease.attempt,
            part=turn.part,
            tries=turn.tries,
            sha256=result.sha256,
            size=result.size,
        )
        upload = await coordinator.uploads.create(who, announced)
        await self._move("up", result.size * self._world.scale)
        await coordinator.uploads.write(who, upload.upload_id, upload.offset, _read(result))
        await self._request()
        request = SubmitRequest(
            attempt=lease.attempt,
            part=turn.part,
            tries=turn.tries,
            sha256=result.sha256,
            size=result.size,
            loss_first=result.loss_first,
            loss_last=result.loss_last,
            base_version=start.version,
            codec=lease.grant.codec,
            steps=lease.job.steps,
            samples=lease.job.stop - lease.job.start,
            train_s=lease.job.steps / self.speed,
        )
        number, _ = await coordinator.intake.submit(who, lease.task, request)
        return await coordinator.db.read(lambda conn: coordinator.intake.stands(conn, who, number))


class _Vanished(Exception):
    """Raised when a machine ends suddenly, as when it is unplugged."""


async def _read(result: SimulatedUpdate) -> AsyncIterator[bytes]:
    with result.path.open("rb") as file:
        while data := file.read(READ_BYTES):
            yield data


@dataclass(slots=True)
class Net:
    """Link of the coordinator, shared evenly by its transfers."""

    server: Server
    busy: dict[str, int] = field(default_factory=lambda: {"up": 0, "down": 0})

    def rate(self, direction: str, mbit: float) -> float:
        """Return the megabits a second for one more transfer."""
        whole = self.server.down_mbit if direction == "up" else self.server.up_mbit
        return min(mbit, whole / (self.busy[direction] + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedWorld:
    """Surroundings that all machines share."""

    coordinator: Coordinator
    clock: LoopClock
    net: Net
    run: int  # id of the run
    dataset: DatasetManifest | None
    scale: float  # bytes of the real model / bytes of the simulated model
    step_flops: float
    play: PretendedPlay | None  # None: a run whose machines only train


@dataclass(slots=True)
class Trace:
    """History of one machine; times are seconds since the simulation began."""

    name: str
    speed: float = 0.0  # optimiser steps a second
    segments: list[tuple[float, float, State]] = field(default_factory=list)  # start, stop, state
    state: State = "away"
    since: float = 0.0
    up_bytes: int = 0
    down_bytes: int = 0
    steps: int = 0
    behind: Counter[int] = field(default_factory=Counter)  # learnt episodes by their staleness
    # contributions by state or reason at the answer; merged contributions count as accepted
    verdicts: Counter[str] = field(default_factory=Counter)

    def enter(self, state: State, now: float) -> None:
        """Enter a state at `now`."""
        if now > self.since:
            self.segments.append((self.since, now, self.state))
        self.state, self.since = state, now

    def seconds(self, until: float = math.inf) -> Counter[State]:
        """Return the seconds spent in each state before `until`."""
        seconds: Counter[State] = Counter()
        for start, stop, state in self.segments:
            spent = max(0.0, min(stop, until) - start)
            seconds[state] += spent  # type: ignore[assignment]  # a Counter of seconds
        return seconds
