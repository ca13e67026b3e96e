"""Leases that this agent works on, and the number it may still take."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

import msgspec

from shared.protocol.heartbeat import TaskBeat
from shared.protocol.leases import Lease
from shared.sentences import Sentence
from volunteer.agent.lifecycle import Lifecycle
from volunteer.storage.leases import HeldLease
from volunteer.training.trainer import Handle

LeasePhase: TypeAlias = Literal["queued", "fetch", "train", "encode", "upload", "paused"]
LeaseKey: TypeAlias = tuple[int, int]  # task, attempt


class LeaseInWork:
    """Lease that this agent works on."""

    def __init__(self, stored_lease: HeldLease) -> None:
        self.stored = stored_lease
        self.phase: LeasePhase = "queued"
        self.handle: Handle[Any] | None = None
        self.steps_before = 0  # steps of earlier parts; `handle` counts the present part's
        self.work: asyncio.Task[None] | None = None
        self.ended = ""  # "cancelled", "gone", "released" or "saved"; "" = in work
        self.message = ""
        self.freed = asyncio.Event()  # set when its device may begin other work

    @property
    def key(self) -> LeaseKey:
        return self.stored.key

    @property
    def lease(self) -> Lease:
        return self.stored.lease

    def free(self) -> None:
        """Let the device begin other work: this task is trained, and only encodes its result."""
        self.freed.set()

    def change(self, **changes: object) -> None:
        """Change fields of `stored`, in memory only."""
        self.stored = msgspec.structs.replace(self.stored, **changes)

    def end(self, how: str, message: str, *, save: bool = False) -> None:
        """Cancel the work in any phase; the first reason counts."""
        if self.ended:
            return
        self.ended, self.message = how, message
        if self.handle is not None:
            self.handle.stop(message, save=save)
        elif self.work is not None:
            self.work.cancel()

    def finish(self) -> None:
        """Release the lease, unless its work has begun."""
        if self.stored.begun is None:
            self.end("released", Sentence("no more work is wanted"))

    def report(self, *, paused: bool) -> TaskBeat:
        """Return the lease's part of a heartbeat."""
        latest = self.handle.latest if self.handle else None
        return TaskBeat(
            task=self.key[0],
            attempt=self.key[1],
            phase="paused" if paused and self.phase == "train" else self.phase,
            step=self.steps_before + (latest.step if latest else 0),
            steps=self.lease.job.steps,
            loss=latest.loss if latest else None,
            rate=latest.steps_per_s if latest else None,
        )


class HeldLeases:
    """Holds the leases in work by task and attempt, counted against `max_tasks` (0: no limit)."""

    def __init__(self, life: Lifecycle, max_tasks: int = 0) -> None:
        # Leases whose time ran out and whose task no other volunteer has claimed yet.
        self.late: set[LeaseKey] = set()
        self.submitted = 0  # tasks with submitted results
        self._life = life
        self._leases: dict[LeaseKey, LeaseInWork] = {}
        self._left = max_tasks if max_tasks > 0 else None
        self._counted: set[LeaseKey] = set()  # leases counted for `max_tasks`

    def __iter__(self) -> Iterator[LeaseInWork]:
        return iter(tuple(self._leases.values()))

    def __len__(self) -> int:
        return len(self._leases)

    def get(self, key: LeaseKey) -> LeaseInWork | None:
        """Return the lease in work; None if this task has no lease in work."""
        return self._leases.get(key)

    @property
    def exhausted(self) -> bool:
        """Return True if `max_tasks` leases were taken; a lost lease makes room for another."""
        return self._left is not None and self._left <= 0

    def take(self, work: LeaseInWork) -> None:
        """Begin work on a lease."""
        self._leases[work.key] = work
        if self._left is not None:
            self._left -= 1
            self._counted.add(work.key)
        self._life.notify()

    def put_down(self, work: LeaseInWork, *, counted: bool) -> None:
        """End the work on a lease; unless it is `counted`, it does not count against
        `max_tasks`.
        """
        self._leases.pop(work.key, None)
        if not counted:
            self.uncount(work.key)
        self._life.notify()

    def uncount(self, key: LeaseKey) -> None:
        """Uncount a lost lease, which submits no result."""
        self.late.discard(key)
        if self._left is not None and key in self._counted:
            self._counted.remove(key)
            self._left += 1
