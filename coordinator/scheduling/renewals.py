"""Heartbeats, answered from memory and written together once a second.

Leases missing from memory are read. Changes made elsewhere (another replica, a command, the
end of a run) show with the next write, or with the regular comparison with the database.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from coordinator.database import heartbeats
from coordinator.database.heartbeats import LifeSign, Renewal
from coordinator.database.monitoring import machine_hours
from coordinator.database.tasks import TaskRow
from shared.errors import BadRequest
from shared.protocol.heartbeat import HeartbeatRequest, TaskBeat, TaskOrder
from shared.protocol.limits import HEARTBEAT_S, RENEW_S

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.accounts.accounts import Principal
    from coordinator.attendance import Attendance
    from coordinator.database.engine.open_database import Database
    from shared.clock import Clock

TASKS_MAX = 256  # tasks in one heartbeat
PAUSE_MAX_S = 2 * HEARTBEAT_S  # most time that a heartbeat during a pause adds to a lease
COMPARE_S = 5.0
ATTENDANCE_S = 60.0  # interval of writing the time of machines
WRITE_MAX = 2000  # leases in one statement
LATE = "its time ran out: submit it before another worker takes it"


@dataclass(slots=True)
class _HeldLease:
    """Lease with its last known times."""

    row: TaskRow
    heard_at: float
    renew_by: float
    extra_s: float = 0.0  # added time that is not written yet
    dirty: bool = False


class Renewals:
    """Leases kept in memory: renewed at each heartbeat, and written in batches."""

    def __init__(self, db: Database, clock: Clock, attendance: Attendance) -> None:
        self._db = db
        self._clock = clock
        self._attendance = attendance
        self._held: dict[int, _HeldLease] = {}
        self._signs: dict[str, LifeSign] = {}
        self._compared_at = self._attended_at = clock.now()

    def hold(self, row: TaskRow) -> None:
        """Add a lease that was just made, begun or read."""
        now = self._clock.now()
        self._held[row.id] = _HeldLease(row, now, row.renew_by or now)

    def drop(self, task_id: int) -> None:
        """Remove an ended lease."""
        self._held.pop(task_id, None)

    def note_alive(self, worker_id: str) -> None:
        """Record that a worker is alive."""
        sign = self._signs.get(worker_id, LifeSign(worker_id=worker_id, at=0.0))
        self._signs[worker_id] = msgspec.structs.replace(sign, at=self._clock.now())

    async def beat(self, principal: Principal, request: HeartbeatRequest) -> tuple[TaskOrder, ...]:
        """Renew the reported leases of a worker, and order each to continue or stop. Raises
        BadRequest for more than TASKS_MAX leases.
        """
        if len(request.tasks) > TASKS_MAX:
            raise BadRequest(f"a heartbeat may name {TASKS_MAX} tasks at most")
        self._signs[principal.worker_id] = LifeSign(
            worker_id=principal.worker_id,
            at=self._clock.now(),
            state=_state(request),
            rate=sum(task.rate or 0.0 for task in request.tasks) or None,
            celsius=request.celsius,
        )
        if not all(map(self._knows, request.tasks)):
            await self._learn(principal.worker_id, request.tasks)
        leases = [self._held[task.task].row for task in request.tasks if task.task in self._held]
        devices = {
            (lease.run_id, lease.device)
            for lease in leases
            if lease.worker_id == principal.worker_id
        }
        self._attendance.beat(principal.worker_id, devices, paused=_state(request) == "paused")
        return tuple([self._order(principal, task, request.paused) for task in request.tasks])

    async def _learn(self, worker_id: str, tasks: Sequence[TaskBeat]) -> None:
        """Load leases that are missing in memory, repeatedly, since a flush may drop ended leases
        meanwhile.
        """
        read: dict[int, TaskRow | None] = {}
        while unknown := [e.task for e in tasks if e.task not in read and not self._knows(e)]:
            read |= dict.fromkeys(unknown)
            held_by = partial(heartbeats.held_by, worker_id=worker_id, ids=unknown)
            read |= {row.id: row for row in await self._db.read(held_by)}
        for row in read.values():
            if row is not None:
                self.hold(row)

    def _knows(self, beat: TaskBeat) -> bool:
        lease = self._held.get(beat.task)
        return lease is not None and lease.row.attempt == beat.attempt

    def _order(self, principal: Principal, beat: TaskBeat, paused: bool) -> TaskOrder:
        lease = self._held.get(beat.task)
        if lease is None or lease.row.worker_id != principal.worker_id:
            return TaskOrder(task=beat.task, attempt=beat.attempt, order="gone")
        row = lease.row
        if row.state != "doing":  # the next beat reads the row again
            self.drop(beat.task)
        if row.state == "cancelled":
            message = "its run has ended"
            return TaskOrder(task=row.id, attempt=beat.attempt, order="cancel", message=message)
        late = row.state == "todo" and row.returned
        if row.attempt != beat.attempt or not (row.state == "doing" or late):
            return TaskOrder(task=row.id, attempt=beat.attempt, order="gone")
        if row.state == "doing" and row.renew_by is not None:
            self._renew(lease, paused or beat.phase == "paused")
        return TaskOrder(
            task=row.id,
            attempt=row.attempt,
            order="continue",
            message=LATE if late else "",
            renew_by=lease.renew_by,
            finish_by=_finish_by(lease),
        )

    def _renew(self, lease: _HeldLease, paused: bool) -> None:
        now = self._clock.now()
        if paused:
            lease.extra_s += min(PAUSE_MAX_S, max(0.0, now - lease.heard_at))
        lease.heard_at = now
        lease.renew_by = now + RENEW_S
        lease.dirty = True

    async def flush(self) -> None:
        """Write the renewals since the last flush; at intervals compare all leases with the
        database.
        """
        changed = {task: lease for task, lease in self._held.items() if lease.dirty}
        signs, self._signs = self._signs, {}
        lines = {task: _line(lease) for task, lease in changed.items()}
        for lease in changed.values():
            lease.dirty = False
            lease.extra_s = 0.0
        try:
            rows = await self._write(list(lines.values()), list(signs.values()))
        except BaseException:
            self._restore(changed, lines, signs)
            raise
        rows_by_id = {row.id: row for row in rows}
        for task, lease in changed.items():
            row = rows_by_id.get(task)
            if row is not None:
                lease.row = row
            elif self._held.get(task) is lease:
                self.drop(task)  # the lease has changed elsewhere, and the next beat reads it
        await self._compare()
        if self._clock.now() >= self._attended_at + ATTENDANCE_S:
            await self.write_attendance()

    async def write_attendance(self) -> None:
        """Add the time of the machines to the hours of their runs."""
        now = self._attended_at = self._clock.now()
        seconds = self._attendance.drain()
        await self._db.write(lambda conn: machine_hours.add(conn, seconds, now))

    async def _write(self, lines: list[Renewal], signs: list[LifeSign]) -> list[TaskRow]:
        rows: list[TaskRow] = []
        for first in range(0, max(len(lines), len(signs)), WRITE_MAX):
            some, living = lines[first : first + WRITE_MAX], signs[first : first + WRITE_MAX]
            rows += await self._db.write(partial(_store, renewals=some, signs=living))
        return rows

    def _restore(
        self, changed: dict[int, _HeldLease], lines: dict[int, Renewal], signs: dict[str, LifeSign]
    ) -> None:
        """Keep the unwritten renewals for the next flush."""
        for task, lease in changed.items():
            lease.dirty = True
            lease.extra_s += lines[task].extra_s
        self._signs = signs | self._signs

    async def _compare(self) -> None:
        now = self._clock.now()
        if now < self._compared_at + COMPARE_S or not self._held:
            return
        self._compared_at = now
        attempts = {task: lease.row.attempt for task, lease in self._held.items()}
        alive = await self._db.read(heartbeats.all_held)
        for task, attempt in attempts.items():
            if (task, attempt) not in alive:
                self.drop(task)


def _store(
    conn: Connection, renewals: Sequence[Renewal], signs: Sequence[LifeSign]
) -> list[TaskRow]:
    rows = heartbeats.renew(conn, renewals)
    heartbeats.seen(conn, signs)  # after the tasks, as in a release
    return rows


def _line(lease: _HeldLease) -> Renewal:
    row = lease.row
    return Renewal(task=row.id, attempt=row.attempt, renew_by=lease.renew_by, extra_s=lease.extra_s)


def _finish_by(lease: _HeldLease) -> float:
    row = lease.row
    if row.finish_by is None or row.finish_limit is None:
        return 0.0
    return min(row.finish_limit, row.finish_by + lease.extra_s)


def _state(request: HeartbeatRequest) -> str:
    phases = {task.phase for task in request.tasks}
    if request.paused or phases == {"paused"}:
        return "paused"
    return "training" if phases - {"queued", "paused"} else "online"
