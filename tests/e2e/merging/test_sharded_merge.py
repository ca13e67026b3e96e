"""Merges in shards: the same heads, shared work, failures and kills that leave the old head or the
new one.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import multiprocessing
import os
import random
import secrets
import shutil
import signal
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest
from sqlalchemy import func, select, update

from coordinator.config import Constants, Settings
from coordinator.database import contributions, runs, versions
from coordinator.database.tables.contributions import contributions as contributions_table
from coordinator.database.tables.merges import merge_parts as merge_parts_table
from coordinator.database.tables.merges import merges as merges_table
from coordinator.database.tables.merges import state_parts as state_parts_table
from coordinator.http.app import opened
from coordinator.runs.definition import definition
from coordinator.storage import sparse_copy
from shared.decoding import convert
from shared.errors import VolunteerError
from tests.support.databases import Postgres
from tests.support.failpoints import Fault, Faults, fail, faults, install, kill
from tests.support.local_coordinator import RUN, LocalCoordinator, Worker, local_coordinator
from tests.support.merged_again import Remerge
from tests.support.partition import Wire, wire
from tests.support.virtual_clock import VirtualClock
from tests.support.wayward_store import WaywardStore

PRESET = 'preset = "fedavg"\nquorum = 2'
SHARDED = RUN.replace(
    PRESET,
    'preset = "diloco"\nquorum = 3\naggregate = "centred-clip"\nmax_staleness = 1000\nshards = 3',
)
WHOLE = SHARDED.replace("shards = 3", "shards = 1")


async def joined(home: LocalCoordinator) -> list[Worker]:
    return [await home.join(name) for name in ("Ann", "Bob", "Cleo")]


async def round_of(crew: list[Worker], version: int) -> None:
    """Submit every worker's update of a round."""
    for index, worker in enumerate(crew):
        assert (await worker.work(10 * version + index)).state == "accepted"


async def heads(home: LocalCoordinator) -> list[str]:
    """Master hashes of all versions."""
    pairs = await home.coordinator.db.read(lambda conn: versions.listing(conn, 1, -1, 10 * STEPS))
    return [row.master_sha256 for row, _ in pairs]


async def stored(home: LocalCoordinator) -> set[str]:
    return {entry.sha256 async for entry in home.coordinator.blobs.entries()}


async def counted(home: LocalCoordinator, table: Any) -> int:
    query = select(func.count()).select_from(table)
    return int(await home.coordinator.db.read(lambda conn: conn.execute(query).scalar_one()))


async def sound(home: LocalCoordinator) -> bool:
    """Nothing is left of merges that have ended, and every invariant holds."""
    left = [path.name for path in home.coordinator.blobs.scratch().iterdir() if path.is_file()]
    assert left == []
    assert await counted(home, merge_parts_table) == 0
    return (await home.coordinator.checks.run()).breaches == ()


async def remade(home: LocalCoordinator, shards: int) -> tuple[int, int | None]:
    """How many merges were made once more from the log, and the first that came out otherwise."""
    coordinator = home.coordinator
    again = Remerge(coordinator.db, coordinator.blobs, coordinator.threads)
    found = await again.run("tiny", shards=shards)
    return found.merges, found.wrong


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 3])
async def test_a_run_in_shards_has_the_heads_of_a_whole_one_and_its_log_makes_them_again(
    tmp_path: Path, database_url: str, threads: int
) -> None:
    async with local_coordinator(tmp_path / "whole") as home:
        await home.start_run(WHOLE)
        crew = await joined(home)
        for version in range(1, 4):
            await round_of(crew, version)
            assert await home.coordinator.merger.merge_if_due(1)
        wanted = await heads(home)
        assert [await remade(home, shards) for shards in (0, 4)] == [(3, None), (3, None)]
    async with local_coordinator(
        tmp_path / "sharded", database=database_url, constants=Constants(merge_threads=threads)
    ) as home:
        await home.start_run(SHARDED)
        crew = await joined(home)
        for version in range(1, 4):
            await round_of(crew, version)
            before = await stored(home)
            assert await home.coordinator.merger.merge_if_due(1)
            # the weights, the list of the state's files, and those: nothing that was only on its
            # way
            assert len(await stored(home) - before) == 1 + 1 + 3
        assert await heads(home) == wanted
        assert [await remade(home, shards) for shards in (0, 2, 5)] == [(3, None)] * 3
        assert await sound(home)


