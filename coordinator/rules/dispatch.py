"""Dispatch of work to waiting workers: pure rules over rows of the database.

Waiting workers are served in turn, volunteers with the fewest leases first. A worker gets the
fitting run with the least recent work relative to the run's weight; within a run a reissued task
comes before a new range of the pass. A task that a worker has failed goes to another worker if
there is one; a task outside the pass goes to a worker that is fast enough for it (`placement.py`).
A run whose members keep its data is offered once for each worker that asks, with that worker's own
pass: its tasks go to that worker alone.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence

import msgspec

from coordinator.rules.audits import AUDIT, may_audit
from coordinator.rules.eligibility import (
    Todo,
    Waiter,
    at_begin,
    may_work_for,
    misfit,
    speed,
    takes_kind,
)
from coordinator.rules.lease_times import finish_beside_in_s, finish_in_s
from coordinator.rules.placement import NOBODY, DeviceBench, Placement
from coordinator.rules.task_size import (
    Run,
    keeps_step,
    price_micro,
    samples_for,
    split_at,
    steps_in,
    task_seed,
    work_of,
)
from shared.protocol.base import Reason
from shared.text import counted

REST_POLL_S = 300.0  # longest wait of a machine that rests
HALF_LIFE_S = 900.0  # half-life of leased work: older work counts less


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Open tasks of a run."""

    run_id: int
    open: int  # open tasks without audits
    price_micro: int  # price of the tasks that are leased
    # workers with leases; only read if a worker failed a task
    holders: frozenset[str] = frozenset()


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """Number of tasks of a run that a device of a worker holds."""

    volunteer_id: str
    worker_id: str
    device: str
    run_id: int
    count: int


class OpenTasks(msgspec.Struct, frozen=True, kw_only=True):
    """Open tasks: the waiting tasks in claim order, the sums over each run, and the number of tasks
    that each device holds.
    """

    todo: Sequence[Todo] = ()
    loads: Sequence[Load] = ()
    holdings: Sequence[Holding] = ()


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """Lease to write. `task_id` is None for a new range; `rest_stop` > stop if a task is split."""

    waiter: int  # index among the waiters
    run_id: int
    task_id: int | None
    pass_no: int
    start: int
    stop: int
    rest_stop: int
    steps: int
    price_micro: int
    seed: int
    finish_in_s: float  # time until the deadline of submission
    beside: str = ""  # kind of a task that is not a range of the pass
    home: str = ""  # see `Run.home`


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Reason why a waiter gets no task now."""

    reason: Reason
    message: str
    retry_after_s: float = 0.0
    run_id: int = 0  # run whose members, or whose next version, end the wait; 0 = no single run


class DispatchResult(msgspec.Struct, frozen=True, kw_only=True):
    """Assignments and refusals of a batch of waiters, by their position."""

    assignments: tuple[Assignment, ...]
    # run and home -> the pass and cursor, if they changed
    moved: dict[tuple[int, str], tuple[int, int]]
    refusals: dict[int, Refusal]
    more: bool  # a task was split, and its second part may suit a refused waiter
    open: int  # number of tasks, and of samples without a task, that stay for later claims
    # ids of the tasks that stay, and minus the id of each run with samples that stay
    remaining: frozenset[int]
    reserved: frozenset[int] = frozenset()  # tasks that a waiter left to a faster machine


class _PassState:
    """State of one pass while work is handed out: number and cursor, tasks, load of the run."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.pass_no = run.pass_no
        self.cursor = run.cursor
        self.todo: list[Todo] = []
        self.open = 0  # open tasks without audits
        # work in flight, in operations, which compare between runs
        self.work = 0.0
        self.lately = run.lately
        # workers that hold or want this run's work
        self.near: set[str] = {run.home} if run.home else set()

    @property
    def recent_work(self) -> tuple[float, int]:
        """Return the run's recent work divided by its weight, and the run's id; the run with the
        least is served first.
        """
        return max(self.work, self.lately) / self.run.weight, self.run.id

    @property
    def ended(self) -> bool:
        return bool(self.run.passes) and self.pass_no > self.run.passes

    @property
    def done(self) -> bool:
        """Return True if the pass is over: every sample has a task, and in the last pass no task is
        open. Return False after all passes, and for a pass that never ends.
        """
        whole = self.cursor >= self.run.samples_total > 0
        last = bool(self.run.passes) and self.pass_no >= self.run.passes
        waits = last and self.open > 0
        return whole and not waits and not self.ended and not self.run.endless

    @property
    def uncut(self) -> int:
        """Return the number of samples without a task."""
        uncut = 0 if self.ended else self.run.samples_total - (0 if self.done else self.cursor)
        return max(0, uncut)

    def turn(self) -> None:
        """Begin the next pass once every sample of this pass has a task; no pass follows the last
        pass.
        """
        if self.done:
            self.pass_no += 1
            self.cursor = 0


