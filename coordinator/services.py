"""Wiring: the services of a coordinator, built from its settings.

The organiser's commands use the services alone (`opened`); a server adds background work (`working`) and, in `app.py`,
routes.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Self

import msgspec
import structlog

from coordinator.accounts.accounts import Volunteers
from coordinator.accounts.ledger import Ledger
from coordinator.certificates import write_private
from coordinator.config import Settings
from coordinator.database import key_values
from coordinator.database.engine.open import Database, is_new, migrate
from coordinator.intake.intake import Intake
from coordinator.intake.uploads import Uploads
from coordinator.merging.evaluation import Evaluation
from coordinator.merging.merger import Merger
from coordinator.rate_limit import Rates
from coordinator.runs.datasets import Datasets
from coordinator.runs.export import Export
from coordinator.runs.runs import Runs
from coordinator.runs.samples import Samples
from coordinator.scheduling.heartbeat import Pulse
from coordinator.scheduling.queue import Queue
from coordinator.selfplay.replay import Replay
from coordinator.signals import Signals
from coordinator.storage.blobs import BlobStore
from coordinator.storage.boxes import Depot
from coordinator.storage.disk_space import Space
from coordinator.storage.folders import data_directory
from coordinator.storage.open import open_blobs
from coordinator.traffic import Traffic
from coordinator.ttl_cache import Fresh
from coordinator.upkeep.checks import Checks
from coordinator.upkeep.upkeep import Upkeep
from shared.clock import Clock, SystemClock
from shared.decoding import decode
from shared.errors import Configuration
from shared.links import JoinLink
from shared.protocol.accounts import RunInfo, ServerInfo
from shared.protocol.limits import PROTOCOL, PROTOCOL_MIN
from shared.signing import SigningKey, fingerprint

SERVER_INFO_S = 1.0
RESTART_S = 1.0  # a background job that failed starts again after this long
STOP_S = 20.0  # ... and has this long to end

log = structlog.get_logger("app")

Job = Callable[[asyncio.Event], Awaitable[None]]


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """Where volunteers reach the server: what join links are made of."""

    url: str
    tls_pin: str = ""


@dataclass(frozen=True, kw_only=True)
class Coordinator:
    """Every service of one coordinator, wired together."""

    settings: Settings
    clock: Clock
    db: Database
    blobs: BlobStore
    key: SigningKey
    signals: Signals
    threads: Executor
    space: Space
    rates: Rates
    traffic: Traffic
    volunteers: Volunteers
    ledger: Ledger
    queue: Queue
    uploads: Uploads
    datasets: Datasets
    runs: Runs
    export: Export
    samples: Samples
    intake: Intake
    merger: Merger
    evaluation: Evaluation
    replay: Replay
    upkeep: Upkeep
    pulse: Pulse
    checks: Checks
    depot: Depot
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _admin_hash: bytes
    _address: list[Address]  # one, that a server replaces when it knows where it listens
    _listing: Fresh[tuple[RunInfo, ...]]

    @classmethod
    async def build(
        cls,
        settings: Settings,
        clock: Clock | None = None,
        *,
        exclusive: bool = False,
        database: Database | None = None,
    ) -> Self:
        """Open database, blobs and keys (made where there are none) and wire the services.

        `exclusive` locks the data directory, for a server; `database` is used in place of the one that the settings name
        and closed with the services. Raises Configuration for whatever cannot be opened.
        """
        data_directory(settings.directory)
        clock = clock or SystemClock()
        db = database or await _open_database(settings, clock, exclusive)
        try:
            return await cls._wire(settings, clock, db)
        except BaseException:
            await db.close()
            raise

    @classmethod
    async def _wire(cls, settings: Settings, clock: Clock, db: Database) -> Self:
        blobs = open_blobs(settings.blobs_url, settings.directory / "cache")
        key = SigningKey.load_or_create(settings.signing_key_file)
        signals = Signals(clock)
        await signals.connect(db)
        cores = os.cpu_count() or 1
        threads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="work")
        volunteers = Volunteers(db, clock, settings, signals)
        queue = Queue(db, clock, signals, settings)
        uploads = Uploads(db, clock, blobs, settings)
        runs = Runs(db, clock, signals, blobs, key, threads)
        intake = Intake(db, clock, signals, blobs, threads)
        ledger = Ledger(db)
        space = Space(settings.directory, settings.space_floor_bytes, clock)
        evaluation = Evaluation(
            db, clock, signals, blobs, settings.eval_threads or max(1, cores // 2)
        )
        merger = Merger(db, clock, signals, blobs, runs, evaluation)
        # Beside them a merge writes, hashes and syncs in threads of its own.
        merging = settings.merge_threads or max(1, cores // 2)
        merger.configure(threads=merging, lease_s=settings.merge_lease_s)
        return cls(
            settings=settings,
            clock=clock,
            db=db,
            blobs=blobs,
            key=key,
            signals=signals,
            threads=threads,
            space=space,
            rates=Rates(settings, clock.monotonic),
            traffic=Traffic(),
            volunteers=volunteers,
            ledger=ledger,
            queue=queue,
            uploads=uploads,
            datasets=Datasets(db, clock, blobs, threads),
            runs=runs,
            export=Export(db, blobs, threads),
            samples=Samples(db, clock, blobs, threads),
            intake=intake,
            merger=merger,
            evaluation=evaluation,
            replay=Replay(db, clock, signals, blobs, threads),
            upkeep=Upkeep(db, clock, signals, blobs, intake, uploads),
            pulse=Pulse(db, clock, queue, runs),
            checks=Checks(db, blobs, ledger, key),
            depot=Depot(blobs.scratch() / "depot", clock, space),
            _admin_hash=_admin_hash(settings),
            _address=[await _stored_address(db, settings)],
            _listing=Fresh(runs.listing, SERVER_INFO_S, clock),
        )

    async def close(self) -> None:
        """Let everything go. Background jobs must have ended."""
        await self.db.close()
        self.threads.shutdown(wait=False, cancel_futures=True)

    # --- who and where this is ---

    @property
    def fingerprint(self) -> str:
        """Of the key that signs manifests."""
        return fingerprint(self.key.public_key)

    @property
    def address(self) -> Address:
        return self._address[0]

    async def set_address(self, address: Address) -> None:
        """Remember where the server is reached, for join links that other processes print."""
        self._address[0] = address
        stored = msgspec.json.encode(address).decode()
        await self.db.write(lambda conn: key_values.put(conn, key_values.ADDRESS, stored))

    def link(self, code: str = "") -> JoinLink:
        """A join link to this coordinator."""
        where = self.address
        return JoinLink(
            url=where.url, fingerprint=self.fingerprint, tls_pin=where.tls_pin, code=code
        )

    def is_admin(self, token: str) -> bool:
        """Whether this is the organiser's token."""
        return secrets.compare_digest(hashlib.sha256(token.encode()).digest(), self._admin_hash)

    async def server_info(self) -> ServerInfo:
        """What anybody may know of this coordinator; the runs may be a second old."""
        return ServerInfo(
            name=self.settings.name,
            software=software(),
            protocol=PROTOCOL,
            protocol_min=PROTOCOL_MIN,
            protocol_min_next=PROTOCOL_MIN,
            public_key=self.key.public_key.hex(),
            fingerprint=self.fingerprint,
            invite_only=self.settings.invite_only,
            contact=self.settings.contact,
            now=self.clock.now(),
            runs=await self._listing.get(),
        )

    async def ping(self) -> None:
        """Ask the database something. Raises Unavailable when it does not answer."""
        await self.db.read(lambda conn: key_values.get(conn, key_values.ADDRESS))

    async def gauges(self) -> dict[str, dict[str, float]]:
        """Figures of the moment for monitoring, by name and run ("" = of no run)."""
        found: dict[str, dict[str, float]] = {
            "read_only": {"": float(self.space.read_only)},
            "disk_free_bytes": {"": float(self.space.free_bytes())},
            "run_version": {},
            "run_workers": {},
            "run_loss": {},
            "run_global_steps": {},
        }
        for run in await self._listing.get():
            found["run_version"][run.name] = run.version
            found["run_workers"][run.name] = run.workers
            found["run_global_steps"][run.name] = run.steps
            if run.loss is not None:
                found["run_loss"][run.name] = run.loss
        return found

    async def check_ledger(self) -> list[str]:
        """What is wrong with the books; empty when they balance."""
        return list(await self.ledger.check())

    # --- background work ---

    def jobs(self) -> dict[str, Job]:
        """What a server does beside answering."""
        return {
            "queue": self.queue.run,
            "merger": self.merger.run,
            "evaluation": self.evaluation.run,
            "replay": self.replay.run,
            "upkeep": self.upkeep.run,
            "space": self.space.run,
            "depot": self.depot.run,
        }

    async def _keep_running(self, name: str, job: Job) -> None:
        """Run a job until the server stops; one that fails is logged and begun again."""
        while not self.stopping.is_set():
            try:
                await job(self.stopping)
            except Exception:
                log.exception("background job failed", job=name)
                await self.clock.sleep(RESTART_S)

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """Background jobs run inside; leaving stops them and waits for the end of what they are at."""
        tasks = [
            asyncio.create_task(self._keep_running(*job), name=job[0])
            for job in self.jobs().items()
        ]
        try:
            yield
        finally:
            self.stopping.set()
            for topic in ("queue", "contributions", "versions", "runs"):
                self.signals.deliver(topic)
            _, late = await asyncio.wait(tasks, timeout=STOP_S)
            for task in late:
                log.warning("background job is cut off", job=task.get_name())
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _open_database(settings: Settings, clock: Clock, exclusive: bool) -> Database:
    """The database that the settings name, made where there is none."""
    if await is_new(settings.database_url):
        await migrate(settings.database_url)
    system = clock if isinstance(clock, SystemClock) else None
    return await Database.open(settings.database_url, clock=system, exclusive=exclusive)