@pytest.mark.parametrize(
    ("text", "state_files"),
    [(WHOLE, 0), (SHARDED, 3 + 3), (SHARDED.replace('"diloco"', '"fedavg"'), 0)],
    ids=["whole", "shards", "without state"],
)
async def test_the_state_of_an_optimiser_goes_from_version_to_version(
    tmp_path: Path, text: str, state_files: int
) -> None:
    async with local_coordinator(tmp_path) as home:
        await home.start_run(text)
        crew = await joined(home)
        for version in (1, 2):
            await round_of(crew, version)
            assert await home.coordinator.merger.merge_if_due(1)
        assert await counted(home, state_parts_table) == state_files
        assert await remade(home, 0) == (2, None)
        assert await sound(home)


async def test_a_rollback_goes_on_from_the_state_in_shards_and_so_does_another_number_of_them(
    tmp_path: Path,
) -> None:
    async with local_coordinator(tmp_path) as home:
        name = await home.start_run(SHARDED)
        crew = await joined(home)
        for version in range(1, 4):
            if version == 3:
                await home.coordinator.runs.rollback(name, 1)  # version 3 is version 1
                await resharded(home, 5)
            await round_of(crew, version)
            assert await home.coordinator.merger.merge_if_due(1)
        made = await heads(home)
        assert (len(made), made[3]) == (5, made[1])
        assert await remade(home, 0) == (3, None)
        assert await counted(home, state_parts_table) == 3 + 3 + 5
        assert await sound(home)


async def resharded(home: LocalCoordinator, shards: int) -> None:
    """The run restored with another number of shards."""

    def change(conn: Any) -> None:
        run = runs.by_id(conn, 1)
        file = definition(run).file
        new = msgspec.structs.replace(file, plan=file.plan | {"shards": shards})
        runs.set_values(conn, 1, file=msgspec.json.encode(new).decode())

    await home.coordinator.db.write(change)