class _Batch:
    """Hands out work to the waiters of one transaction."""

    def __init__(
        self, waiters: Sequence[Waiter], runs: Iterable[Run], placement: Placement, leases_max: int
    ) -> None:
        self._waiters = waiters
        self._placement = placement
        self._shares = {(run.id, run.home): _PassState(run) for run in runs}
        self._leases_max = leases_max
        self._more = False
        self._by_volunteer: Counter[str] = Counter()
        self._by_device: Counter[tuple[str, str]] = Counter()
        self._by_run: Counter[tuple[str, str, int]] = Counter()  # by device and run
        self._fits: list[list[_PassState]] = []
        for waiter in waiters:
            chosen = [share for share in self._shares.values() if may_work_for(share.run, waiter)]
            fits = [share for share in chosen if not misfit(share.run, waiter)]
            able = [share for share in fits if share.run.id not in waiter.rests]
            self._fits.append([share for share in able if not share.run.waits])
            for share in self._fits[-1]:
                share.near.add(waiter.worker_id)

    def add_tasks(self, tasks: OpenTasks) -> None:
        """Add the open tasks to the batch."""
        for task in tasks.todo:
            # `_shares` lacks the pass of a worker that may not work
            if (place := (task.run_id, task.home)) in self._shares:
                self._shares[place].todo.append(task)
        loads = {load.run_id: load for load in tasks.loads}
        for share in self._shares.values():
            load = loads.get(share.run.id)
            if load is not None:
                share.open = load.open
                share.work = work_of(share.run, load.price_micro)
                share.near |= set() if share.run.home else load.holders
        for holding in tasks.holdings:
            self._by_volunteer[holding.volunteer_id] += holding.count
            device = holding.worker_id, holding.device
            self._by_device[device] += holding.count
            self._by_run[(*device, holding.run_id)] += holding.count

    def run(self) -> DispatchResult:
        assignments: list[Assignment] = []
        refusals: dict[int, Refusal] = {}
        queue = [(self._by_volunteer[w.volunteer_id], i) for i, w in enumerate(self._waiters)]
        heapq.heapify(queue)
        while queue:
            count, index = heapq.heappop(queue)
            waiter = self._waiters[index]
            # the volunteer has got a lease since this entry was queued
            if count != self._by_volunteer[waiter.volunteer_id]:
                heapq.heappush(queue, (self._by_volunteer[waiter.volunteer_id], index))
                continue
            answer = self._serve(index, waiter)
            if isinstance(answer, Assignment):
                assignments.append(answer)
            else:
                refusals[index] = answer
        shares = self._shares.values()
        moved = {
            place: (share.pass_no, share.cursor)
            for place, share in self._shares.items()
            if (share.pass_no, share.cursor) != (share.run.pass_no, share.run.cursor)
        }
        remaining = {task.id for share in shares for task in share.todo}
        remaining |= {-share.run.id for share in shares if share.uncut}
        return DispatchResult(
            assignments=tuple(assignments),
            moved=moved,
            refusals=refusals,
            more=self._more,
            open=sum(len(share.todo) + share.uncut for share in shares),
            remaining=frozenset(remaining),
            reserved=frozenset(self._placement.reserved),
        )

    def _serve(self, index: int, waiter: Waiter) -> Assignment | Refusal:
        fits = self._fits[index]
        if not fits:
            return self._no_fit(waiter)
        most = min(self._leases_max, waiter.leases_max or self._leases_max)
        if self._by_volunteer[waiter.volunteer_id] >= most:
            until = " until your work passed checks" if waiter.leases_max else ""
            return Refusal(
                reason=Reason.IN_FLIGHT,
                message=f"your machines hold {most} tasks together, as many as they may{until}",
            )
        mine = self._by_device[waiter.worker_id, waiter.device]
        free = [share for share in fits if self._may_hold_more(share.run, waiter)]
        if not free:
            return _holds_enough([share.run for share in fits], waiter.device, mine)
        free.sort(key=lambda share: share.recent_work)
        for again in (False, True):  # tasks that the worker itself failed come last in their pass
            for share in free:
                assignment = (
                    self._reissued(share, index, waiter, again)
                    or (self._reissued(share, index, waiter, again=True) if share.done else None)
                    or self._cut(share, index, waiter)
                )
                if assignment is not None:
                    self._count(share, waiter, assignment)
                    return assignment
        return _all_taken(free, waiter, self._placement.reserved, mine)

    def _may_hold_more(self, run: Run, waiter: Waiter) -> bool:
        """Return True if a device may hold one more task of a run: a single one as long as the next
        version lacks members, so that none has a task left when its update begins to wait.
        """
        device = waiter.worker_id, waiter.device
        if run.lacks and self._by_run[(*device, run.id)]:
            return False
        return self._by_device[device] < run.settings.in_flight

    def _count(self, share: _PassState, waiter: Waiter, assignment: Assignment) -> None:
        device = waiter.worker_id, waiter.device
        self._by_volunteer[waiter.volunteer_id] += 1
        self._by_device[device] += 1
        self._by_run[(*device, share.run.id)] += 1
        self._placement.note(share.run, assignment.price_micro, waiter)
        work = work_of(share.run, assignment.price_micro)
        share.work += work
        share.lately += work

    def _reissued(
        self, share: _PassState, index: int, waiter: Waiter, again: bool
    ) -> Assignment | None:
        for position, task in enumerate(share.todo):
            if task.beside == AUDIT:
                if not again and _audits(waiter, task):
                    del share.todo[position]
                    return _assign_beside(share.run, index, waiter, task)
                continue
            failed = waiter.worker_id in task.failed_by
            if failed and not (again and share.near <= task.failed_by):
                continue
            run, flops = at_begin(share.run, waiter), speed(share.run, waiter)
            steps = steps_in(task.stop - task.start, run.settings.batch_size)
            if not (task.beside or again or keeps_step(run, steps, flops)):
                continue
            if not takes_kind(waiter, task.beside or share.run.kind):
                continue
            if task.beside and self._placement.leaves(share.run, task, waiter):
                continue
            del share.todo[position]
            if task.beside:
                return _assign_beside(share.run, index, waiter, task)
            stop = split_at(run, task.start, task.stop, flops)
            if stop < task.stop:
                share.open += 1
                self._more = True  # the second part of the task gets its number when it is stored
            return _assign(share.run, index, waiter, task, stop)
        return None

    def _cut(self, share: _PassState, index: int, waiter: Waiter) -> Assignment | None:
        share.turn()
        run = at_begin(share.run, waiter)
        if share.ended or share.cursor >= run.samples_total or not takes_kind(waiter, run.kind):
            return None
        start = share.cursor
        share.cursor += samples_for(run, run.samples_total - start, speed(run, waiter))
        share.open += 1
        return _assign(run, index, waiter, (share.pass_no, start), share.cursor)

    def _no_fit(self, waiter: Waiter) -> Refusal:
        chosen = [share.run for share in self._shares.values() if may_work_for(share.run, waiter)]
        if not chosen:
            return Refusal(reason=Reason.NO_RUN, message="nothing is running here just now")
        fitting = [run for run in chosen if not misfit(run, waiter)]
        waiting = next((run for run in fitting if run.waits), None)
        if waiting is not None:
            return _wait_for_members(waiting)
        if fitting:
            return _rest(min(fitting, key=lambda run: waiter.rests[run.id]), waiter)
        why = misfit(chosen[0], waiter)
        return Refusal(reason=Reason.NO_FIT, message=f"no run needs this device: {why}")


