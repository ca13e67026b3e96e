"""Merges that must not be: of runs that rest or ended, of leases that were lost, of bytes that are
not blamed on anybody.
"""

from __future__ import annotations

import asyncio
import errno
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import sqlalchemy as sa
from safetensors.numpy import load_file
from structlog.testing import capture_logs

from coordinator.checking import draw_effects
from coordinator.database import recomputes
from coordinator.database import runs as run_rows
from coordinator.database.tables.accounts import volunteers
from coordinator.database.tables.contributions import contributions
from coordinator.database.tables.merges import merge_parts, merges
from coordinator.database.tables.runs import runs
from coordinator.database.tables.tasks import failures
from coordinator.database.tables.versions import evaluations, versions
from coordinator.merging.evaluation import EvaluatedVersion
from coordinator.merging.merger import IDLE_S, POLL_S
from coordinator.merging.shard_jobs import TOPIC
from coordinator.rules import run_file
from coordinator.rules.machine_time import MachineSeconds
from coordinator.runs.definition import definition
from coordinator.storage.blobs import DamagedBlob, MissingBlob
from shared.errors import StorageFull, Unavailable
from shared.protocol.accounts import Me
from shared.protocol.contributions import Verdict
from shared.protocol.limits import API
from shared.protocol.members import MemberData
from shared.workloads.base import Sample
from tests.support.failpoints import fail, faults
from tests.support.local_coordinator import RUN, LocalCoordinator, Worker, decode, local_coordinator

PRIVATE = (
    RUN
    + """
[data]
at = "members"
[privacy]
epsilon = 8.0
clip = 0.01
[stop]
versions = 2
"""
)


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[LocalCoordinator]:
    async with local_coordinator(tmp_path) as made:
        await made.start_run(RUN)
        yield made


async def team(home: LocalCoordinator) -> list[tuple[Worker, Verdict]]:
    """Two whose work may be merged."""
    workers = [await home.join(name) for name in ("Ann", "Bob")]
    return [(worker, await worker.work(seed)) for seed, worker in enumerate(workers)]


async def values(home: LocalCoordinator, *columns: Any) -> list[Any]:
    query = sa.select(*columns).order_by(next(iter(columns[0].table.primary_key)))
    rows = await home.coordinator.db.read(lambda conn: conn.execute(query).all())
    return [row[0] if len(columns) == 1 else tuple(row) for row in rows]


async def sound(home: LocalCoordinator) -> bool:
    report = await home.coordinator.checks.run()
    return report.breaches == () and await home.coordinator.ledger.check() == ()


async def earned(worker: Worker) -> int:
    return decode(await worker.get("/workers/me"), Me).earned_micro


def during(
    home: LocalCoordinator, patch: pytest.MonkeyPatch, act: Callable[[], Awaitable[object]]
) -> None:
    """Let something happen while a merge stores its files."""
    put_file, left = home.coordinator.blobs.put_file, [act]

    async def and_meanwhile(sha256: str, path: Path) -> None:
        await put_file(sha256, path)
        while left:
            await left.pop()()

    patch.setattr(home.coordinator.blobs, "put_file", and_meanwhile)


async def taken_over(home: LocalCoordinator) -> None:
    """Let another process have the merge, as after a silence of this one."""
    values = {"owner": "another", "attempt": merges.c.attempt + 1}
    await home.coordinator.db.write(lambda conn: conn.execute(sa.update(merges).values(**values)))


async def test_a_run_that_rests_is_not_merged(home: LocalCoordinator) -> None:
    await team(home)
    await home.coordinator.runs.pause("tiny")
    assert not await home.coordinator.merger.merge_if_due(1)
    assert await values(home, merges.c.id) == []  # not even tried
    assert await values(home, contributions.c.state) == ["accepted", "accepted"]
    await home.coordinator.runs.resume("tiny")
    assert await home.coordinator.merger.merge_if_due(1)


async def test_below_the_quorum_nothing_is_merged(home: LocalCoordinator) -> None:
    ann, bob = await home.join("Ann"), await home.join("Bob")
    await bob.claim()
    await ann.work(1)
    running, due = await home.coordinator.db.read(home.coordinator.merger._look)
    assert ([run.id for run in running], due) == ([1], [])
    assert not await home.coordinator.merger.merge_if_due(1)
    assert await values(home, merges.c.id) == []