@lru_cache(maxsize=1)
def software() -> str:
    """The version of the installed package; "0" in a tree that was never installed."""
    try:
        return version("volunteer")
    except PackageNotFoundError:
        return "0"


async def _stored_address(db: Database, settings: Settings) -> Address:
    """Where the last server was, or where one would be."""
    stored = await db.read(lambda conn: key_values.get(conn, key_values.ADDRESS))
    if stored:
        return decode(stored, Address)
    return Address(url=settings.url or f"http://127.0.0.1:{settings.port}")


def _admin_hash(settings: Settings) -> bytes:
    """SHA-256 of the organiser's token, which is made on first use."""
    path = settings.admin_token_file
    if not path.exists():
        write_private(path, secrets.token_urlsafe(32).encode() + b"\n")
    try:
        token = path.read_bytes().strip()
    except OSError as error:
        raise Configuration(f"{path} cannot be read: {error.strerror}") from error
    if len(token) < 20:
        raise Configuration(f"{path} holds no token: delete it and a new one is made")
    return hashlib.sha256(token).digest()


@asynccontextmanager
async def opened(
    settings: Settings, clock: Clock | None = None, *, exclusive: bool = False
) -> AsyncIterator[Coordinator]:
    """A coordinator's services, as the organiser's commands use them, also while a server runs."""
    coordinator = await Coordinator.build(settings, clock, exclusive=exclusive)
    try:
        yield coordinator
    finally:
        await coordinator.close()