async def test_a_log_with_other_bytes_is_found_out(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home:
        await home.start_run(SHARDED)
        crew = await joined(home)
        for version in range(1, 3):
            await round_of(crew, version)
            assert await home.coordinator.merger.merge_if_due(1)
        c = contributions_table.c
        lighter = update(contributions_table).where(c.version == 2, c.id == 4).values(weight=0.5)
        await home.coordinator.db.write(lambda conn: conn.execute(lighter))
        assert await remade(home, 0) == (2, 2)


# --- a store elsewhere ---


async def test_a_shard_reads_only_its_ranges_of_a_store(
    tmp_path: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse_copy, "AHEAD_BYTES", 8)
    async with local_coordinator(tmp_path, blobs=s3_url) as home:
        await home.start_run(SHARDED)
        crew = await joined(home)
        cache = home.coordinator.blobs.scratch().parent
        for version in range(1, 4):
            await round_of(crew, version)
            for path in cache.iterdir():
                if path.is_file():
                    path.unlink()
            sent = await home.coordinator.db.read(lambda conn: contributions.mergeable(conn, 1))
            assert await home.coordinator.merger.merge_if_due(1)
            assert not [row for row in sent if (cache / row.sha256).exists()]
        assert await remade(home, 0) == (3, None)
        assert await sound(home)


# --- failures ---


async def test_a_culprit_is_set_aside_after_two_failures_and_leaves_no_trace(
    tmp_path: Path,
) -> None:
    async with local_coordinator(tmp_path) as home:
        await home.start_run(SHARDED)
        crew = await joined(home)
        await round_of(crew, 1)
        poisoned = bytearray(await crew[0].update("tiny", 99))
        poisoned[-4:] = np.float32(np.nan).tobytes()
        sha256 = await home.coordinator.blobs.put_bytes(bytes(poisoned))
        c = contributions_table.c
        planting = update(contributions_table).where(c.id == 2).values(sha256=sha256)
        await home.coordinator.db.write(lambda conn: conn.execute(planting))
        before = await stored(home)
        merger = home.coordinator.merger
        assert [await merger.merge_if_due(1) for _ in range(2)] == [False, False]
        assert await stored(home) == before
        states = await home.coordinator.db.read(lambda conn: contributions.counts(conn, 1))
        assert states == {"accepted": 2, "rejected": 1}
        assert (await crew[1].work(77)).state == "accepted"
        assert await merger.merge_if_due(1)
        assert await sound(home)


@pytest.mark.parametrize("times", [1, 2, 7])
async def test_a_disk_that_fails_is_blamed_on_no_contribution(tmp_path: Path, times: int) -> None:
    async with local_coordinator(tmp_path) as home:
        await home.start_run(SHARDED)
        await round_of(await joined(home), 1)
        broken = fail(OSError(errno.EIO, "input/output error")).before("put_file").often(times)
        tries = 0
        with faults(broken).installed():
            while not await home.coordinator.merger.merge_if_due(1):
                tries += 1
                assert tries < 10
        states = await home.coordinator.db.read(lambda conn: contributions.counts(conn, 1))
        assert states == {"merged": 3}
        assert await sound(home)


async def test_a_run_in_more_shards_than_its_model_has_pieces_is_refused(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home:
        with pytest.raises(Exception, match=r"set shards to \d+ or less"):
            await home.start_run(SHARDED.replace("shards = 3", "shards = 1000"))


# --- several coordinators ---


async def test_replicas_share_the_shards_of_one_merge(tmp_path: Path, postgres: Any) -> None:
    url = await postgres.fresh()
    async with local_coordinator(tmp_path, database=url) as home:
        await home.start_run(SHARDED.replace("shards = 3", "shards = 9"))
        await round_of(await joined(home), 1)
        async with opened(home.coordinator.settings, home.clock) as other:
            merging = asyncio.ensure_future(home.coordinator.merger.merge_if_due(1))
            helped = 0
            while not merging.done():
                helped += await other.merger.help()
                await asyncio.sleep(0)
            assert await merging
        assert helped > 0
        assert await remade(home, 0) == (1, None)
        assert await sound(home)
    await postgres.recycle(url)


# --- kills ---

# Six parts, surveys and merges of three shards; each process goes on where the one before was
# killed.
POINTS = [
    kill().amid("write _lease"),
    kill().after("write _lease"),
    kill().after("write take_part"),
    kill().before("put_file"),
    kill().amid("write finish_part"),
    kill().on_the(2).after("write finish_part"),
    kill().on_the(3).after("put_file"),  # the state of the first shard, when its weights are there
    kill().on_the(2).after("write finish_part"),
    kill().after("write finish_part"),
    kill().before("put_file"),
    kill().before("put_bytes"),
    kill().before("write _commit"),
    kill().amid("write _commit"),
    kill().after("write _commit"),
]


def merge_until_killed(settings: dict[str, Any], point: str, now: float) -> None:
    """In a process of its own: merge what is due, with one fault."""

    async def merge() -> None:
        async with opened(convert(settings, Settings), VirtualClock(now)) as coordinator:
            await coordinator.merger.merge_if_due(1)

    install(Faults((Fault.read(point),)), setattr)
    asyncio.run(merge())


@pytest.fixture(scope="module")
def processes() -> Any:
    """Fork processes that have everything imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["coordinator.http.app", "alembic.command", "asyncpg", "tests.support.failpoints", __name__]
    )
    return context


@pytest.mark.slow
async def test_a_kill_in_the_middle_leaves_the_old_head_or_the_new_one(
    tmp_path: Path, database_url: str, processes: Any
) -> None:
    async with local_coordinator(
        tmp_path, database=database_url, constants=Constants(merge_threads=1)
    ) as home:
        await home.start_run(SHARDED)
        crew = await joined(home)
        settings = msgspec.to_builtins(home.coordinator.settings)
        later = home.clock.now()
        for point in POINTS:
            head = (await heads(home))[-1]
            if not await waiting(home):
                await round_of(crew, len(await heads(home)))
            later += 60.0  # the lease of the last one is over
            child = processes.Process(target=merge_until_killed, args=(settings, str(point), later))
            child.start()
            await asyncio.to_thread(child.join, 60)
            assert child.exitcode == -signal.SIGKILL, f"{point}: {child.exitcode}"
            now = await heads(home)
            merged = now[-1] != head
            assert merged == (str(point) == str(POINTS[-1])), point
            assert (await home.coordinator.checks.run()).breaches == (), point
        await home.clock.advance(later + 600.0 - home.clock.now())
        await round_of(crew, len(await heads(home)))
        assert await home.coordinator.merger.merge_if_due(1)
        assert await remade(home, 0) == (2, None)
        assert await counted(home, merge_parts_table) == 0
        assert (await home.coordinator.checks.run()).breaches == ()


async def waiting(home: LocalCoordinator) -> int:
    return len(await home.coordinator.db.read(lambda conn: contributions.mergeable(conn, 1)))


STEPS = int(os.environ.get("CHAOS_KILLS", "4"))
CHAOS = RUN.replace(
    PRESET, 'preset = "diloco"\nmax_staleness = 10000\nshards = 2\noverlap = true'
) + ("[evaluation]\nevery = 0\n")
MOST_S = 60.0 * float(os.environ.get("CHAOS_MINUTES", STEPS / 20))  # of trouble
LEASE_S = 0.3
BACKLOG = 6
REPLICAS = 3
T = TypeVar("T")
TROUBLES = ("freeze", "kill", "store", "database", "cut")


def merge_for_ever(settings: dict[str, Any], store: dict[str, str]) -> None:
    """In a process of its own: a coordinator that does nothing but merge."""
    os.environ.update(store)  # its parent was started before there was a store
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()

    async def merge() -> None:
        async with opened(convert(settings, Settings)) as coordinator:
            await coordinator._keep_running("merger", coordinator.merger.run)

    while True:
        with suppress(VolunteerError):  # it was started while the database was away
            asyncio.run(merge())


class Replicas:
    """Three coordinators that are paused for longer than their leases last, killed and replaced, or
    cut off from their database, their store or both; these fail now and then.
    """

    def __init__(
        self, processes: Any, home: LocalCoordinator, postgres: Postgres, store: WaywardStore
    ) -> None:
        self.suffered: Counter[str] = Counter()
        self.stepped = asyncio.Event()  # a step was merged since the last trouble
        self._moments = random.Random(4)
        self._processes = processes
        self._home, self._postgres, self._store = home, postgres, store
        self._wires: list[tuple[Wire, Wire]] = []  # of each, to the database and to the store
        self._living: list[Any] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start the replicas, which end with the block."""
        socket = f"{self._postgres.directory}/.s.PGSQL.5432"
        port = self._store.server_address[1]
        async with AsyncExitStack() as stack:
            for _ in range(REPLICAS):
                to_database = wire(partial(asyncio.open_unix_connection, socket))
                to_store = wire(partial(asyncio.open_connection, "127.0.0.1", port))
                self._wires.append(
                    (
                        await stack.enter_async_context(to_database),
                        await stack.enter_async_context(to_store),
                    )
                )
            self._living = [self._started(index) for index in range(REPLICAS)]
            try:
                yield
            finally:
                for one in self._living:
                    one.kill()
                    one.join(30)

    def _started(self, index: int) -> Any:
        settings = msgspec.to_builtins(self._home.coordinator.settings)
        folder = Path(settings["data_dir"]).with_name(f"replica{index}")
        folder.mkdir(exist_ok=True)
        shutil.copy(self._home.coordinator.settings.signing_key_file, folder)
        to_database, to_store = self._wires[index]
        name = settings["database"].partition("@/")[2].partition("?")[0]
        settings["database"] = f"postgresql+asyncpg://tester@127.0.0.1:{to_database.port}/{name}"
        store = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        store["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{to_store.port}"
        given = settings | {"data_dir": str(folder)}, store
        process = self._processes.Process(target=merge_for_ever, args=given, daemon=True)
        process.start()
        return process

    async def suffer(self, until: float) -> None:
        """Cause one trouble a step, or in two seconds without one, until an instant; end each."""
        while monotonic() < until:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.stepped.wait(), 2.0)
            self.stepped.clear()
            await asyncio.sleep(self._moments.uniform(0.0, 1.0))
            [kind] = self._moments.choices(TROUBLES, (45, 30, 7, 3, 15))
            index = self._moments.randrange(REPLICAS)
            victim = self._living[index]
            assert victim.exitcode is None, f"a coordinator ended: {victim.exitcode}"
            self.suffered[kind] += 1
            if kind == "freeze":
                os.kill(victim.pid, signal.SIGSTOP)
                await asyncio.sleep(2 * LEASE_S)
                os.kill(victim.pid, signal.SIGCONT)
            elif kind == "kill":
                victim.kill()
                self._living[index] = self._started(index)
            elif kind == "cut":
                wires, for_s = self._wires[index], self._moments.uniform(2, 8) * LEASE_S
                chosen = self._moments.choice((wires[:1], wires[1:], wires))
                await asyncio.gather(*(each.cut(for_s) for each in chosen))
            elif kind == "store":
                self._store.refuse = True
                await asyncio.sleep(1.0)
                self._store.refuse = False
            else:
                await self._postgres.crash(down_s=0.5)


async def answered(ask: Callable[[], Awaitable[T]]) -> T:
    """Repeat a request, as volunteers do, until it is answered."""
    while True:
        with suppress(AssertionError, VolunteerError):
            return await ask()
        await asyncio.sleep(0.1)


async def handed_in(worker: Worker, seed: int) -> int:
    """The number of a contribution that was acknowledged."""
    lease = await answered(partial(worker.claim, claim_id=secrets.token_hex(16)))
    begun = await answered(partial(worker.begin, lease))
    data = await answered(partial(worker.update, lease.job.run, seed))
    await answered(partial(worker.upload, lease, data))
    verdict = await answered(partial(worker.submit, lease, begun, data))
    assert verdict.state == "accepted"
    return verdict.contribution


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.timeout(300 + 5 * STEPS)
async def test_three_coordinators_in_trouble_never_merge_a_step_twice(
    tmp_path: Path, postgres: Postgres, processes: Any, s3_url: str, wayward: WaywardStore
) -> None:
    url = await postgres.fresh()
    given: dict[str, Any] = {"database": url, "blobs": s3_url}
    constants = Constants(merge_threads=1, job_lease_s=LEASE_S)
    async with local_coordinator(tmp_path / "home", **given, constants=constants) as home:
        await home.start_run(CHAOS)
        crew, seeds, acknowledged = await joined(home), itertools.count(), set[int]()
        replicas = Replicas(processes, home, postgres, wayward)
        until, made = monotonic() + MOST_S, 0
        async with replicas.running():
            suffering = asyncio.create_task(replicas.suffer(until))
            try:
                async with asyncio.timeout(240 + 5 * STEPS):
                    while made == 0 or (made < STEPS and monotonic() < until):
                        before, made = made, await merged_steps(home)
                        if made > before:
                            replicas.stepped.set()
                        if suffering.done():
                            suffering.result()
                        if await backlog(home) < BACKLOG:
                            seed = next(seeds)
                            acknowledged.add(await handed_in(crew[seed % 3], seed))
                        else:
                            await asyncio.sleep(0.2)
            finally:
                suffering.cancel()
                print(dict(replicas.suffered), len(acknowledged), "acknowledged")
        await postgres.answers("SELECT 1")
        print(made, "steps")
        await merged_once(home)
        query = select(contributions_table.c.id).where(
            contributions_table.c.state.in_(("accepted", "merged"))
        )
        kept = await home.coordinator.db.read(lambda conn: set(conn.execute(query).scalars()))
        assert acknowledged <= kept
    await postgres.recycle(url)


async def merged_steps(home: LocalCoordinator) -> int:
    while True:
        with suppress(VolunteerError):
            return (await home.coordinator.runs.queries.info("tiny")).version
        await asyncio.sleep(0.1)


async def backlog(home: LocalCoordinator) -> int:
    try:
        return await waiting(home)
    except VolunteerError:
        return BACKLOG


async def merged_once(home: LocalCoordinator) -> None:
    """Every step was committed by exactly one merge, of contributions of its own, and can be made
    again.
    """
    assert (await home.coordinator.checks.run()).breaches == ()
    assert await home.coordinator.ledger.check() == ()
    rows = await home.coordinator.db.read(
        lambda conn: list(conn.execute(merges_table.select()).mappings())
    )
    committed = Counter(row["base"] for row in rows if row["state"] == "committed")
    made = len(await heads(home)) - 1
    assert committed == Counter(range(made))
    assert await remade(home, 0) == (made, None)
