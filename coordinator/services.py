"""Composition root: the services of a coordinator, built from its settings.

The organiser's commands use the services alone (`opened`); a server adds background work
(`working`) and, in `http/app.py`, routes.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Self

import structlog

from coordinator.accounts.accounts import Volunteers
from coordinator.accounts.api_keys import ApiKeys
from coordinator.accounts.ledger import Ledger
from coordinator.accounts.registration_challenges import Challenges
from coordinator.accounts.server_identity import ServerIdentity, own_key, software
from coordinator.accounts.transparency import Transparency
from coordinator.attendance import Attendance
from coordinator.batcher import Batcher
from coordinator.checking.audits import Audits
from coordinator.checking.case import Draws
from coordinator.checking.checkers import Checkers
from coordinator.checking.drifts import Drifts
from coordinator.checking.recompute_queue import Recomputes
from coordinator.compute import Compute, half_the_cores
from coordinator.config import Settings, without_password
from coordinator.database import unreferenced_blobs
from coordinator.database.engine.open_database import Database, file_of, is_new, migrate
from coordinator.experience.harvest import Harvest
from coordinator.experience.replay import Replay
from coordinator.inference.answerers import Answerers
from coordinator.inference.answers import Answers
from coordinator.inference.builtin_engine import BuiltinEngine, ProcessLimits
from coordinator.inference.inference_engine import InferenceEngine
from coordinator.inference.volunteer_engine import VolunteerEngine
from coordinator.intake.intake import Examiners, Intake
from coordinator.intake.uploads import Uploads
from coordinator.merging.evaluation import Evaluation
from coordinator.merging.merger import Merger
from coordinator.platform import Platform
from coordinator.rate_limit import Rates
from coordinator.rules.overview import ReplicaFigures
from coordinator.runs.datasets import Datasets
from coordinator.runs.export import Export
from coordinator.runs.queries import RunQueries
from coordinator.runs.runs import Runs
from coordinator.runs.wind_down import WindDown
from coordinator.scheduling.claims import Claims, ClaimTerms
from coordinator.scheduling.heartbeat_replies import Heartbeats
from coordinator.scheduling.member_data import MemberDeclarations
from coordinator.scheduling.renewals import Renewals
from coordinator.scheduling.task_leases import TaskLeases
from coordinator.scheduling.task_list import TaskList
from coordinator.signals import Signals
from coordinator.storage.announced_blobs import Announcer
from coordinator.storage.blobs import in_pool
from coordinator.storage.disk_space import Space
from coordinator.storage.folders import data_directory
from coordinator.storage.open_blobs import open_blobs
from coordinator.storage.transfer_boxes import TransferBoxes
from coordinator.traffic import TrafficCounter
from coordinator.upkeep.alerts import Alerts
from coordinator.upkeep.full_check import Checks
from coordinator.upkeep.lost_transactions import LostTransactions
from coordinator.upkeep.overview_cache import Overviews
from coordinator.upkeep.replica_beats import Beats
from coordinator.upkeep.store_mark import StoreMarks, stored_mark
from coordinator.upkeep.upkeep import Upkeep
from shared.clock import Clock, SystemClock, pause
from shared.errors import Configuration, VolunteerError
from shared.programs.machine_limits import disk_bytes
from shared.proofs.signing import SigningKey

RESTART_S = 1.0  # wait before a failed background job starts again
ANNOUNCED_MAX = 64  # blobs announced in one transaction
STOP_S = 20.0  # time that background jobs have to end

log = structlog.get_logger("app")

BackgroundJob = Callable[[asyncio.Event], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Coordinator(Platform):
    """Every service of one coordinator, wired together."""

    computing: tuple[Compute, ...]
    rates: Rates
    traffic: TrafficCounter
    server: ServerIdentity
    volunteers: Volunteers
    ledger: Ledger
    api_keys: ApiKeys
    answers: Answers
    transparency: Transparency
    claims: Claims
    renewals: Renewals
    heartbeats: Heartbeats
    task_leases: TaskLeases
    uploads: Uploads
    datasets: Datasets
    runs: Runs
    wind_down: WindDown
    run_queries: RunQueries
    export: Export
    intake: Intake
    recomputes: Recomputes
    alerts: Alerts
    merger: Merger
    evaluation: Evaluation
    replay: Replay
    store_marks: StoreMarks
    upkeep: Upkeep
    checks: Checks
    overviews: Overviews
    boxes: TransferBoxes
    draining: asyncio.Event = field(default_factory=asyncio.Event)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    async def build(
        cls,
        settings: Settings,
        clock: Clock | None = None,
        *,
        exclusive: bool = False,
        separate: bool = False,
        keyless: bool = False,
        database: Database | None = None,
    ) -> Self:
        """Open database, blobs and keys (made where there are none) and wire the services.

        `exclusive` locks the data directory, for a server. `separate` computes in child processes.
        `keyless` does not load the signing key, for a command that signs nothing. `database` is
        used instead of the database that the settings name, and is closed with the services. Raises
        Configuration for what cannot be opened, and for the key of another database.
        """
        data_directory(settings.directory)
        clock = clock or SystemClock()
        db = database or await _open_database(settings, clock, exclusive)
        try:
            key = SigningKey.new() if keyless else await own_key(db, settings.signing_key_file)
            coordinator = await cls._wire(settings, clock, db, key, separate)
            if not keyless:
                await coordinator.server.load_tokens()
            return coordinator
        except BaseException:
            await db.close()
            raise

    @classmethod
    async def _wire(
        cls, settings: Settings, clock: Clock, db: Database, key: SigningKey, separate: bool
    ) -> Self:
        signals, traffic = Signals(clock), TrafficCounter()
        blobs = open_blobs(settings.blobs_url, settings.directory / "cache", _announcer(db, clock))
        await signals.connect(db)
        on = Platform(
            settings=settings,
            clock=clock,
            db=db,
            blobs=blobs,
            key=key,
            signals=signals,
            threads=ThreadPoolExecutor(max_workers=4, thread_name_prefix="work"),
            space=Space(settings.directory, settings.space_floor_bytes, clock, blobs.scratch()),
            attendance=Attendance(clock),
        )
        renewals = Renewals(db, clock, on.attendance)
        claims = Claims(db, clock, signals, renewals, ClaimTerms.of(settings))
        computing = _computing(separate)
        runs = Runs(on, computing[0], Drifts(on, computing[2]))
        examiners, uploads = _examiners(on, computing[1:]), Uploads(on)
        intake = Intake(on, examiners)
        server = ServerIdentity(on, runs.queries.listing)
        await server.load()
        marks = StoreMarks(settings, db, blobs, key, clock)
        merger = Merger(on, runs, evaluation := Evaluation(on, computing[0]))
        return cls(
            **{item.name: getattr(on, item.name) for item in fields(on)},
            computing=computing,
            rates=Rates(settings, clock.monotonic),
            traffic=traffic,
            server=server,
            volunteers=Volunteers(db, clock, settings, signals, Challenges.of(on)),
            ledger=Ledger(db),
            api_keys=ApiKeys(db, clock, settings),
            answers=Answers(db, clock, settings),
            transparency=Transparency(db, clock, key),
            claims=claims,
            renewals=renewals,
            heartbeats=Heartbeats(db, clock, renewals, runs),
            task_leases=TaskLeases(db, clock, signals, claims, renewals),
            uploads=uploads,
            datasets=Datasets(on),
            runs=runs,
            wind_down=WindDown(on),
            run_queries=runs.queries,
            export=Export(db, on.blobs, computing[0]),
            intake=intake,
            recomputes=examiners.recomputes,
            alerts=Alerts(on, traffic, runs.queries.standstills),
            merger=merger,
            evaluation=evaluation,
            replay=Replay(on, runs.queries),
            store_marks=marks,
            upkeep=Upkeep(on, intake, uploads, marks),
            checks=Checks(db, on.blobs, Ledger(db), key),
            overviews=Overviews(db, clock, settings.name, runs.queries.standstills),
            boxes=TransferBoxes(on.blobs.scratch() / "depot", clock, on.space),
        )

    @cached_property
    def checkers(self) -> Checkers:
        """Return the service of the organiser's checkers."""
        return Checkers(self, self.recomputes)

    @cached_property
    def member_data(self) -> MemberDeclarations:
        """Return the service of the declarations of members' data."""
        return MemberDeclarations(self.db, self.clock, self.signals)

    @cached_property
    def losses(self) -> LostTransactions:
        """Return the watch over losses of transactions."""
        return LostTransactions(self)

    @property
    def task_list(self) -> TaskList:
        """Return the list of tasks for the organiser."""
        return TaskList(self.db, self.clock, self.signals)

    @property
    def audits(self) -> Audits:
        """Return the service of audits by volunteers."""
        return self.intake.audits

    @property
    def answerers(self) -> Answerers:
        """Return the machines of volunteers that answer prompts."""
        return self.answers.answerers

    async def close(self) -> None:
        """Close everything. Background jobs must have ended."""
        self.answers.meter.close()
        await self.db.close()
        self.threads.shutdown(wait=False, cancel_futures=True)
        for compute in self.computing:
            compute.close()

    # --- background work ---

    def jobs(self) -> dict[str, BackgroundJob]:
        """Return the background jobs of a server, by name."""
        return (self._computing_jobs() if Compute.possible() else {}) | {
            "leases": self.task_leases.run,
            "audits": self.audits.run,
            "alerts": self.alerts.run,
            "replay": self.replay.run,
            "upkeep": self.upkeep.run,
            "losses": self.losses.run,
            "metering": self.answers.meter.run,
            "record": self.transparency.run,
            "space": self.space.run,
            "boxes": self.boxes.run,
            "beats": Beats(
                self.db, self.clock, self.settings.directory, self._figures(), self._divide_limits
            ).run,
        }

    def _computing_jobs(self) -> dict[str, BackgroundJob]:
        return {
            "merger": self.merger.run,
            "evaluation": self.evaluation.run,
            "recomputes": self.recomputes.run,
            "recomputes aside": self.recomputes.run_aside,
            "drifts": Drifts(self, self.computing[2]).run,
        }

    def _divide_limits(self, replicas: int) -> None:
        """Divide this process's limits by the number of replicas."""
        for rates in (self.rates, self.answers.rates, self.volunteers.orders):
            rates.replicas = replicas

    def _figures(self) -> Callable[[], ReplicaFigures]:
        """Return the function that measures this process for the other processes."""
        import psutil

        process = psutil.Process()
        settings, server, traffic = self.settings, self.server, self.traffic
        meter = self.answers.meter

        def measure() -> ReplicaFigures:
            used, disks = process.cpu_times(), (settings.directory, self.blobs.scratch())
            free, total = min(disk_bytes(place) for place in disks if place.exists())
            requests, errors = traffic.answered()
            first = meter.first_token
            return ReplicaFigures(
                name=settings.name,
                where=f"{socket.gethostname()}:{settings.port}"
                if settings.url  # the URL is that of all replicas
                else server.address.url,
                software=software(),
                closed=self.space.why,
                disk_free=free,
                disk_total=total,
                cpu_s=used.user + used.system,
                memory=process.memory_info().rss,
                bytes_in=traffic.bytes_in,
                bytes_out=traffic.bytes_out,
                requests=requests,
                errors=errors,
                claims_waiting=self.claims.waiting,
                answers=settings.inference,
                answers_waiting=meter.running,
                answer_tokens=sum(meter.tokens.values()),
                first_token_s=first.total_s / first.count if first.count else None,
                answering_machines=self.answerers.waiting,
                certificate_ends_at=self.alerts.certificate_ends_at,
            )

        return measure

    async def _keep_running(self, name: str, job: BackgroundJob) -> None:
        """Run a job until the server stops; a failing job is logged and restarted."""
        while not self.stopping.is_set():
            try:
                await job(self.stopping)
            except VolunteerError as error:
                if self.stopping.is_set():
                    return
                log.error("background job waits", job=name, error=error.message)
                await pause(self.clock, RESTART_S, self.stopping)
            except Exception:
                log.exception("background job failed", job=name)
                await pause(self.clock, RESTART_S, self.stopping)

    def _connect_engine(self) -> InferenceEngine | None:
        """Connect the engine that the settings name. Raises Configuration."""
        settings = self.settings
        engine: InferenceEngine | None = None
        if settings.inference == "builtin":
            limits = ProcessLimits.of(settings)
            builtin = BuiltinEngine(self.db, self.clock, self.blobs, limits)
            engine = VolunteerEngine(
                builtin,
                self.answerers,
                self.answers.meter.draws,
                self.db,
                self.blobs,
                self.run_queries.manifest,
            )
            self.answers.connect(engine)
        elif settings.inference != "off":
            from coordinator.inference.upstream_engine import UpstreamEngine, upstream

            there = upstream(settings)
            engine = UpstreamEngine(self.db, self.clock, self.blobs, there)
            self.answers.connect(engine, there.pinned_versions())
        return engine

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """Run the background jobs inside the block; leaving it stops them, and cancels jobs
        that have not ended after STOP_S.
        """
        tasks = [
            asyncio.create_task(self._keep_running(*job), name=job[0])
            for job in self.jobs().items()
        ]
        engine = self._connect_engine()
        try:
            yield
        finally:
            self.stopping.set()
            if engine is not None:
                await engine.close()
            self.signals.deliver(None)
            _, late = await asyncio.wait(tasks, timeout=STOP_S)
            for task in late:
                log.warning("background job is cut off", job=task.get_name())
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _computing(separate: bool) -> tuple[Compute, ...]:
    """Return four `Compute`s, so that a verdict waits for no other work: for evaluations, for
    checks, for recomputes, and for small recomputes that overtake a large one.
    """
    return (
        Compute("evaluation", torch_threads=half_the_cores(), separate=separate),
        Compute("checks", separate=separate),
        Compute("recomputes", separate=separate),
        Compute("recomputes aside", separate=separate),
    )


