"""Simulation: a whole coordinator and its volunteers in one process and in virtual time.

Queue, leases, intake, validation, merge, codec and retention are real; machines, links and (unless
it is given) the data are not. The same scenario and seed give the same versions.
"""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomlkit

from coordinator.config import Constants, Settings
from coordinator.database import datasets, runs, unreferenced_blobs
from coordinator.database import versions as version_rows
from coordinator.database.engine.memory import in_memory
from coordinator.database.versions import VersionRow
from coordinator.runs.definition import Definition, definition, table_defaults, with_downlink
from coordinator.services import Coordinator
from coordinator.simulate.labour import Labour, SimulatedWork
from coordinator.simulate.loop import LoopClock
from coordinator.simulate.machine import Net, SimulatedMachine, SimulatedWorld, Trace
from coordinator.simulate.pretended_play import PretendedPlay
from coordinator.simulate.scenario import Scenario
from coordinator.storage.blobs import MissingBlob
from shared.decoding import decode
from shared.errors import InvalidRunFile
from shared.proofs.signing import canonical, digest
from shared.tensors.spec import parameters
from shared.workloads.base import ChunkRef, DatasetManifest, Role, load
from shared.workloads.data.local_data import LocalData

if TYPE_CHECKING:
    from sqlalchemy import Connection

RAM_DISK = Path("/dev/shm")  # used where it exists, so that nothing is written to a disk
TICKS = 250.0  # approximate number of times that the server's periodic jobs run in a simulation
TICK_MAX_S = 15.0  # longest interval of these jobs
PARAMETERS_MAX = 3_000_000  # a larger model is replaced by a small one, its stand-in
# model keys of the stand-ins, by workload
STAND_INS: Mapping[str, Mapping[str, Any]] = {
    "gpt": {"n_layer": 1, "n_head": 1, "n_embd": 32},
    "dcgan": {"generator_width": 8, "discriminator_width": 8},
    "gomoku": {"channels": 8},
    "rollouts": {"n_layer": 1, "n_head": 1, "n_embd": 32},
}
# background jobs of the server that run
JOBS = ("leases", "merger", "upkeep", "replay")
LISTING_MAX = 100_000
PARAMETER_BYTES = 4

Blobs = Mapping[str, bytes]
Dataset = tuple[DatasetManifest, Blobs]


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedHead:
    """Newly merged version."""

    row: VersionRow
    seconds: float  # virtual time
    weights: Path
    about: Definition


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """Result of a simulation."""

    scenario: Scenario
    about: Definition
    parameters: int  # parameters of the real model
    seconds: float
    merged_at: tuple[float, ...]  # when each version after 0 was merged
    merged: int  # merged contributions
    merged_steps: float  # optimiser steps of all machines that are part of a version
    traces: tuple[Trace, ...]
    finished: str  # reason why the run ended; "" when its time was up
    play: PretendedPlay | None  # None: a run whose machines only train


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """Hooks for a caller: real training, real data, a callback for versions."""

    labour: Callable[[Definition, Path, LocalData | None, int], Labour] | None = None
    dataset: Dataset | None = None
    # called before the run starts
    on_draft: Callable[[Coordinator, str], Awaitable[None]] | None = None
    # called before any machine works
    on_start: Callable[[Coordinator, str], Awaitable[None]] | None = None
    on_version: Callable[[MergedHead], None] | None = None
    tick_s: float | None = None


async def simulate(
    scenario: Scenario, hooks: Hooks = Hooks()
) -> SimulationResult:  # a frozen default
    """Run a scenario on a virtual loop (see `loop.run`). Raises InvalidRunFile, InvalidPlan."""
    tick = hooks.tick_s
    clock = LoopClock(min(TICK_MAX_S, scenario.hours * 3600 / TICKS) if tick is None else tick)
    with tempfile.TemporaryDirectory(prefix="simulate-", dir=_root()) as folder:
        settings = Settings(
            data_dir=folder,
            space_floor_bytes=0,
            constants=Constants(merge_threads=1),
        )
        coordinator = await Coordinator.build(settings, clock, database=in_memory())
        try:
            # Not in the coordinator's folder, from which the coordinator deletes old files: by the
            # virtual clock every file is old.
            (scratch := Path(folder) / "machines").mkdir()
            return await _Simulation(scenario, hooks, coordinator, clock, scratch).run()
        finally:
            await coordinator.close()


def _set_size(conn: Connection, name: str, parameters: int) -> None:
    """Store the size of the real model, by which tasks are sized, in place of the stand-in's
    size.
    """
    runs.set_values(conn, runs.by_name(conn, name).id, parameters=parameters)


