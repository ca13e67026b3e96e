"""Placement of tasks outside the pass (learn, match, evaluation): since other work waits for them,
each goes to a machine that is fast enough.

A worker leaves such a task to a machine that would finish it in less than half the time, counted
from now. The task waits no longer for that machine than the worker itself would need for it. So a
run with only slow machines still advances, and a single machine never waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from coordinator.rules.eligibility import Todo, Waiter, may_work_for, misfit, speed, takes_kind
from coordinator.rules.lease_times import task_s
from coordinator.rules.task_size import Run

WORTH_WAITING = 2.0  # a task is left to a machine that would finish it this many times sooner
PATIENCE_S = 600.0  # longest time that a task is left to others
PRESENT_S = 45.0  # an idle device that has not asked for this long is gone: a poll lasts 30 s
MACHINES_MAX = 4096  # remembered devices


class PeerDevice(msgspec.Struct, frozen=True, kw_only=True):
    """Device that recently asked for work, and the seconds until it is free."""

    waiter: Waiter
    free_s: float = 0.0


class DeviceBench(msgspec.Struct, frozen=True, kw_only=True):
    """Candidates for tasks outside the pass, and how long each task has been reserved."""

    peers: tuple[PeerDevice, ...] = ()
    reserved_s: Mapping[int, float] = {}  # seconds since each task was reserved


NOBODY = DeviceBench()


class Placement:
    """Chooses the worker that a task outside the pass is reserved for, while work is handed out."""

    def __init__(self, bench: DeviceBench) -> None:
        self._reserved_s = bench.reserved_s
        self._peers = bench.peers
        self._free_s = {_place(peer.waiter): peer.free_s for peer in bench.peers}
        self.reserved: set[int] = set()  # tasks that a waiter left to a faster worker

    def leaves(self, run: Run, task: Todo, waiter: Waiter) -> bool:
        """Return True if a waiter leaves this task to a machine that finishes it much sooner."""
        seconds = task_s(run, task.price_micro, speed(run, waiter))
        if not seconds or self._reserved_s.get(task.id, 0.0) >= min(seconds, PATIENCE_S):
            return False
        here_s = seconds + self._free_s.get(_place(waiter), 0.0)
        if not any(
            end * WORTH_WAITING < here_s
            for peer in self._peers
            if (end := self._end_s(run, task, peer.waiter))
        ):
            return False
        self.reserved.add(task.id)
        return True

    def note(self, run: Run, price: int, waiter: Waiter) -> None:
        """Count an assigned task: add the task's duration to the time until the waiter's device is
        free.
        """
        place = _place(waiter)
        if place in self._free_s:
            self._free_s[place] += task_s(run, price, speed(run, waiter))

    def _end_s(self, run: Run, task: Todo, peer: Waiter) -> float:
        """Return the seconds until a worker would have done a task; 0 if it cannot do the task, or
        its speed is unknown.
        """
        fits = may_work_for(run, peer) and takes_kind(peer, task.beside) and not misfit(run, peer)
        if not fits or peer.worker_id in task.failed_by:
            return 0.0
        needs = task_s(run, task.price_micro, speed(run, peer))
        return self._free_s[_place(peer)] + needs if needs else 0.0


class Machines:
    """Devices that recently asked for work, and the times when they will be free.

    Kept in memory: after a restart a task goes to the first machine that asks, and each replica
    knows only the devices that asked it.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], tuple[Waiter, float, float]] = {}  # last seen, busy until
        self._reserved: dict[int, float] = {}  # task -> when it was first reserved

    def note_asking(
        self, waiters: Iterable[Waiter], busy: Iterable[tuple[str, str]], now: float
    ) -> None:
        """Store the asking devices; a device without a task is free."""
        working = set(busy)
        for waiter in waiters:
            place = _place(waiter)
            _, _, until = self._seen.pop(place, (waiter, now, now))
            self._seen[place] = (waiter, now, max(now, until) if place in working else now)
        while len(self._seen) > MACHINES_MAX:
            del self._seen[next(iter(self._seen))]

    def note_assigned(self, run: Run, price: int, waiter: Waiter) -> None:
        """Store that a device was assigned a task, and until when it is busy."""
        place = _place(waiter)
        if place in self._seen:
            asker, last_seen, until = self._seen[place]
            needs = task_s(run, price, speed(run, waiter))
            self._seen[place] = (asker, last_seen, until + needs)

    def bench(self, todo: Sequence[Todo], now: float) -> DeviceBench:
        """Return candidates for the waiting tasks outside the pass; an empty bench if no such task
        waits.
        """
        waiting = {task.id for task in todo if task.beside}
        if not waiting:
            return DeviceBench()
        self._reserved = {task: at for task, at in self._reserved.items() if task in waiting}
        return DeviceBench(
            peers=tuple(
                PeerDevice(waiter=waiter, free_s=max(0.0, until - now))
                for waiter, last_seen, until in self._seen.values()
                if now <= max(last_seen, until) + PRESENT_S
            ),
            reserved_s={task: now - at for task, at in self._reserved.items()},
        )

    def note_reserved(self, tasks: Iterable[int], now: float) -> None:
        """Store since when tasks are reserved for a faster machine."""
        for task in tasks:
            self._reserved.setdefault(task, now)


def _place(waiter: Waiter) -> tuple[str, str]:
    return waiter.worker_id, waiter.device