async def test_a_run_that_ends_during_a_merge_gets_no_version_and_pays_once(
    home: LocalCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = await team(home)
    during(home, monkeypatch, lambda: home.coordinator.runs.stop("tiny"))
    assert not await home.coordinator.merger.merge_if_due(1)
    assert await values(home, runs.c.head) == [0]
    assert await values(home, contributions.c.state) == ["superseded", "superseded"]
    assert all([await earned(worker) > 0 for worker, _ in pair])
    assert home.coordinator.merger.outcomes == {("tiny", "overtaken"): 1}
    assert await sound(home)


async def test_a_run_that_is_paused_during_a_merge_gets_its_version_later(
    home: LocalCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    await team(home)
    during(home, monkeypatch, lambda: home.coordinator.runs.pause("tiny"))
    assert not await home.coordinator.merger.merge_if_due(1)
    assert await values(home, runs.c.head) == [0]
    assert await values(home, contributions.c.state) == ["accepted", "accepted"]
    await home.coordinator.runs.resume("tiny")
    assert await home.coordinator.merger.merge_if_due(1)
    assert await sound(home)


async def test_who_lost_the_lease_of_a_merge_commits_nothing_and_ends_nothing(
    home: LocalCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    await team(home)
    during(home, monkeypatch, lambda: taken_over(home))
    assert not await home.coordinator.merger.merge_if_due(1)
    assert await values(home, runs.c.head) == [0]
    assert await values(home, contributions.c.state) == ["accepted", "accepted"]
    assert await values(home, merges.c.state, merges.c.owner) == [("leased", "another")]
    assert not await home.coordinator.merger.merge_if_due(1)  # the other one makes it
    assert await sound(home)


async def damaged(home: LocalCoordinator, monkeypatch: pytest.MonkeyPatch, sha256: str) -> None:
    """Let the store give other bytes for one name."""
    local_files = home.coordinator.blobs.local_files

    async def others(names: Sequence[str]) -> list[Path]:
        if sha256 in names:
            raise DamagedBlob(sha256)
        return await local_files(names)

    monkeypatch.setattr(home.coordinator.blobs, "local_files", others)


async def test_a_damaged_update_is_left_out_at_once_and_blamed_on_nobody(
    home: LocalCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann, _ = await team(home)
    sha256 = (await values(home, contributions.c.sha256))[0]
    await damaged(home, monkeypatch, sha256)
    watch = home.coordinator.signals.watch("queue")
    with capture_logs() as lines:
        assert not await home.coordinator.merger.merge_if_due(1)
    (line,) = [line for line in lines if line["event"] == "bytes in the store changed"]
    assert (line["run"], line["log_level"]) == ("tiny", "warning")
    assert sha256[:12] in line["error"]
    assert await values(home, contributions.c.state) == ["rejected", "accepted"]
    assert await values(home, failures.c.id) == []
    m = merges.c
    assert await values(home, m.state, m.failures, m.message) == [
        ("failed", 0, f"{DamagedBlob(sha256)}")
    ]
    assert await earned(ann[0]) == 0
    assert await watch.wait(0)  # the task is somebody else's
    assert await sound(home)


async def test_a_damaged_base_sets_no_work_aside(
    home: LocalCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    await team(home)
    await damaged(home, monkeypatch, (await values(home, versions.c.master_sha256))[0])
    background = asyncio.all_tasks()
    for _ in range(3):
        with pytest.raises(DamagedBlob):
            await home.coordinator.merger.merge_if_due(1)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() <= background  # nobody renews a merge that ended
    assert await values(home, contributions.c.state) == ["accepted", "accepted"]
    m = merges.c
    ((state, count, message, ended),) = await values(
        home, m.state, m.failures, m.message, m.ended_at
    )
    assert (state, count, ended) == ("abandoned", 0, home.clock.now())
    assert message  # the organiser reads why until a merge succeeds


async def test_a_run_whose_base_is_lost_keeps_no_other_run_from_its_merge(
    home: LocalCoordinator,
) -> None:
    await team(home)
    lost = (await values(home, versions.c.master_sha256))[0]
    await home.coordinator.blobs.delete(lost, "asked")
    await home.start_run(RUN.replace('"tiny"', '"other"').replace("[model]", "seed = 7\n[model]"))
    helpers = [await home.join(name) for name in ("Cleo", "Dan", "Eve", "Finn")]
    for seed, helper in enumerate(helpers, 5):
        await helper.work(seed)
    coordinator = home.coordinator
    job = asyncio.ensure_future(coordinator._keep_running("merger", coordinator.merger.run))
    with capture_logs() as lines:
        async with asyncio.timeout(60):
            while await values(home, runs.c.head) != [0, 1]:
                assert not job.done()
                await home.clock.advance(POLL_S)
    assert {line["error"] for line in lines if line["event"] == "background job waits"} == {
        f"{MissingBlob(lost)}"
    }
    home.coordinator.stopping.set()
    async with asyncio.timeout(60):
        while not job.done():
            await home.clock.advance(IDLE_S)


@pytest.mark.parametrize("error", [StorageFull("no space is left"), Unavailable("the store rests")])
async def test_a_store_that_is_full_or_away_counts_as_no_failure(
    home: LocalCoordinator, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    await team(home)

    async def failing(sha256: str, path: Path) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(home.coordinator.blobs, "put_file", failing)
        for _ in range(3):
            with pytest.raises(type(error)):
                await home.coordinator.merger.merge_if_due(1)
    assert await values(home, contributions.c.state) == ["accepted", "accepted"]
    assert await values(home, merges.c.failures, merges.c.message) == [(0, f"{error}")]
    assert home.coordinator.merger.outcomes == {}
    assert await home.coordinator.merger.merge_if_due(1)


async def test_who_lost_the_lease_sets_nobody_aside(
    home: LocalCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    await team(home)
    sha256 = await home.coordinator.blobs.put_bytes(b"this is no file of tensors")
    planted = sa.update(contributions).where(contributions.c.id == 1).values(sha256=sha256)
    await home.coordinator.db.write(lambda conn: conn.execute(planted))
    assert not await home.coordinator.merger.merge_if_due(1)
    assert await values(home, contributions.c.state) == ["accepted", "accepted"]  # a first failure
    local = home.coordinator.blobs.local

    async def and_meanwhile(name: str) -> Path:
        await taken_over(home)
        return await local(name)

    monkeypatch.setattr(home.coordinator.blobs, "local", and_meanwhile)
    assert not await home.coordinator.merger.merge_if_due(1)
    assert await values(home, contributions.c.state) == ["accepted", "accepted"]
    assert await values(home, volunteers.c.standing) == ["vetted", "vetted"]
    assert await values(home, merges.c.owner, merges.c.failures) == [("another", 1)]


async def test_the_merger_looks_past_a_merge_that_another_process_makes(
    home: LocalCoordinator,
) -> None:
    await team(home)
    look = home.coordinator.merger._look
    running, due = await home.coordinator.db.read(look)
    assert [run.id for run in running] == [run.id for run in due] == [1]
    bid = {"run_id": 1, "base": 0, "shard": 0, "contributions": "[]", "terms": "{}"}
    lease = {"owner": "another", "lease_until": home.clock.now() + 60.0, "state": "leased"}
    blank = {"attempt": 1, "failures": 0, "message": "", "created_at": 0.0, "ended_at": None}
    await home.coordinator.db.write(
        lambda conn: conn.execute(sa.insert(merges).values(**bid | lease | blank))
    )
    assert (await home.coordinator.db.read(look))[1] == []
    assert not await home.coordinator.merger.merge_if_due(1)
    await home.clock.advance(61.0)
    assert [run.id for run in (await home.coordinator.db.read(look))[1]] == [1]
    assert await home.coordinator.merger.merge_if_due(1)


async def test_the_merger_makes_what_is_due_until_it_is_stopped(home: LocalCoordinator) -> None:
    """Also a merge that a dead process of the same file of SQLite had leased for long."""
    await team(home)
    lease = home.coordinator.merger._lease
    assert await home.coordinator.db.write(lambda conn: lease(conn, 1)) is not None
    left = sa.update(merges).values(owner="a dead process", lease_until=home.clock.now() + 1e6)
    await home.coordinator.db.write(lambda conn: conn.execute(left))
    stop = asyncio.Event()
    job = asyncio.ensure_future(home.coordinator.merger.run(stop))
    for head in (1, 2):
        async with asyncio.timeout(120):
            while await values(home, runs.c.head) != [head]:
                assert not job.done()
                await home.clock.advance(POLL_S)
        if head == 1:
            for number, name in enumerate(("Cleo", "Dan")):
                await (await home.join(name)).work(10 + number)
    stop.set()
    async with asyncio.timeout(120):
        while not job.done():
            await home.clock.advance(IDLE_S)
    await job
    assert {*await values(home, merges.c.state)} == {"committed"}
    assert await sound(home)


async def test_the_merger_is_woken_by_updates_by_work_and_by_parts_of_others(
    home: LocalCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While no time passes."""
    stop, signals = asyncio.Event(), home.coordinator.signals
    looks, read = list[str](), home.coordinator.db.read

    async def noted(query: Any) -> Any:
        looks.append(query.__name__)
        return await read(query)

    async def looked(count: int) -> None:
        async with asyncio.timeout(60):
            while looks.count("_look") < count:
                await asyncio.sleep(0.001)
        assert looks.count("_look") == count

    monkeypatch.setattr(home.coordinator.db, "read", noted)
    job = asyncio.ensure_future(home.coordinator.merger.run(stop))
    await looked(1)
    for count, topic in enumerate(("contributions", "queue", TOPIC), 2):
        signals.notify(topic)
        await looked(count)
    await home.coordinator.runs.pause("tiny")  # wakes it, and then it looks seldom
    await looked(5)
    await home.clock.advance(POLL_S)
    await looked(5)
    stop.set()
    signals.notify(TOPIC)
    async with asyncio.timeout(60):
        await job


async def test_the_log_tells_what_was_merged_and_what_failed(
    home: LocalCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    await team(home)
    with capture_logs() as lines:
        with monkeypatch.context() as patched:
            during(home, patched, lambda: home.coordinator.runs.pause("tiny"))
            assert not await home.coordinator.merger.merge_if_due(1)
        await home.coordinator.runs.resume("tiny")
        assert await home.coordinator.merger.merge_if_due(1)
        for number, name in enumerate(("Cleo", "Dan")):
            await (await home.join(name)).work(10 + number)
        broken = await home.coordinator.blobs.put_bytes(b"this is no file of tensors")
        planted = sa.update(contributions).where(contributions.c.id == 3).values(sha256=broken)
        await home.coordinator.db.write(lambda conn: conn.execute(planted))
        assert not await home.coordinator.merger.merge_if_due(1)
    assert home.coordinator.merger.outcomes == {
        ("tiny", "overtaken"): 1,
        ("tiny", "merged"): 1,
        ("tiny", "failed"): 1,
    }
    ours = [line for line in lines if line["event"].startswith("merge")]
    error, reason = ours[0].pop("error"), ours[2].pop("error")
    assert "the head has moved" in error
    assert "tensor" in reason
    assert ours == [
        {"event": "merge overtaken", "run": "tiny", "log_level": "info"},
        {
            "event": "merged",
            "run": "tiny",
            "version": 1,
            "contributions": 2,
            "seconds": 0.0,  # the clock stood still
            "log_level": "info",
        },
        {
            "event": "merge failed",
            "run": "tiny",
            "version": 2,
            "failures": 1,
            "log_level": "warning",
        },
    ]


async def test_a_merge_counts_steps_and_tokens_and_keeps_what_it_was_made_of(
    home: LocalCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed, worker in enumerate([await home.join(name) for name in ("Ann", "Bob")]):
        lease = await worker.claim()
        start = await worker.begin(lease)
        await home.clock.advance(2.0)
        await worker.hand_in(lease, start, seed)
    home.coordinator.attendance.drain()
    topics = ("run:1", "versions", "queue")
    watches = [home.coordinator.signals.watch(topic) for topic in topics]
    terms: list[dict[str, object]] = []

    async def note() -> None:
        terms.append(json.loads((await values(home, merges.c.terms))[0]))

    during(home, monkeypatch, note)
    await home.clock.advance(3.0)
    assert await home.coordinator.merger.merge_if_due(1)
    (begun,) = terms
    assert (begun["workers"], begun["noise_key"], begun["samples"]) == (2, "", {})
    assert begun["cooling"] == 1.0
    lr = run_file.parse(RUN).train.lr
    assert begun["rate"] == pytest.approx(lr / 100)  # the first of a hundred steps of warm-up
    sent = contributions.c
    steps, samples = zip(*await values(home, sent.steps, sent.samples), strict=True)
    (sample_size,) = await values(home, runs.c.sample_size)
    assert sample_size == 8  # tokens of a block
    v = versions.c
    versions_made = await values(home, v.kind, v.parent, v.contributions, v.global_step, v.tokens)
    (_, _, _, *zero), (kind, parent, made_of, *counters) = versions_made
    assert (kind, parent, made_of, zero) == ("merge", 0, "[1,2]", [0, 0])
    assert counters == [sum(steps) / 2, sum(samples) * sample_size]
    assert await values(home, runs.c.global_step, runs.c.tokens) == [tuple(counters)]
    m = merges.c
    ended = await values(home, m.state, m.failures, m.message, m.ended_at)
    assert ended == [("committed", 0, "", home.clock.now())]
    query = sa.select(contributions.c.merged_at, contributions.c.version)
    rows = await home.coordinator.db.read(lambda conn: conn.execute(query).all())
    assert {tuple(row) for row in rows} == {(home.clock.now(), 1)}
    assert all([await watch.wait(0) for watch in watches])
    assert home.coordinator.attendance.drain() == {1: MachineSeconds(merged=2.0)}  # one second each
    assert home.coordinator.merger.durations.count == 1


async def test_the_rate_of_a_later_merge_follows_the_steps_of_the_run(
    home: LocalCoordinator,
) -> None:
    """Two local steps a version: a rate by versions would warm up half as fast."""
    pair = [worker for worker, _ in await team(home)]
    assert await home.coordinator.merger.merge_if_due(1)
    for number, worker in enumerate(pair, 2):
        await worker.work(number)
    assert await home.coordinator.merger.merge_if_due(1)
    terms = await values(home, merges.c.terms)
    lr = run_file.parse(RUN).train.lr
    rates = [json.loads(text)["rate"] for text in terms]
    assert rates == pytest.approx([lr / 100, 3 * lr / 100])


@pytest.mark.parametrize(
    ("shards", "merged", "state"),
    [(2, "[1,2]", "leased"), (2, "[1,2]", "abandoned"), (3, "[1,2,3]", "leased")],
)
async def test_a_merge_in_parts_that_was_left_is_resumed_unless_the_plan_changed(
    tmp_path: Path, shards: int, merged: str, state: str
) -> None:
    """Its parts may be done: work that came later waits for the next version."""
    async with local_coordinator(tmp_path) as home:
        await home.start_run(RUN.replace("[plan]", "[plan]\nshards = 2"))
        await team(home)
        lease = home.coordinator.merger._lease
        assert await home.coordinator.db.write(lambda conn: lease(conn, 1)) is not None
        await (await home.join("Cleo")).work(9)
        left = sa.update(merges).values(owner="a dead process", lease_until=0.0, state=state)
        table = run_file.decode((await values(home, runs.c.file))[0])
        plan = {**table.plan, "shards": shards}
        file = run_file.encode(msgspec.structs.replace(table, plan=plan))
        await home.coordinator.db.write(lambda conn: conn.execute(left))
        await home.coordinator.db.write(
            lambda conn: conn.execute(sa.update(runs).values(file=file))
        )
        assert await home.coordinator.merger.merge_if_due(1)
        assert await values(home, versions.c.contributions) == ["[]", merged]
        assert await values(home, merge_parts.c.id) == []
        assert await sound(home)


@pytest.mark.parametrize("error", [OSError(errno.EIO, "input/output error"), Unavailable("away")])
async def test_a_part_that_a_disk_or_store_refuses_once_costs_its_merge_no_failure(
    tmp_path: Path, error: Exception
) -> None:
    """Another try makes it within the same merge; only its contents may end one."""
    async with local_coordinator(tmp_path) as home:
        momentum = 'preset = "diloco"\nshards = 2'  # each part has a state too
        await home.start_run(RUN.replace('preset = "fedavg"', momentum))
        await team(home)
        with faults(fail(error).before("put_file")).installed():
            assert await home.coordinator.merger.merge_if_due(1)
        assert await values(home, merges.c.state, merges.c.failures) == [("committed", 0)]
        assert [path for path in home.coordinator.blobs.scratch().iterdir() if path.is_file()] == []
        assert await sound(home)


async def test_a_part_that_another_process_took_over_leaves_no_file_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both made it: of the files in the store only those of the version stay."""
    async with local_coordinator(tmp_path) as home:
        await home.start_run(RUN.replace("[plan]", "[plan]\nshards = 2"))
        await team(home)
        before = {entry.sha256 async for entry in home.coordinator.blobs.entries()}
        silent = {"owner": "another", "attempt": merge_parts.c.attempt + 1, "lease_until": 0.0}
        taken = sa.update(merge_parts).where(merge_parts.c.state == "leased").values(**silent)
        during(
            home,
            monkeypatch,
            lambda: home.coordinator.db.write(lambda conn: conn.execute(taken)),
        )
        assert await home.coordinator.merger.merge_if_due(1)
        after = {entry.sha256 async for entry in home.coordinator.blobs.entries()}
        assert after - before == {(await values(home, versions.c.master_sha256))[1]}
        assert await sound(home)


async def test_a_part_whose_process_died_goes_to_another_once_its_lease_ends(
    tmp_path: Path,
) -> None:
    async with local_coordinator(tmp_path) as home:
        await home.start_run(RUN.replace("[plan]", "[plan]\nshards = 2"))
        await team(home)
        merger = home.coordinator.merger
        assert await home.coordinator.db.write(lambda conn: merger._lease(conn, 1)) is not None
        taken = [await merger._parts._take() for _ in range(3)]
        assert [part.shard if part else None for part in taken] == [0, 1, None]
        lease_s = home.coordinator.settings.constants.job_lease_s
        await home.clock.advance(lease_s - 1.0)
        assert await merger._parts._take() is None
        await home.clock.advance(2.0)
        again = await merger._parts._take()
        assert again is not None
        assert (again.shard, again.attempt) == (0, 2)


async def test_a_file_of_a_part_that_cannot_be_deleted_is_swept_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(name: str, reason: str) -> None:
        raise OSError(errno.EIO, "input/output error")

    async with local_coordinator(tmp_path) as home:
        await home.start_run(RUN.replace("[plan]", "[plan]\nshards = 2"))
        await team(home)

        async def stored() -> set[str]:
            return {entry.sha256 async for entry in home.coordinator.blobs.entries()}

        before = await stored()
        with monkeypatch.context() as patched:
            patched.setattr(home.coordinator.blobs, "delete", refuse)
            assert await home.coordinator.merger.merge_if_due(1)
        version = (await values(home, versions.c.master_sha256))[1]
        assert await stored() - before > {version}
        await home.clock.advance(7 * 86_400.0)
        await home.coordinator.upkeep.sweep()
        assert await stored() - before == {version}
        assert await sound(home)


async def member(home: LocalCoordinator, name: str) -> Worker:
    worker = await home.join(name)
    body = msgspec.json.encode(MemberData(samples=64, items=512, heldout=1))
    reply = await worker.http.put(f"{API}/runs/tiny/data", content=body)
    assert reply.status_code == 204, reply.text
    return worker


async def test_the_noise_of_a_private_merge_does_not_show_how_many_took_part(
    tmp_path: Path,
) -> None:
    """Without noise two of four live members make half a step (`arrival_scale`)."""
    async with local_coordinator(tmp_path) as home:
        await home.start_run(PRIVATE)
        members = [await member(home, name) for name in ("Ann", "Bob", "Cleo", "Dan")]
        for number, worker in enumerate(members[:2]):
            await worker.work(number)
        for worker in members[2:]:
            await worker.begin(await worker.claim())
        assert await home.coordinator.merger.merge_if_due(1)
        run = await home.coordinator.db.read(lambda conn: run_rows.by_id(conn, 1))
        names = await values(home, versions.c.master_sha256)
        before, after = [load_file(await home.coordinator.blobs.local(name)) for name in names]
        step = np.concatenate([(after[name] - before[name]).ravel() for name in before])
        privacy = definition(run).file.privacy
        expected = privacy.noise * privacy.clip / 2  # divided by the quorum
        assert abs(float(step.std()) / expected - 1) < 5 / np.sqrt(2 * step.size)


async def test_two_updates_of_a_member_move_a_private_version_by_one_clip(tmp_path: Path) -> None:
    """Both point the same way; otherwise a member would count once more with each machine."""
    quiet = PRIVATE.replace("epsilon = 8.0", "epsilon = 1000.0\nnoise = 0.05")
    async with local_coordinator(tmp_path) as home:
        await home.start_run(quiet)
        ann, bob = [await member(home, name) for name in ("Ann", "Bob")]
        leases = [(worker, await worker.claim()) for worker in (ann, bob, ann)]
        starts = [await worker.begin(lease) for worker, lease in leases]
        updates = [await ann.update("tiny", *way) for way in ((1, 2e-3), (2, 2e-3), (1, 1e-3))]
        for (worker, lease), start, data in zip(leases, starts, updates, strict=True):
            await worker.upload(lease, data)
            verdict = await worker.submit(lease, start, data)
            assert verdict.state == "accepted", verdict.message
        assert await home.coordinator.merger.merge_if_due(1)
        assert (await values(home, versions.c.contributions))[1] == "[1,2,3]"
        names = await values(home, versions.c.master_sha256)
        before, after = [load_file(await home.coordinator.blobs.local(name)) for name in names]
        step = np.concatenate([(before[name] - after[name]).ravel() for name in sorted(before)])
        path = tmp_path / "update"
        path.write_bytes(await ann.update("tiny", 1, 1.0))
        update = load_file(path)
        way = np.concatenate([update[name].ravel() for name in sorted(before)])
        quorum, clip, noise = 2, 0.01, 0.05
        along = float(step @ way / np.linalg.norm(way))
        assert abs(along - clip / quorum) < 5 * noise * clip / quorum


async def test_each_private_merge_has_a_secret_of_its_own_and_none_exceeds_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever knew the secret of a merge, or that two merges share it, could take the noise off."""
    async with local_coordinator(tmp_path) as home:
        await home.start_run(PRIVATE)
        pair = [await member(home, name) for name in ("Ann", "Bob")]
        secrets, samples = list[str](), list[dict[str, int]]()

        async def note() -> None:
            terms = json.loads((await values(home, merges.c.terms))[-1])
            secrets.append(terms["noise_key"])
            samples.append(terms["samples"])

        for version in range(2):
            for number, worker in enumerate(pair):
                await worker.work(10 * version + number)
            during(home, monkeypatch, note)
            assert await home.coordinator.merger.merge_if_due(1)
        assert len({*secrets}) == 2
        assert [len(bytes.fromhex(secret)) for secret in secrets] == [32, 32]
        assert samples == [{worker.worker_id: 64 for worker in pair}] * 2
        terms = await values(home, merges.c.terms)
        assert [json.loads(text)["noise_key"] for text in terms] == ["", ""]
        for number, worker in enumerate(pair):
            assert (await worker.work(50 + number)).state == "accepted"
        assert not await home.coordinator.merger.merge_if_due(1)
        assert await values(home, runs.c.head) == [2]
        assert len(await values(home, merges.c.id)) == 2  # not even begun


async def test_a_merge_in_parts_that_was_left_is_not_resumed_with_work_that_counts_no_more(
    tmp_path: Path,
) -> None:
    async with local_coordinator(tmp_path) as home:
        await home.start_run(RUN.replace("[plan]", "[plan]\nshards = 2"))
        for number, name in enumerate(("Ann", "Bob", "Cleo")):
            await (await home.join(name)).work(number)
        lease = home.coordinator.merger._lease
        job = await home.coordinator.db.write(lambda conn: lease(conn, 1))
        assert job is not None
        assert [row.id for row in job.rows] == [1, 2, 3]
        left = sa.update(merges).values(owner="a dead process", lease_until=0.0)
        out = sa.update(contributions).where(contributions.c.id == 1).values(state="superseded")
        await home.coordinator.db.write(lambda conn: conn.execute(left))
        await home.coordinator.db.write(lambda conn: conn.execute(out))
        assert await home.coordinator.merger.merge_if_due(1)
        assert await values(home, contributions.c.state) == ["superseded", "merged", "merged"]
        assert await values(home, versions.c.version, versions.c.contributions) == [
            (0, "[]"),
            (1, "[2,3]"),
        ]


async def test_bytes_of_the_base_that_are_damaged_meanwhile_are_blamed_on_no_contribution(
    home: LocalCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A merge failed twice, and each contribution is tried alone: on a base that cannot be read."""
    await team(home)
    broken = await home.coordinator.blobs.put_bytes(b"this is no file of tensors")
    planted = sa.update(contributions).where(contributions.c.id == 1).values(sha256=broken)
    await home.coordinator.db.write(lambda conn: conn.execute(planted))
    assert not await home.coordinator.merger.merge_if_due(1)
    base = (await values(home, versions.c.master_sha256))[0]
    local, reads = home.coordinator.blobs.local, [0]

    async def damaged_later(name: str) -> Path:
        reads[0] += name == base
        if name == base and reads[0] > 1:
            raise DamagedBlob(name)
        return await local(name)

    with monkeypatch.context() as patched:
        patched.setattr(home.coordinator.blobs, "local", damaged_later)
        assert not await home.coordinator.merger.merge_if_due(1)
    assert reads[0] == 3  # of the merge, and of each contribution alone
    assert await values(home, contributions.c.state) == ["accepted", "accepted"]
    assert await values(home, failures.c.id) == []
    assert not await home.coordinator.merger.merge_if_due(1)
    assert await values(home, contributions.c.state) == ["rejected", "accepted"]
    assert "tensor" in (await values(home, contributions.c.message))[0]


GATED = RUN + "[evaluation]\ngate = true\n"


def measured(
    home: LocalCoordinator, patch: pytest.MonkeyPatch, *losses: float | None, error: float = 0.0
) -> list[float | None]:
    """Let evaluations find these losses, one after the other; None: the server stops meanwhile."""
    left = list(losses)

    async def measure(run: object, weights: Path, *, sample: bool) -> EvaluatedVersion | None:
        assert weights.exists()
        assert not sample
        loss = left.pop(0)
        metrics = {} if loss is None or loss < 0 else {"loss": loss}
        metrics |= {"solved_error": error} if error else {}
        return (
            None
            if loss is None
            else EvaluatedVersion(metrics=metrics, sample=Sample(kind="text", title=""))
        )

    patch.setattr(home.coordinator.evaluation, "measure", measure)
    return left


@pytest.mark.parametrize(
    ("last", "loss", "passes"),
    [
        (4.0, 6.0, True),
        (4.0, 6.01, False),
        (None, 99.0, True),  # nothing to compare with
        (None, math.nan, False),
        (4.0, math.inf, False),
        (4.0, -1.0, False),  # no loss was measured at all
    ],
)
async def test_a_gate_lets_no_version_through_whose_loss_is_much_above_the_last(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    last: float | None,
    loss: float,
    passes: bool,
) -> None:
    async with local_coordinator(tmp_path) as home:
        await home.start_run(GATED)
        if last is not None:
            done = sa.update(evaluations).values(state="done", loss=last)
            await home.coordinator.db.write(lambda conn: conn.execute(done))
        await team(home)
        measured(home, monkeypatch, loss)
        assert await home.coordinator.merger.merge_if_due(1) == passes
        assert await values(home, runs.c.head) == [int(passes)]
        ((state, count, message),) = await values(
            home, merges.c.state, merges.c.failures, merges.c.message
        )
        assert (state, count) == (("committed", 0) if passes else ("failed", 1))
        if not passes:
            shown = "nan" if loss < 0 else f"{loss:.3f}"
            assert message == (
                f"the merged model has loss {shown} where {last or 0:.3f} was measured before"
            )
        assert [path.name for path in home.coordinator.blobs.scratch().glob("merge-*")] == []


@pytest.mark.parametrize(
    ("last", "loss", "error", "passes"),
    [
        (0.0, 0.02, 0.014, True),  # 100 of 100 problems were solved, and now 98
        (0.02, 0.05, 0.022, True),
        (0.0, 1.0, 0.0, False),
        (0.1, 0.5, 0.05, False),
    ],
)
async def test_a_gate_blames_nobody_for_the_chance_of_few_problems(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    last: float,
    loss: float,
    error: float,
    passes: bool,
) -> None:
    async with local_coordinator(tmp_path) as home:
        await home.start_run(GATED)
        await team(home)
        done = sa.update(evaluations).values(state="done", loss=last)
        await home.coordinator.db.write(lambda conn: conn.execute(done))
        measured(home, monkeypatch, loss, error=error)
        assert await home.coordinator.merger.merge_if_due(1) == passes
        assert await values(home, merges.c.failures) == [0 if passes else 1]


async def test_who_ruins_a_gated_version_is_found_alone_and_a_stop_blames_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with local_coordinator(tmp_path) as home:
        await home.start_run(GATED)
        await team(home)
        measured(home, monkeypatch, None)
        with pytest.raises(Unavailable, match="stopping"):
            await home.coordinator.merger.merge_if_due(1)
        assert await values(home, merges.c.state, merges.c.failures) == [("abandoned", 0)]
        # two merges, then each alone: a good one, and one during whose trial the server stops
        left = measured(home, monkeypatch, math.nan, math.nan, 4.0, None)
        for _ in range(2):
            assert not await home.coordinator.merger.merge_if_due(1)
        assert left == []
        assert await values(home, contributions.c.state) == ["accepted", "accepted"]
        left = measured(home, monkeypatch, math.nan, 4.0, math.nan)
        assert not await home.coordinator.merger.merge_if_due(1)
        assert left == []
        assert await values(home, contributions.c.state) == ["accepted", "rejected"]
        assert await values(home, failures.c.kind) == ["failure"]


async def test_pay_that_a_draw_proved_before_its_merge_is_free_with_the_merge(
    tmp_path: Path,
) -> None:
    """But for the bond, and for what no draw has proved."""
    async with local_coordinator(tmp_path, open=True, proof_of_work_bits=0) as home:
        alone = RUN.replace("quorum = 2", "quorum = 1\ngrace = 0.0")
        await home.start_run(alone + "[trust]\nrecompute = 1.0\n")
        eve = await home.stranger("Eve")
        prices = list[int]()
        for seed in range(2):
            verdict = await eve.work(seed)
            prices.append(verdict.credits_micro)

            def passed(conn: sa.Connection, number: int = verdict.contribution) -> bool:
                row = recomputes.get(conn, number)
                assert row is not None
                figures = ("", '{"cosine":1.0,"norm_ratio":1.0}')
                return draw_effects.settle(conn, row, "passed", figures, home.clock.now())

            assert await home.coordinator.db.write(passed)
            assert await home.coordinator.merger.merge_if_due(1)
            me = decode(await eve.get("/workers/me"), Me)
            assert (me.pending_micro, me.escrow_micro) == (0, prices[seed])
            assert me.earned_micro == sum(prices[:seed])
        assert await sound(home)
