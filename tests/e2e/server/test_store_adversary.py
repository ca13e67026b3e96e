"""Random interleavings of uploads, sweeps, kills and a hostile store: nothing acknowledged is lost,
and no other bytes are used in its place.

STORE_EPISODES and STORE_SEED search longer, or elsewhere.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest
from sqlalchemy import Connection, Delete, delete

from coordinator.accounts.bearer_tokens import Principal
from coordinator.config import Settings
from coordinator.database import datasets, upload_rows
from coordinator.database.engine.open_database import Database, Runner
from coordinator.database.tables.datasets import dataset_blobs
from coordinator.database.unreferenced_blobs import SWEEPER_S
from coordinator.intake import uploads
from coordinator.services import Coordinator
from coordinator.storage.s3 import S3Blobs
from coordinator.upkeep.store_mark import LEASE_S, RENEW_S
from shared.errors import Configuration, InvalidFrame, Unavailable, VolunteerError
from shared.protocol.contributions import UploadInfo, UploadRequest
from shared.workloads.base import ChunkRef
from tests.support.local_coordinator import LocalCoordinator, prepare
from tests.support.virtual_clock import VirtualClock
from tests.support.wild_store import Killed, Life, Turns, WildStore

EPISODES, SEED = int(os.environ.get("STORE_EPISODES", "40")), os.environ.get("STORE_SEED", "1")
PIECE_BYTES = 64
TRIES, RETRY_S = 30, 10.0
T = TypeVar("T")


class MortalRunner:
    """A database's runner, for a process that may be killed at each call."""

    def __init__(self, inner: Runner, life: Life) -> None:
        self._inner, self._life = inner, life
        self.failed = inner.failed

    async def write(self, fn: Callable[[Connection], T]) -> T:
        await self._life.step()
        result = await self._inner.write(fn)
        await self._life.step()  # a process may end between a commit and its answer
        return result

    async def read(self, fn: Callable[[Connection], T]) -> T:
        await self._life.step()
        return await self._inner.read(fn)

    async def bridge(self, deliver: Callable[[str | None], None]) -> Callable[[str], None]:
        return await self._inner.bridge(deliver)

    async def close(self) -> None:
        await self._inner.close()


class World:
    """A store, a database, two replicas, and what was acknowledged."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.folder, self.rng = folder, rng
        self.clock, self.turns = VirtualClock(), Turns(rng)
        self.store = WildStore(rng, self.clock)
        self.replicas: list[Coordinator] = []
        self.lives: list[Life] = []
        self.principal = Principal(volunteer_id="", worker_id="", nickname="")
        self.task = self.attempt = self.places = self.starts = 0
        self.dataset = 0
        self.pool = [rng.randbytes(rng.randrange(1, 3 * PIECE_BYTES)) for _ in range(8)]
        self.unfinished: list[tuple[UploadRequest, bytes]] = []
        self.files: dict[str, bytes] = {}  # files that a dataset keeps, acknowledged
        self.uploads: dict[bytes, UploadInfo] = {}  # uploads, acknowledged

    def url(self, name: str = "shared") -> str:
        return f"sqlite:///{self.folder}/{name}.db"

    async def replica(self, name: str, database: str, life: Life) -> Coordinator:
        settings = Settings(
            data_dir=str(self.folder / name),
            database=database,
            blobs="s3://bucket",
            space_floor_bytes=0,
        )
        db = await Database.open(database)
        db._runner = MortalRunner(db._runner, life)
        made = await Coordinator.build(settings, self.clock, database=db)
        assert isinstance(made.blobs, S3Blobs)
        calls: Any = self.store.of(life)
        made.blobs._obstore = calls
        return made

    async def play(self, *actors: Coroutine[None, None, T]) -> list[T]:
        """Give turns until every actor has ended."""
        tasks = [asyncio.ensure_future(actor) for actor in actors]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0 if self.turns.next() else 0.0002)  # else threads are at work
        return [task.result() for task in tasks]

    async def start(self, number: int) -> None:
        """Start a replica, or start it again after its process was killed."""
        life, self.starts = Life(self.turns), self.starts + 1
        name = f"replica{self.starts}"
        if number < len(self.replicas):
            former = self.replicas[number]
            await end(former)
            if self.rng.random() < 0.5:  # else a container without a volume
                shutil.copytree(former.settings.directory / "cache", self.folder / name / "cache")
        (self.folder / name).mkdir(exist_ok=True)
        key = self.folder / "signing.key"
        if key.exists():
            shutil.copy(key, self.folder / name)
        made = await self.replica(name, self.url(), life)
        shutil.copy(made.settings.signing_key_file, key)
        self.replicas[number:] = [made, *self.replicas[number + 1 :]]
        self.lives[number:] = [life, *self.lives[number + 1 :]]

    async def supervise(self, actors: list[asyncio.Task[None]], deadly: float) -> None:
        """Start replicas again until the actors have ended."""
        while not all(actor.done() for actor in actors):
            await self.turns.wait()
            for number, life in enumerate(self.lives):
                if life.dead:
                    await self.start(number)
                    self.lives[number].deadly = deadly

    def a_replica(self) -> Coordinator:
        return self.rng.choice(self.replicas)

    def content(self) -> bytes:
        return self.rng.choice(self.pool)


async def end(replica: Coordinator) -> None:
    """Let a process go: its connections and threads end."""
    runner = replica.db._runner
    assert isinstance(runner, MortalRunner)
    runner._life.dead = True
    await runner.close()
    replica.threads.shutdown(wait=False, cancel_futures=True)


def sha_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# --- actors ---


async def upload(world: World) -> None:
    """Announce, send and finish one upload at replicas that change, as a volunteer does."""
    data = world.content() + world.rng.randbytes(world.rng.choice((0, 0, 4)))
    world.places += 1
    request = UploadRequest(
        task=world.task,
        attempt=world.attempt,
        part=world.places % 1024,
        tries=world.places // 1024,
        size=len(data),
        sha256=sha_of(data),
    )
    for _ in range(TRIES):
        await world.turns.wait()
        with suppress(VolunteerError, Killed, asyncio.CancelledError):
            if await step(world, request, data):
                return
    world.unfinished.append((request, data))


async def step(world: World, request: UploadRequest, data: bytes) -> bool:
    """Return True once an upload is complete; send the next piece otherwise."""
    if world.rng.random() < 0.3:
        both = (one.uploads.create(world.principal, request) for one in world.replicas)
        info, _ = await asyncio.gather(*both)
    else:
        info = await world.a_replica().uploads.create(world.principal, request)
    if info.complete:
        world.uploads[data] = info
    else:
        await send(world, info, data)
    return info.complete


async def finish(world: World, request: UploadRequest, data: bytes) -> None:
    """Complete an upload at a good store: nothing holds it up for more than a sweeper's time."""
    for _ in range(int(SWEEPER_S / RETRY_S) + 8):
        try:
            if await step(world, request, data):
                return
        except (Unavailable, InvalidFrame):  # InvalidFrame: other bytes were put at its URL
            await world.clock.advance(RETRY_S)
    raise AssertionError("an upload did not end")