class _Simulation:
    """One running simulation."""

    def __init__(
        self,
        scenario: Scenario,
        hooks: Hooks,
        coordinator: Coordinator,
        clock: LoopClock,
        scratch: Path,
    ) -> None:
        self._scenario = scenario
        self._hooks = hooks
        self._coordinator = coordinator
        self._clock = clock
        self._scratch = scratch  # folder of the machines
        self._machines: list[SimulatedMachine] = []
        self._play: PretendedPlay | None = None
        self._run_id = 0
        self._seen = 0  # versions shown to `on_version`

    async def run(self) -> SimulationResult:
        coordinator, scenario = self._coordinator, self._scenario
        dataset, table, parameters = await self._prepare()
        info = await coordinator.runs.create(tomlkit.dumps(table))
        await coordinator.db.write(partial(_set_size, name=info.name, parameters=parameters))
        if self._hooks.on_draft is not None:
            await self._hooks.on_draft(coordinator, info.name)
        await coordinator.runs.start(info.name)
        if self._hooks.on_start is not None:
            await self._hooks.on_start(coordinator, info.name)
        row = await coordinator.db.read(lambda conn: runs.by_name(conn, info.name))
        self._run_id, about = row.id, definition(row)
        if pacing := about.pacing:
            self._play = PretendedPlay(pacing, scenario, self._clock, self._scratch)
            self._coordinator = coordinator = self._play.in_place_of(coordinator)
        world = SimulatedWorld(
            coordinator=coordinator,
            clock=self._clock,
            net=Net(scenario.server),
            run=self._run_id,
            dataset=dataset,
            scale=parameters / about.parameters,
            step_flops=row.step_flops,
            play=self._play,
        )
        await self._populate(world, about, row.workload)
        async with self._at_work():
            finished = await self._until_over()
        return await self._outcome(about, parameters, finished)

    # --- before ---

    async def _prepare(self) -> tuple[DatasetManifest | None, dict[str, Any], int]:
        """Return the dataset, the run file, and the parameter count of the real model."""
        table, scenario = dict(self._scenario.run), self._scenario
        workload = load(table.get("workload", ""))
        makes_data = workload.declaration.taught_by == "experience"
        _check_roles(scenario, ("play", "learn") if makes_data else ("train",))
        dataset, blobs = self._hooks.dataset or _imagined(
            scenario, workload.dataset_kinds if workload.needs_dataset else ()
        )
        if dataset is not None:
            for data in blobs.values():
                await self._coordinator.blobs.put_bytes(data)
            await self._add(dataset)
            table["dataset"] = dataset.name
        model = workload.config(table.get("model", {}), dataset)
        real = scenario.model.parameters or parameters(workload.schema(model))
        # the downlink is chosen by the size of the real model, not of the stand-in
        if isinstance(table.get("plan", {}), dict):
            defaults = table_defaults(table, workload, real)
            for name in ("plan", "model"):
                table[name] = {**defaults.get(name, {}), **table.get(name, {})}
            table["plan"] = with_downlink(table["plan"], real * PARAMETER_BYTES)
        if real > PARAMETERS_MAX and table["workload"] in STAND_INS:
            table["model"] = {**table.get("model", {}), **STAND_INS[table["workload"]]}
        table.setdefault("seed", scenario.seed)
        return dataset, table, real

    async def _populate(self, world: SimulatedWorld, about: Definition, workload: str) -> None:
        data = await self._local_data(world.dataset)
        # number of machines by name: machines of several kinds with one name are numbered together
        numbers = Counter[str]()
        for group in self._scenario.workers:
            for _ in range(group.count):
                numbers[group.name] += 1
                number = numbers[group.name]
                machine = SimulatedMachine(world, group, number, self._scenario.seed)
                await machine.register(workload)
                index = len(self._machines)
                machine.labour = (
                    self._hooks.labour(about, self._scratch, data, index)
                    if self._hooks.labour
                    else SimulatedWork(about, self._scratch, self._scenario.seed * 1000 + index)
                )
                self._machines.append(machine)

    async def _add(self, manifest: DatasetManifest) -> None:
        """Add a dataset, even if its chunks are stored nowhere: they are announced as if stored."""
        chunks = (*manifest.chunks, *manifest.heldout, *manifest.assets.values())

        def add(conn: Connection) -> None:
            now = self._clock.now()
            unreferenced_blobs.announce(conn, {chunk.sha256 for chunk in chunks}, now)
            rows = [(chunk.sha256, chunk.size, "chunk") for chunk in chunks]
            datasets.register_referenced(conn, rows, now)
            datasets.add(conn, manifest, digest(canonical(manifest)))

        await self._coordinator.db.write(add)

    async def _local_data(self, dataset: DatasetManifest | None) -> LocalData | None:
        if dataset is None or self._hooks.dataset is None:
            return None
        refs = [*dataset.chunks, *dataset.assets.values()]
        blobs = self._coordinator.blobs
        return LocalData(dataset, {ref.sha256: await blobs.local(ref.sha256) for ref in refs})

    # --- during ---

    @asynccontextmanager
    async def _at_work(self) -> AsyncIterator[None]:
        coordinator = self._coordinator
        jobs = coordinator.jobs()
        tasks: list[asyncio.Future[None]] = [
            asyncio.ensure_future(jobs[name](coordinator.stopping)) for name in JOBS
        ]
        tasks += [asyncio.create_task(machine.run()) for machine in self._machines]
        self._tasks = tasks
        try:
            yield
        finally:
            coordinator.stopping.set()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _until_over(self) -> str:
        """Wait for the end of the run or of the simulated time; return why the run ended, "" if the
        time was up. Raises the error of a job of the simulation that failed.
        """
        until = self._scenario.hours * 3600
        watch = self._coordinator.signals.watch("versions", f"run:{self._run_id}")
        while (left := until - self._clock.monotonic()) > 0:
            failed = next((t for t in self._tasks if t.done() and t.exception()), None)
            if failed is not None:
                raise failed.exception() or RuntimeError("a job of the simulation has failed")
            await self._show()
            row = await self._run_row()
            if row.state != "running":
                return row.state_reason or row.state
            await watch.wait(min(left, 60.0))
        await self._show()
        return ""

    async def _show(self) -> None:
        """Report the new versions whose weights are not deleted yet to the caller."""
        if self._hooks.on_version is None:
            return
        rows = await self._versions(self._seen)
        for row in rows:
            self._seen = row.version
            with suppress(MissingBlob):
                self._hooks.on_version(
                    MergedHead(
                        row=row,
                        seconds=self._clock.monotonic(),
                        weights=await self._coordinator.blobs.local(row.published_sha256),
                        about=definition(await self._run_row()),
                    )
                )

    async def _run_row(self) -> runs.RunRow:
        return await self._coordinator.db.read(lambda conn: runs.by_id(conn, self._run_id))

    async def _versions(self, after: int) -> list[VersionRow]:
        pairs = await self._coordinator.db.read(
            lambda conn: version_rows.listing(conn, self._run_id, after, LISTING_MAX)
        )
        return [row for row, _ in pairs]

    # --- after ---

    async def _outcome(self, about: Definition, parameters: int, finished: str) -> SimulationResult:
        now = self._clock.monotonic()
        rows = await self._versions(0)
        began = self._clock.now() - now
        samples = (rows[-1].tokens if rows else 0) / (await self._run_row()).sample_size
        return SimulationResult(
            scenario=self._scenario,
            about=about,
            parameters=parameters,
            seconds=now,
            merged_at=tuple(row.created_at - began for row in rows),
            merged=sum(len(decode(row.contributions)) for row in rows),
            merged_steps=samples / about.file.task.batch_size,
            traces=tuple(machine.trace for machine in self._machines),
            finished=finished,
            play=self._play,
        )