def _examiners(on: Platform, computing: tuple[Compute, ...]) -> Examiners:
    """Wire the examiners of contributions."""
    checks, first, aside = computing
    draws = Draws(on.key, ClaimTerms.of(on.settings).drawn)
    return Examiners(
        harvest=Harvest(on, checks, draws),
        recomputes=Recomputes(on, (first, aside), draws),
        audits=Audits(on, draws),
    )


def _announcer(db: Database, clock: Clock) -> Announcer:
    """Return the function that announces blobs in the database."""

    async def announce_all(names: Sequence[str]) -> list[str | Exception]:
        since = clock.now()
        serials = await db.write(lambda conn: unreferenced_blobs.announce(conn, set(names), since))
        return [serials.get(name) or unreferenced_blobs.being_deleted() for name in names]

    return Batcher(announce_all, ANNOUNCED_MAX).ask


async def _open_database(settings: Settings, clock: Clock, exclusive: bool) -> Database:
    """Open the database of the settings; make it if it does not exist."""
    if await is_new(settings.database_url):
        await check_unused(settings)
        await migrate(settings.database_url)
    system = clock if isinstance(clock, SystemClock) else None
    return await Database.open(settings.database_url, clock=system, exclusive=exclusive)


def _file_left(settings: Settings) -> Path | None:
    """Return a file that an earlier coordinator left next to its database, or None."""
    blobs = Path(settings.blobs_url)
    left = [settings.signing_key_file, *sorted(blobs.glob("*"))] if blobs.is_absolute() else []
    files = (path for top in left for path in (top, *top.rglob("*")) if path.is_file())
    return next(files, None)


