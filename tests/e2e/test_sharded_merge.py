"""Merges in shards: the same heads, shared work, failures and kills that leave the old head or the new one."""

from __future__ import annotations

import asyncio
import errno
import multiprocessing
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from sqlalchemy import func, select, update

from coordinator.app import opened
from coordinator.config import Settings
from coordinator.definition import definition
from coordinator.remerge import Remerge
from coordinator.store import contributions, merge_tables, runs, tables, versions
from shared.clock import VirtualClock
from tests.e2e.conftest import Site
from tests.faults import Fault, Faults, fail, faults, install, kill
from tests.house import RUN, House, Worker, house
from tests.load import Diary, Numbers

PRESET = 'preset = "fedavg"\nquorum = 2'
SHARDED = RUN.replace(
    PRESET,
    'preset = "diloco"\nquorum = 3\nphases = []\naggregate = "centred-clip"\nmax_staleness = 1000\n'
    "shards = 3",
)
WHOLE = SHARDED.replace("shards = 3", "shards = 1")


async def joined(home: House) -> list[Worker]:
    return [await home.join(name) for name in ("Ann", "Bob", "Cleo")]


async def round_of(crew: list[Worker], version: int) -> None:
    """Everybody hands in the update of a round."""
    for index, worker in enumerate(crew):
        assert (await worker.work(10 * version + index)).state == "accepted"


async def heads(home: House) -> list[str]:
    """Master hashes of all versions."""
    pairs = await home.coordinator.db.read(lambda conn: versions.listing(conn, 1, -1, 1000))
    return [row.master_sha256 for row, _ in pairs]


async def stored(home: House) -> set[str]:
    return {entry.sha256 async for entry in home.coordinator.blobs.entries()}


async def counted(home: House, table: Any) -> int:
    query = select(func.count()).select_from(table)
    return int(await home.coordinator.db.read(lambda conn: conn.execute(query).scalar_one()))


async def sound(home: House) -> bool:
    """Nothing is left of merges that have ended, and every invariant holds."""
    left = [path.name for path in home.coordinator.blobs.scratch().iterdir() if path.is_file()]
    assert left == []
    assert await counted(home, merge_tables.merge_parts) == 0
    return (await home.coordinator.checks.run()).breaches == ()


async def remade(home: House, shards: int) -> tuple[int, int | None]:
    """How many merges were made once more from the log, and the first that came out otherwise."""
    coordinator = home.coordinator
    again = Remerge(coordinator.db, coordinator.blobs, coordinator.threads)
    found = await again.run("tiny", shards=shards)
    return found.merges, found.wrong


@pytest.mark.parametrize("threads", [1, 3])
async def test_a_run_in_shards_has_the_heads_of_a_whole_one_and_its_log_makes_them_again(
    tmp_path: Path, database_url: str, threads: int
) -> None:
    async with house(tmp_path / "whole") as home:
        await home.start_run(WHOLE)
        crew = await joined(home)
        for version in range(1, 4):
            await round_of(crew, version)
            assert await home.coordinator.merger.merge_if_due(1)
        wanted = await heads(home)
        assert [await remade(home, shards) for shards in (0, 4)] == [(3, None), (3, None)]
    async with house(tmp_path / "sharded", database=database_url, merge_threads=threads) as home:
        await home.start_run(SHARDED)
        crew = await joined(home)
        for version in range(1, 4):
            await round_of(crew, version)
            before = await stored(home)
            assert await home.coordinator.merger.merge_if_due(1)
            # the weights, the list of the state's files, and those: nothing that was only on its way
            assert len(await stored(home) - before) == 1 + 1 + 3
        assert await heads(home) == wanted
        assert [await remade(home, shards) for shards in (0, 2, 5)] == [(3, None)] * 3
        assert await sound(home)


async def test_a_rollback_goes_on_from_the_state_in_shards_and_so_does_another_number_of_them(
    tmp_path: Path,
) -> None:
    async with house(tmp_path) as home:
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
        assert await counted(home, merge_tables.state_parts) == 3 + 3 + 5
        assert await sound(home)


async def resharded(home: House, shards: int) -> None:
    """The run restored with another number of shards."""

    def change(conn: Any) -> None:
        run = runs.by_id(conn, 1)
        file = definition(run).file
        new = msgspec.structs.replace(file, plan=file.plan | {"shards": shards})
        runs.set_values(conn, 1, file=msgspec.json.encode(new).decode())

    await home.coordinator.db.write(change)


async def test_a_log_with_other_bytes_is_found_out(tmp_path: Path) -> None:
    async with house(tmp_path) as home:
        await home.start_run(SHARDED)
        crew = await joined(home)
        for version in range(1, 3):
            await round_of(crew, version)
            assert await home.coordinator.merger.merge_if_due(1)
        c = tables.contributions.c
        lighter = update(tables.contributions).where(c.version == 2, c.id == 4).values(weight=0.5)
        await home.coordinator.db.write(lambda conn: conn.execute(lighter))
        assert await remade(home, 0) == (2, 2)


# --- failures ---