async def send(world: World, info: UploadInfo, data: bytes) -> None:
    rest = data[info.offset :]
    if info.url and world.rng.random() < 0.8:
        await world.turns.wait()
        world.store.put(info.url, rest[:PIECE_BYTES])
        return

    async def stream() -> AsyncIterator[bytes]:
        for start in range(0, len(rest), 50):
            await world.turns.wait()
            yield rest[start : start + 50]

    receiver = world.a_replica().uploads
    await receiver.write(world.principal, info.upload_id, info.offset, stream())


async def evil(world: World) -> None:
    """Use URLs again, for other bytes."""
    for _ in range(3):
        await world.turns.wait()
        if world.store.signed:
            key = world.rng.choice(world.store.signed[-6:])
            size = int(key.rpartition("-")[2]) + world.rng.choice((0, 0, 0, 1))
            world.store.put(key, world.rng.randbytes(size))


async def add_file(world: World) -> None:
    """Store a file of a dataset; the machine may sleep for hours in between."""
    replica, data = world.a_replica(), world.content()
    with suppress(VolunteerError, Killed, asyncio.CancelledError):
        sha = await replica.blobs.put_bytes(data)
        if world.rng.random() < 0.2:
            await hours(world)
        ref = ChunkRef(sha256=sha, size=len(data), items=1)

        def serve(conn: Connection) -> None:
            now = world.clock.now()
            datasets.serve(conn, world.dataset, [ref], now, replica.blobs.serials)
            world.files[sha] = data  # here, as a removal may follow before this actor goes on

        await replica.db.write(serve)


async def remove_file(world: World) -> None:
    """Let go of a file on purpose."""
    await world.turns.wait()
    for sha in [*world.files][:1]:
        removal = delete(dataset_blobs).where(dataset_blobs.c.sha256 == sha)

        def remove(conn: Connection, sha: str = sha, removal: Delete = removal) -> None:
            conn.execute(removal).close()
            world.files.pop(sha, None)

        with suppress(VolunteerError, Killed, asyncio.CancelledError):
            await world.a_replica().db.write(remove)


async def sweep(world: World) -> None:
    for _ in range(2):
        with suppress(VolunteerError, Killed, asyncio.CancelledError):
            await world.a_replica().uploads.expire()
            await world.a_replica().upkeep.sweep()


async def hours(world: World) -> None:
    await world.turns.wait()
    await world.clock.advance(world.rng.choice((60.0, 3700.0, 3700.0, 90_000.0)))


async def repeat(world: World) -> None:
    for _ in range(3):
        await world.turns.wait()
        world.store.repeat()