async def check_unused(settings: Settings) -> None:
    """Raise Configuration if files of an earlier coordinator are here, since a new database would
    hide the loss of its database.
    """
    file, place = file_of(settings.database_url), without_password(settings.database_url)
    owner = ""
    if mark := await stored_mark(open_blobs(settings.blobs_url, settings.directory / "cache")):
        owner = f"{without_password(settings.blobs_url)} belongs to the database {mark.place}"
    elif file is not None and (old := await in_pool(_file_left, settings)):
        owner = f"{old} of a coordinator is there"
    if owner:
        raise Configuration(
            f"the database {place} is missing or empty, but {owner}: put it back, name it with "
            "--database, restore a backup with `coordinator restore FOLDER`, or make an empty one "
            "on purpose with `coordinator migrate --take-over`"
        )


@asynccontextmanager
async def opened(
    settings: Settings,
    clock: Clock | None = None,
    *,
    exclusive: bool = False,
    separate: bool = False,
    keyless: bool = False,
) -> AsyncIterator[Coordinator]:
    """Open a coordinator's services for the organiser's commands, also while a server runs."""
    coordinator = await Coordinator.build(
        settings, clock, exclusive=exclusive, separate=separate, keyless=keyless
    )
    try:
        yield coordinator
    finally:
        await coordinator.close()