def _wait_for_members(run: Run) -> Refusal:
    members = counted(run.lacks, "other member")
    return Refusal(
        reason=Reason.IN_FLIGHT,
        message=f'your update of "{run.name}" waits to be mixed with those of {members}: then this '
        "machine gets its next task",
        run_id=run.id,
    )


def _holds_enough(runs: Sequence[Run], device: str, count: int) -> Refusal:
    """Return why a device that holds tasks of these runs gets no further task."""
    # a run for which the device has room lacks members, see `_may_hold_more`
    run = next((run for run in runs if count < run.settings.in_flight), None)
    if run is None:
        message = f"{device} holds {counted(count, 'task')} already, as many as it may"
        return Refusal(reason=Reason.IN_FLIGHT, message=message)
    members = counted(run.lacks, "member")
    return Refusal(
        reason=Reason.IN_FLIGHT,
        message=f'the next version of "{run.name}" lacks updates of {members}: {device} gets its '
        "next task when the one that it holds is done",
        run_id=run.id,
    )


def _rest(run: Run, waiter: Waiter) -> Refusal:
    left_s = waiter.rests[run.id]
    return Refusal(
        reason=Reason.IN_FLIGHT,
        message=f'this machine gave back tasks of "{run.name}" as failed: it gets work of it again '
        f"in {left_s:.0f} s",
        retry_after_s=min(left_s, REST_POLL_S),
    )