async def test_a_culprit_is_set_aside_after_two_failures_and_leaves_no_trace(
    tmp_path: Path,
) -> None:
    async with house(tmp_path) as home:
        await home.start_run(SHARDED)
        crew = await joined(home)
        await round_of(crew, 1)
        poisoned = bytearray(await crew[0].update("tiny", 99))
        poisoned[-4:] = np.float32(np.nan).tobytes()
        sha256 = await home.coordinator.blobs.put_bytes(bytes(poisoned))
        c = tables.contributions.c
        planting = update(tables.contributions).where(c.id == 2).values(sha256=sha256)
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
    async with house(tmp_path) as home:
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
    async with house(tmp_path) as home:
        with pytest.raises(Exception, match=r"set shards to \d+ or less"):
            await home.start_run(SHARDED.replace("shards = 3", "shards = 1000"))


# --- several coordinators ---


async def test_replicas_share_the_shards_of_one_merge(tmp_path: Path, postgres: Any) -> None:
    url = await postgres.fresh()
    async with house(tmp_path, database=url) as home:
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

# Six parts, surveys and merges of three shards; each process goes on where the one before was killed.
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
        async with opened(Settings(**settings), VirtualClock(now)) as coordinator:
            await coordinator.merger.merge_if_due(1)

    install(Faults((Fault.read(point),)), setattr)
    asyncio.run(merge())


@pytest.fixture(scope="module")
def processes() -> Any:
    """Processes that are born with everything imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["coordinator.app", "alembic.command", "asyncpg", "tests.faults", __name__]
    )
    return context


async def test_a_kill_in_the_middle_leaves_the_old_head_or_the_new_one(
    tmp_path: Path, database_url: str, processes: Any
) -> None:
    async with house(tmp_path, database=database_url, merge_threads=1) as home:
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
        await home.clock.advance(later + 60.0 - home.clock.now())
        await round_of(crew, len(await heads(home)))
        assert await home.coordinator.merger.merge_if_due(1)
        assert await remade(home, 0) == (2, None)
        assert await counted(home, merge_tables.merge_parts) == 0
        assert (await home.coordinator.checks.run()).breaches == ()


async def waiting(home: House) -> int:
    return len(await home.coordinator.db.read(lambda conn: contributions.mergeable(conn, 1)))


STEPS = int(os.environ.get("CHAOS_KILLS", "24"))
VOLUNTEERS = 4
CHAOS = SHARDED.replace("quorum = 3", "quorum = 2").replace(
    'aggregate = "centred-clip"', 'aggregate = "norm-clip"'
) + ("[evaluation]\nevery = 0\n")
STEPS_APART = 4  # between two blows
STOPPED_S = 0.8  # longer than a lease


@asynccontextmanager
async def crowd(site: Site, twin: Site, folder: Path) -> AsyncIterator[Diary]:
    """Volunteers at work on two coordinators."""
    async with site.opened() as coordinator:
        run = await coordinator.db.read(lambda conn: runs.by_name(conn, "tiny"))
    diary, schema = Diary(), definition(run).schema
    urls = [site.url, twin.url] * VOLUNTEERS
    people = [Numbers(urls[n], f"Nr {n}", schema, diary, folder) for n in range(VOLUNTEERS)]
    await asyncio.gather(*(who.join() for who in people))
    try:
        async with asyncio.TaskGroup() as group:
            for who in people:
                group.create_task(who.work())
            yield diary
            for who in people:
                who.stopping = True
    finally:
        for who in people:
            await who.http.aclose()


async def torment(site: Site, moments: random.Random) -> None:
    """Stop a coordinator for longer than its leases last, or kill it and begin another."""
    await asyncio.sleep(moments.uniform(0.0, 0.3))
    if moments.random() < 0.6:
        site.child.kill(signal.SIGSTOP)
        await asyncio.sleep(STOPPED_S)
        site.child.kill(signal.SIGCONT)
        return
    site.child.kill()
    await site.child.ended()
    await site.serve()
    await site.listening()


@pytest.mark.chaos
@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
async def test_two_coordinators_with_pauses_and_kills_never_merge_a_step_twice(
    site: Site, twin: Site, tmp_path: Path
) -> None:
    await site.start_run(CHAOS)
    for each in (site, twin):
        await each.serve()
        await each.listening()
    moments = random.Random(4)
    async with site.opened() as coordinator, crowd(site, twin, tmp_path) as diary:
        for steps in range(STEPS_APART, STEPS + 1, STEPS_APART):
            await torment(moments.choice((site, twin)), moments)
            while (await coordinator.runs.info("tiny")).version < steps:
                await diary.more(1)
    for each in (site, twin):
        assert await each.stop() == 0
    async with site.opened() as coordinator:
        assert (await coordinator.checks.run()).breaches == ()
        assert await coordinator.check_ledger() == []
        info = await coordinator.runs.info("tiny")
        merges = await coordinator.db.read(
            lambda conn: list(conn.execute(tables.merges.select()).mappings())
        )
        again = await Remerge(coordinator.db, coordinator.blobs, coordinator.threads).run("tiny")
    committed = Counter(row["base"] for row in merges if row["state"] == "committed")
    assert committed == Counter(range(info.version))
    assert {row["owner"] for row in merges} >= {merges[0]["owner"], merges[-1]["owner"]}
    assert again.wrong is None
    assert again.merges > 0
