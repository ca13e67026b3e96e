"""Use of the machines' time: busy and goodput of a run over the last day, on both databases."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coordinator.attendance import Attendance
from coordinator.database import runs, tasks
from coordinator.database.monitoring import machine_hours
from shared.protocol.contributions import Verdict
from shared.protocol.heartbeat import HeartbeatRequest, TaskBeat
from shared.protocol.leases import Lease
from shared.protocol.limits import HEARTBEAT_S
from shared.units import DAY_S
from tests.support.local_coordinator import LocalCoordinator, Worker, decode, local_coordinator

BEATS = 20  # of a round, the first half at training
HALF_S = BEATS / 2 * HEARTBEAT_S


async def beat(worker: Worker, lease: Lease | None, *, paused: bool = False) -> None:
    tasks = () if lease is None else (TaskBeat(task=lease.task, attempt=lease.attempt),)
    reply = await worker.post("/workers/heartbeat", HeartbeatRequest(tasks=tasks, paused=paused))
    assert reply.status_code == 200


async def pass_time(
    home: LocalCoordinator, worker: Worker, lease: Lease | None, *, paused: bool = False
) -> None:
    """Half a round, with heartbeats."""
    for _ in range(BEATS // 2):
        await home.clock.advance(HEARTBEAT_S)
        await beat(worker, lease, paused=paused)


async def train(home: LocalCoordinator, worker: Worker, seed: int) -> None:
    """Do a task whose training takes half a round."""
    lease = await worker.claim()
    begun = await worker.begin(lease)
    await beat(worker, lease)
    await pass_time(home, worker, lease)
    data = await worker.update(lease.job.run, seed)
    await worker.upload(lease, data)
    submission = msgspec.structs.replace(worker.submission(lease, begun, data), train_s=HALF_S)
    reply = await worker.post(f"/tasks/{lease.task}/submit", submission)
    assert decode(reply, Verdict).state == "accepted"


async def shown(home: LocalCoordinator, run: str) -> Any:
    await home.coordinator.renewals.write_attendance()
    reply = await home.admin.post("/api/v1/admin/run.show", json={"name": run})
    return reply.json().get("time")


async def test_busy_and_goodput_of_the_time_of_machines(tmp_path: Path, database_url: str) -> None:
    async with local_coordinator(tmp_path, database=database_url) as home:
        run = await home.start_run()
        ann, ben = await home.join("ann"), await home.join("ben")
        await train(home, ann, 1)
        await pass_time(home, ann, None)
        # nothing is merged until the second update arrives
        assert await shown(home, run) == {"busy": 0.5, "goodput": 0.0}
        await train(home, ben, 2)
        await pass_time(home, ben, None, paused=True)  # its owner's time, not the run's
        await home.clock.advance(DAY_S / 24)  # away
        await beat(ben, None)
        [row] = await home.coordinator.run_queries.listing()
        number = await home.coordinator.db.read(lambda conn: runs.by_name(conn, row.name).id)
        assert await home.coordinator.merger.merge_if_due(number)
        # 300 s of ann at training, 300 s in wait; 300 s of ben, and one heartbeat after its absence
        present = 3 * HALF_S + HEARTBEAT_S
        share = 2 * HALF_S / present
        assert await shown(home, run) == pytest.approx({"busy": share, "goodput": share})
        gauges = await home.coordinator.overviews.gauges()
        assert gauges.runs[0].time is not None
        assert gauges.runs[0].time.goodput == pytest.approx(share)
        await home.clock.advance(2 * DAY_S)
        assert await shown(home, run) is None


async def test_two_replicas_count_the_time_of_a_machine_once(
    tmp_path: Path, database_url: str
) -> None:
    async with local_coordinator(tmp_path, database=database_url) as home:
        run = await home.start_run()
        ann = await home.join("ann")
        lease = await ann.claim()
        await ann.begin(lease)
        row = await home.coordinator.db.read(
            lambda conn: tasks.holder(conn, lease.task, for_update=False)
        )
        replicas = [Attendance(home.clock), Attendance(home.clock)]
        for number in range(BEATS * 2):
            replicas[number % 2].beat("ann", {(row.run_id, row.device)}, paused=False)
            await home.clock.advance(HEARTBEAT_S)
        for replica in replicas:
            add = partial(machine_hours.add, seconds=replica.drain(), now=home.clock.now())
            await home.coordinator.db.write(add)
        hours = await home.coordinator.db.read(
            lambda conn: machine_hours.lately(conn, home.clock.now())
        )
        assert hours[row.run_id].present == (BEATS * 2 - 2) * HEARTBEAT_S
        assert await shown(home, run) == {"busy": 0.0, "goodput": 0.0}


async def test_a_heartbeat_with_a_lease_of_another_machine_counts_no_time(
    tmp_path: Path, database_url: str
) -> None:
    async with local_coordinator(tmp_path, database=database_url) as home:
        run = await home.start_run()
        ann, eve = await home.join("ann"), await home.join("eve")
        lease = await ann.claim()
        await ann.begin(lease)
        await beat(ann, lease)
        await beat(eve, lease)
        for _ in range(BEATS * 2):
            await home.clock.advance(HEARTBEAT_S)
            await beat(eve, lease)
        assert await shown(home, run) is None