def _root() -> Path | None:
    return RAM_DISK if RAM_DISK.is_dir() else None


def _check_roles(scenario: Scenario, needed: tuple[Role, ...]) -> None:
    """Raise InvalidRunFile if no machine does work that the run needs."""
    for role in needed:
        if not any(role in workers.roles for workers in scenario.workers):
            raise InvalidRunFile(
                f"no machine of this scenario would {role}, and the run needs one: add"
                f' roles = ["{role}"] to one of the [[workers]], or remove its line roles'
            )


def _imagined(scenario: Scenario, kinds: tuple[str, ...]) -> tuple[DatasetManifest | None, Blobs]:
    """Return the manifest of a dataset of the right size whose chunks no machine reads."""
    if not kinds:
        return None, {}
    data = scenario.data
    item_bytes = 2 if kinds[0] == "tokens" else 784
    per_chunk = max(1, data.chunk_bytes // item_bytes)
    count = -(-data.items // per_chunk)
    chunks = tuple(
        ChunkRef(
            sha256=hashlib.sha256(f"chunk {index}".encode()).hexdigest(),
            size=per_chunk * item_bytes,
            items=per_chunk,
        )
        for index in range(count)
    )
    return DatasetManifest(
        name="imagined",
        kind=kinds[0],
        licence="CC0-1.0",
        source="imagined by the simulator",
        chunks=chunks,
        meta={"vocab_size": data.vocab_size, "dtype": "uint16", "size": 28, "channels": 1},
    ), {}