def _all_taken(
    free: Sequence[_PassState], waiter: Waiter, reserved: Container[int], leases: int
) -> Refusal:
    """Return why no task is left for a device that holds `leases` tasks itself."""
    for share in free:
        task = next((task for task in share.todo if task.id in reserved), None)
        if task is not None and takes_kind(waiter, task.beside):
            message = f'the "{task.beside}" task that waits is left to a faster machine'
            return Refusal(reason=Reason.ALL_TAKEN, message=message)
    if not any(takes_kind(waiter, share.run.kind) for share in free):
        kinds = " or ".join(f'"{kind}"' for kind in sorted(waiter.kinds))
        message = f"no task of the kind {kinds} waits just now"
        return Refusal(reason=Reason.ALL_TAKEN, message=message)
    waits = next((share.run.short_of for share in free if share.run.short_of), "")
    if waits:
        return Refusal(reason=Reason.ALL_TAKEN, message=waits)
    if all(share.ended for share in free):
        return Refusal(
            reason=Reason.MERGING, message="every pass is done; the last results are being merged"
        )
    if leases and all(share.open <= leases for share in free):
        return Refusal(
            reason=Reason.ALL_TAKEN,
            message=f"every task of this pass is being done, the last by {waiter.device} itself",
        )
    return Refusal(
        reason=Reason.ALL_TAKEN, message="every task of this pass is being done by others"
    )


def _assign(
    run: Run, index: int, waiter: Waiter, what: Todo | tuple[int, int], stop: int
) -> Assignment:
    todo = what if isinstance(what, Todo) else None
    pass_no, start = (what.pass_no, what.start) if isinstance(what, Todo) else what
    steps = steps_in(stop - start, run.settings.batch_size)
    return Assignment(
        waiter=index,
        run_id=run.id,
        task_id=todo.id if todo else None,
        pass_no=pass_no,
        start=start,
        stop=stop,
        rest_stop=todo.stop if todo else stop,
        steps=steps,
        price_micro=price_micro(run, stop - start),
        seed=task_seed(run.seed, pass_no, start),
        finish_in_s=finish_in_s(run, steps, speed(run, waiter)),
        home=run.home,
    )


def _audits(waiter: Waiter, task: Todo) -> bool:
    """Return True if a waiting audit suits this worker."""
    terms, auditor = task.audit, waiter.auditor
    if terms is None or auditor is None:
        return False
    return takes_kind(waiter, terms.kind) and may_audit(terms, auditor)


def _assign_beside(run: Run, index: int, waiter: Waiter, task: Todo) -> Assignment:
    """Return the assignment of a task outside the pass, which is never split."""
    return Assignment(
        run_id=task.run_id,
        pass_no=task.pass_no,
        start=task.start,
        stop=task.stop,
        steps=task.steps,
        price_micro=task.price_micro,
        beside=task.beside,
        waiter=index,
        task_id=task.id,
        rest_stop=task.stop,
        seed=0,  # the task keeps its seed
        finish_in_s=finish_beside_in_s(run, task.price_micro, speed(run, waiter)),
    )


def dispatch(
    waiters: Sequence[Waiter],
    runs: Iterable[Run],
    tasks: OpenTasks,
    *,
    leases_max: int,
    bench: DeviceBench = NOBODY,
) -> DispatchResult:
    """Assign a task to every waiter, or refuse it with a reason; for `bench` see `DeviceBench`."""
    batch = _Batch(waiters, runs, Placement(bench), leases_max)
    batch.add_tasks(tasks)
    return batch.run()


class FairShares:
    """Operations recently given to each run, fading with time; the run with the least is served
    first.

    Leases in flight alone are not fair: of a few machines the fastest would stay with one run,
    because slow ones hold the other runs' leases for long. The figures are kept in memory: after a
    restart they begin at 0, and each replica counts only its own leases.
    """

    def __init__(self) -> None:
        self._given: dict[int, float] = {}
        self._at = 0.0

    def lately(self, weights: Mapping[int, float], now: float) -> dict[int, float]:
        """Return the operations recently given to each running run.

        A run that has just started begins at the share of the least served run.
        """
        self._fade(now)
        earlier = {run: self._given[run] for run in weights if run in self._given}
        least = min((work / weights[run] for run, work in earlier.items()), default=0.0)
        self._given = {run: earlier.get(run, least * weight) for run, weight in weights.items()}
        return dict(self._given)

    def note(self, leased: Mapping[int, float]) -> None:
        """Count leased work, in operations by run."""
        for run, operations in leased.items():
            self._given[run] = self._given.get(run, 0.0) + operations

    def _fade(self, now: float) -> None:
        if now > self._at:
            factor = 0.5 ** ((now - self._at) / HALF_LIFE_S)
            self._given = {run: work * factor for run, work in self._given.items()}
        self._at = max(self._at, now)
