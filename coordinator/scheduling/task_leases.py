"""Leases of tasks: their begin, release and expiry."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import structlog

from coordinator.batcher import Batcher
from coordinator.database import (
    audits,
    claim_rows,
    submissions,
    tasks,
)
from coordinator.database.tasks import Begun, TaskRow
from coordinator.rules.audits import AUDIT
from coordinator.rules.standing import REST_MAX_S, rest_s
from shared.clock import Clock, pause
from shared.errors import UnknownTask, VolunteerError
from shared.protocol.leases import ReleaseRequest
from shared.protocol.limits import LONG_POLL_S_MAX, RENEW_S

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.accounts.accounts import Principal
    from coordinator.database.engine.open_database import Database
    from coordinator.scheduling.claims import Claims
    from coordinator.scheduling.renewals import Renewals
    from coordinator.signals import Signals

log = structlog.get_logger(__name__)

FLUSH_S = 1.0
BATCH_MAX = 64  # begun tasks in one transaction
EXPIRE_S = 5.0
EXPIRE_MAX = 500  # tasks that expire in one transaction
WORKERS_MAX = 100_000  # workers whose failures are remembered


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wait:
    """Merge that must come before a task begins."""

    run_id: int
    patience_s: float


class _Start(NamedTuple):
    """Request to begin a task."""

    worker_id: str
    task_id: int
    attempt: int
    newest: bool
    patient: bool = True  # the task may wait for a merge


class TaskLeases:
    """Begins, releases and expires leases."""

    def __init__(
        self, db: Database, clock: Clock, signals: Signals, claims: Claims, renewals: Renewals
    ) -> None:
        self._db = db
        self._clock = clock
        self._signals = signals
        self.claims = claims
        self.renewals = renewals
        self._started_at = clock.now()
        self._beginning: Batcher[_Start, Begun | _Wait] = Batcher(
            self._begin_all, BATCH_MAX, key=lambda start_request: start_request.task_id
        )
        self.expired = 0  # leases that this process expired
        self.released: Counter[str] = Counter()  # "failed" or "given back"
        # Recent failed tasks of each worker in each run, and the end of its enforced rest.
        self._failed_lately: dict[tuple[str, int], tuple[int, float]] = {}

    async def begin(
        self,
        principal: Principal,
        task_id: int,
        attempt: int,
        *,
        newest: bool = False,
    ) -> Begun:
        """Bind the newest version as the base of a lease; a repeated call without `newest` returns
        the same.

        The call waits (with a limit) until the worker's last contribution is merged, unless the
        plan lets work overlap. Raises UnknownTask for another worker's task, Gone if the lease was
        taken away, Cancelled if the run has ended.
        """
        watch, until = self._signals.watch(), math.inf
        start = _Start(principal.worker_id, task_id, attempt, newest)
        while isinstance(start_result := await self._beginning.ask(start), _Wait):
            watch.topics = (f"run:{start_result.run_id}",)
            until = min(until, self._clock.monotonic() + start_result.patience_s)
            await watch.wait(until - self._clock.monotonic())
            start = start._replace(patient=self._clock.monotonic() < until)
        self.renewals.hold(start_result.task)
        return start_result

    async def _begin_all(self, starts: Sequence[_Start]) -> list[Begun | _Wait | Exception]:
        return await self._db.write(lambda conn: self._bind(conn, starts))

    def _bind(self, conn: Connection, starts: Sequence[_Start]) -> list[Begun | _Wait | Exception]:
        """Check and bind; some tasks must first wait for a merge."""
        now = self._clock.now()
        rows_by_id = tasks.holders(conn, [start.task_id for start in starts])
        answers: dict[int, Begun | _Wait | Exception] = {}
        fresh: list[_Start] = []
        for start in starts:
            row = rows_by_id.get(start.task_id)
            try:
                if row is None:
                    raise UnknownTask(f"there is no task {start.task_id} of yours")
                tasks.may_submit(row, start.worker_id, start.attempt)
                if row.begun_at is None:
                    fresh.append(start)
                else:
                    answers[start.task_id] = _go_on(conn, row, start, now)
            except VolunteerError as error:
                answers[start.task_id] = error
        patient = [start.task_id for start in fresh if start.patient]
        awaited = tasks.await_merge(conn, patient) if patient else {}
        waits = {task: self._in_step(conn, run_id, now) for task, run_id in awaited.items()}
        answers |= {task: wait for task, wait in waits.items() if wait is not None}
        rows = [rows_by_id[start.task_id] for start in fresh if start.task_id not in answers]
        answers |= {
            row.id: beginning
            for row, beginning in zip(rows, tasks.begin_all(conn, rows, now), strict=True)
        }
        return [answers[start.task_id] for start in starts]

    def _in_step(self, conn: Connection, run_id: int, now: float) -> _Wait | None:
        """Return the merge to which a worker contributed, for which its task waits, at most until
        the deadline; None if the plan lets work overlap, or the merge would come too late.
        """
        plan = self.claims.spec(conn, run_id).plan
        if plan.overlap:
            return None
        patience_s = min(plan.deadline_seconds or LONG_POLL_S_MAX, LONG_POLL_S_MAX)
        pace = self.claims.pace(conn, run_id, now)
        if pace and pace.round and pace.round.merge_at > now + patience_s:
            return None
        return _Wait(run_id=run_id, patience_s=patience_s)

    async def release(self, principal: Principal, task_id: int, request: ReleaseRequest) -> None:
        """Release a lease: nothing is counted, unless the task itself failed.

        Failures count against the task once for each volunteer. From the fourth recent failure in a
        run on, the machine gets no work of that run for a while, longer each time. A repeated
        release changes nothing.
        """
        now = self._clock.now()

        def give_back(conn: Connection) -> int:
            """Return the run of the task if the task failed, else 0."""
            row = tasks.holder(conn, task_id)
            is_holder = (row.worker_id, row.attempt) == (principal.worker_id, request.attempt)
            if is_holder and (row.state in ("todo", "discarded") and not row.returned):
                return 0  # an earlier request gave the task back, and its reply was lost
            tasks.may_submit(row, principal.worker_id, request.attempt)
            if row.state == "doing" and row.renew_by is None:
                return 0  # the result is submitted: the verdict decides
            tasks.put_back(
                conn,
                task_id,
                worker_id=principal.worker_id,
                kind="failure" if request.failed else None,
                message=request.reason,
                now=now,
                settings=self.claims.spec(conn, row.run_id).file.task,
            )
            if row.kind == AUDIT:
                audits.decline(conn, task_id, principal.volunteer_id)
            if request.failed:
                count = self._failures((principal.worker_id, row.run_id), now) + 1
                until = now + rest_s(count)
                claim_rows.rest(conn, principal.worker_id, row.run_id, until, now)
            return row.run_id if request.failed else 0

        if run_id := await self._db.write(give_back):
            key = (principal.worker_id, run_id)
            count = self._failures(key, now) + 1
            self._failed_lately.pop(key, None)
            self._failed_lately[key] = (count, now + rest_s(count))
            while len(self._failed_lately) > WORKERS_MAX:
                del self._failed_lately[next(iter(self._failed_lately))]
        self.released["failed" if request.failed else "given back"] += 1
        self.renewals.drop(task_id)
        self.renewals.note_alive(principal.worker_id)
        for topic in ("queue", f"worker:{principal.worker_id}"):
            self._signals.notify(topic)

    def _failures(self, key: tuple[str, int], now: float) -> int:
        """Return how many tasks of a run a worker has lately given back as failed: 0 again when an
        hour has passed since the end of its enforced rest.
        """
        count, until = self._failed_lately.get(key, (0, 0.0))
        return count if now < until + REST_MAX_S else 0

    async def expire(self) -> int:
        """Requeue tasks of expired leases, none soon after a restart; return their number."""
        if self._clock.now() < self._started_at + RENEW_S:
            return 0
        await self.renewals.flush()
        count = 0
        while True:
            now = self._clock.now()
            rows = await self._db.write(partial(self._expire, now=now))
            for row in rows:
                self.renewals.drop(row.id)
            count += len(rows)
            self.expired += len(rows)
            if rows:
                log.info("leases expired", tasks=[row.id for row in rows])
                self._signals.notify("queue")
            if len(rows) < EXPIRE_MAX:
                return count

    def _expire(self, conn: Connection, now: float) -> list[TaskRow]:
        rows = tasks.expire(conn, now, EXPIRE_MAX)
        hopeless = [
            row.id
            for row in rows
            if tasks.is_hopeless(conn, row, self.claims.spec(conn, row.run_id).file.task, now)
        ]
        tasks.discard(conn, hopeless, now)
        tasks.cancel_absent(conn, now)
        return rows

    async def run(self, stop: asyncio.Event) -> None:
        """Write the renewals and expire leases until `stop` is set."""
        expired_at = self._clock.monotonic()
        while not stop.is_set():
            await self._try("flush", self.renewals.flush)
            if self._clock.monotonic() >= expired_at + EXPIRE_S:
                expired_at = self._clock.monotonic()
                await self._try("expire", self.expire)
            await pause(self._clock, FLUSH_S, stop)
        await self._try("flush", self.renewals.flush)
        await self._try("attendance", self.renewals.write_attendance)

    async def _try(self, chore: str, work: Callable[[], Awaitable[object]]) -> None:
        try:
            await work()
        except VolunteerError as error:
            log.warning("lease chore failed", chore=chore, error=error.message)


def _go_on(conn: Connection, row: TaskRow, start: _Start, now: float) -> Begun | VolunteerError:
    """Repeat the reply to a worker's earlier request, or bind the newest version."""
    beginning = tasks.resume(conn, row, now, newest=start.newest)
    if isinstance(beginning, VolunteerError):
        return beginning
    part, tries = submissions.next_part(conn, beginning.task)
    return msgspec.structs.replace(beginning, part=part, tries=tries)