ACTORS: tuple[Callable[[World], Coroutine[None, None, None]], ...] = (
    upload, upload, upload, evil, add_file, add_file, remove_file, sweep, sweep, hours, repeat,
)  # fmt: skip


async def slip(world: World) -> None:
    """An empty database, or a copy, at the same store with the same key: it may sweep."""
    name = f"slip{world.places}"
    world.places += 1
    source = "empty" if world.rng.random() < 0.5 else "shared"
    life = Life(world.turns)
    if source == "shared":
        for one in world.replicas:
            await one.db.read(lambda conn: None)
    for suffix in ("", "-wal"):
        with suppress(FileNotFoundError):
            shutil.copy(world.folder / f"{source}.db{suffix}", world.folder / f"{name}.db{suffix}")
    (world.folder / name).mkdir()
    shutil.copy(world.folder / "signing.key", world.folder / name)
    try:
        other = await world.replica(name, world.url(name), life)
    except Configuration:
        return
    with suppress(VolunteerError):
        await other.store_marks.claim()
        for seconds in (RENEW_S + 1, RENEW_S + 1, RENEW_S + 1, 90_000.0):  # both are at work
            await world.clock.advance(seconds)
            for one in world.rng.sample([world.replicas[0], other], 2):
                await one.store_marks.renew()
        await other.upkeep.sweep()
    await end(other)


# --- episodes ---


async def set_up(world: World) -> None:
    """A run with a volunteer that holds a task, served by two replicas."""
    settings = Settings(data_dir=str(world.folder / "one"))
    (world.folder / "one").mkdir()
    prepare(settings)
    database = world.folder / "one" / "coordinator.sqlite3"
    shutil.copy(database, world.folder / "empty.db")
    database.rename(world.folder / "shared.db")
    await world.start(0)
    await world.replicas[0].store_marks.claim()
    home = LocalCoordinator(world.replicas[0], world.clock)
    await home.start_run()
    ann = await home.join("Ann")
    lease = await ann.claim()
    await ann.begin(lease)
    world.task, world.attempt = lease.task, lease.attempt
    world.principal = Principal(
        volunteer_id=ann.volunteer_id, worker_id=ann.worker_id, nickname="Ann"
    )
    rows = await home.coordinator.db.read(datasets.every)
    world.dataset = rows[0].id
    await world.start(1)


async def episode(world: World) -> None:
    rng = world.rng
    world.store.wild, deadly = rng.choice((0.0, 0.1, 0.3)), rng.choice((0.0, 0.0, 0.03))
    for life in world.lives:
        life.deadly = deadly
    actors = [asyncio.ensure_future(rng.choice(ACTORS)(world)) for _ in range(rng.randrange(2, 8))]

    async def ended() -> None:
        await asyncio.gather(*actors)

    await world.play(ended(), world.supervise(actors, deadly))
    world.store.wild = 0.0
    for life in world.lives:
        life.deadly = 0.0
    await world.play(world.supervise([], 0.0), settled(world))


async def settled(world: World) -> None:
    """With a good store again, everything acknowledged is there, with its own bytes."""
    for number, life in enumerate(world.lives):
        if life.dead:
            await world.start(number)
    for request, data in world.unfinished:
        await finish(world, request, data)
    world.unfinished.clear()
    if world.rng.random() < 0.1:
        await slip(world)
        await world.clock.advance(2 * LEASE_S)
        await world.replicas[0].store_marks.take_over()
    now = world.clock.now()
    rows = await world.replicas[0].db.read(
        lambda conn: upload_rows.by_ids(conn, [info.upload_id for info in world.uploads.values()])
    )
    for data, info in [*world.uploads.items()]:
        if info.expires_at < now:
            del world.uploads[data]
        else:
            assert rows[info.upload_id].complete
    for data in (*world.files.values(), *world.uploads):
        sha = sha_of(data)
        assert world.store.objects[f"{sha[:2]}/{sha}"].data == data
        for replica in world.replicas:
            assert (await replica.blobs.local(sha)).read_bytes() == data
    registered = await world.replicas[0].db.read(datasets.all_registered)
    missing = [sha for sha in registered if f"{sha[:2]}/{sha}" not in world.store.objects]
    assert missing == []


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_PUBLIC"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "us-east-1")
    monkeypatch.setattr(uploads, "DIRECT_BYTES", 1)
    monkeypatch.setattr(uploads, "UPLOAD_PIECE_BYTES", PIECE_BYTES)


@pytest.mark.slow
async def test_nothing_acknowledged_is_lost_or_other(tmp_path: Path) -> None:
    world = World(tmp_path, random.Random(SEED))
    await world.play(set_up(world))
    for number in range(EPISODES):
        try:
            await episode(world)
        except BaseException as error:
            error.add_note(f"episode {number} of seed {SEED}")
            raise
    for replica in world.replicas:
        await end(replica)
