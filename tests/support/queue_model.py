"""The promises of the queue, as a model so plain that it is right at sight."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from coordinator.rules.run_file import TaskSettings
from shared.protocol.leases import Lease
from shared.protocol.limits import RENEW_S

TOTAL, TASK = 23, 4  # samples of a pass, of a task

SETTINGS = TaskSettings(local_steps=2, batch_size=2, in_flight=2, max_failures=2, max_timeouts=3)


@dataclass
class Task:
    """A task of the model."""

    pass_no: int
    start: int
    stop: int
    state: str = "doing"
    attempt: int = 1
    worker: str = ""
    returned: bool = False
    failures: int = 0
    timeouts: int = 0
    failed_by: set[str] = field(default_factory=set)
    timed_out_by: set[str] = field(default_factory=set)
    claimed_at: float = 0.0
    renew_by: float = 0.0
    finish_by: float = 0.0

    def shown(self) -> tuple[Any, ...]:
        """Return the values that must be the same in the database."""
        place = (self.pass_no, self.start, self.stop)
        return (
            *place,
            self.state,
            self.attempt,
            self.worker,
            self.returned,
            self.failures,
            self.timeouts,
        )


class Model:
    """The queue without a database."""

    def __init__(self, started_at: float, owners: dict[str, str]) -> None:
        self.tasks: dict[int, Task] = {}
        self.owners = owners  # the volunteer of each worker; all of them are vetted
        self.rests: dict[str, tuple[int, float]] = {}  # failures of a worker, until when it rests
        self.pass_no, self.cursor = 1, 0
        self.started_at = started_at

    def some(self, *states: str) -> dict[int, Task]:
        return {number: task for number, task in self.tasks.items() if task.state in states}

    def held(self, worker: str) -> list[int]:
        return [number for number, task in self.some("doing").items() if task.worker == worker]

    def next_for(self, worker: str, now: float) -> int | tuple[int, int, int] | None:
        """The task that a claim must give, or the new range, or nothing."""
        if self.rests.get(worker, (0, 0.0))[1] > now:
            return None
        if len(self.held(worker)) >= SETTINGS.in_flight:
            return None
        todo = sorted(self.some("todo").items(), key=lambda item: (item[1].failures, item[0]))
        for number, task in todo:
            if worker not in task.failed_by:
                return number
        pass_no, cursor = self.pass_no, self.cursor
        if cursor >= TOTAL:  # what the worker failed comes last in its pass
            near = {task.worker for task in self.some("doing").values()} | {worker}
            again = next((number for number, task in todo if near <= task.failed_by), None)
            if again is not None:
                return again
            pass_no, cursor = pass_no + 1, 0
        return pass_no, cursor, min(TOTAL, cursor + TASK)

    def give(self, lease: Lease, worker: str, now: float) -> None:
        task = self.tasks.get(lease.task)
        if task is None:
            task = self.tasks[lease.task] = Task(
                self.pass_of(lease), lease.job.start, lease.job.stop
            )
            self.pass_no, self.cursor = task.pass_no, task.stop
        else:
            task.attempt += 1
        task.state, task.worker, task.returned = "doing", worker, False
        assert lease.renew_by == now + RENEW_S
        assert lease.finish_by >= now + SETTINGS.lease_floor_seconds
        task.renew_by, task.finish_by = lease.renew_by, lease.finish_by
        task.claimed_at = now

    def pass_of(self, lease: Lease) -> int:
        return self.pass_no + (lease.job.start == 0 and bool(self.tasks))

    def back(self, number: int, failed: bool, now: float) -> None:
        task = self.tasks[number]
        over = False
        if failed:
            task.failures += 1
            task.failed_by.add(task.worker)
            alone = task.failures >= 4
            over = task.failures >= 2 and self._condemned(task.failed_by, now, alone=alone)
        task.state, task.returned = "discarded" if over else "todo", False

    def rest(self, worker: str, now: float) -> None:
        """The worker gave a task back as failed."""
        count, until = self.rests.get(worker, (0, 0.0))
        count = count + 1 if now < until + 3600 else 1
        wait = 0.0 if count < 4 else min(3600.0, 10.0 * 2 ** (count - 4))
        self.rests[worker] = (count, now + wait)

    def _condemned(self, workers: set[str], now: float, *, alone: bool) -> bool:
        """Two volunteers are against a task, or all that have tasks."""
        at_work = self.some("doing", "done").values()
        working = {self.owners[t.worker] for t in at_work if t.claimed_at > now - 3600}
        against = {self.owners[worker] for worker in workers}
        return len(against) >= 2 or (alone and working <= against)

    def expire(self, now: float) -> int:
        if now < self.started_at + RENEW_S:
            return 0
        late = [t for t in self.some("doing").values() if t.renew_by < now or t.finish_by < now]
        for task in late:
            task.timeouts += 1
            task.timed_out_by.add(task.worker)
            task.state, task.returned = "todo", True
        for task in late:
            if task.timeouts >= SETTINGS.max_timeouts and self._condemned(
                task.timed_out_by, now, alone=True
            ):
                task.state, task.returned = "discarded", False
        return len(late)
