"""Shared state of a running agent: held leases, pauses, and whether it is about to end.

Everything here belongs to the event loop; whoever waits for something to change waits for `change`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec

from shared.errors import Banned, Configuration, Unauthorized, UpgradeRequired, VolunteerError
from shared.protocol.contributions import Verdict
from shared.protocol.heartbeat import TaskBeat
from volunteer.control.commands import How
from volunteer.storage.leases import HeldLease
from volunteer.training.trainer import Handle

Phase: TypeAlias = Literal["queued", "fetch", "train", "encode", "upload", "paused"]

FATAL = (Unauthorized, Banned, UpgradeRequired, Configuration)
YOU = "you"

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Reason why a device idles, and what ends it."""

    by: str
    message: str
    until: str = ""


class Held:
    """A lease that is being worked on."""

    def __init__(self, stored: HeldLease) -> None:
        self.stored = stored
        self.phase: Phase = "queued"
        self.handle: Handle[Any] | None = None
        self.steps_before = 0  # of those that the handle counts
        self.work: asyncio.Task[None] | None = None
        self.ended = ""  # "cancelled", "gone", "released", "saved": why it is given up
        self.message = ""
        self.ordered_pause = False
        self.freed = asyncio.Event()  # its device may do something else

    def free(self) -> None:
        """Nothing is left of it that needs the device."""
        self.freed.set()

    @property
    def key(self) -> tuple[int, int]:
        return self.stored.key

    def end(self, how: str, message: str, *, save: bool = False) -> None:
        """Give it up, wherever it stands."""
        if self.ended:
            return
        self.ended, self.message = how, message
        if self.handle is not None:
            self.handle.stop(message, save=save)
        elif self.work is not None:
            self.work.cancel()

    def beat(self, paused: bool) -> TaskBeat:
        report = self.handle.latest if self.handle else None
        return TaskBeat(
            task=self.key[0],
            attempt=self.key[1],
            phase="paused" if paused and self.phase == "train" else self.phase,
            step=self.steps_before + (report.step if report else 0),
            steps=self.stored.lease.job.steps,
            loss=report.loss if report else None,
            rate=report.steps_per_s if report else None,
        )


class Desk:
    """Holds the mutable state that the loops share."""

    def __init__(self, max_tasks: int = 0, runs: tuple[str, ...] = ()) -> None:
        self.runs = runs  # to help; empty = any
        self.held: dict[tuple[int, int], Held] = {}
        self.pauses: dict[str, dict[str, Pause]] = {}  # device ("" = all) -> by -> pause
        self.finishing = False
        self.share = 1.0  # of the time in which devices may work
        self.closing: How | None = None
        self.fatal: VolunteerError | None = None
        self.offset_s = 0.0  # the coordinator's clock minus ours
        self.handed_in = 0
        self.heads: dict[str, int] = {}  # run -> its newest version, as far as we heard
        self.late: set[tuple[int, int]] = (
            set()
        )  # leases whose time ran out and whose task nobody else has claimed yet
        self.hurries = 0  # how often somebody did not want to wait
        self._left = max_tasks if max_tasks > 0 else None
        self._counted: set[tuple[int, int]] = set()  # taken against `max_tasks`
        self._changed = asyncio.Event()
        self._expected: dict[str, asyncio.Future[Verdict]] = {}  # by the name of the result

    def expect(self, name: str) -> asyncio.Future[Verdict]:
        """Return what will be said of a result that is about to be handed in."""
        answer = self._expected[name] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(
            lambda done: done.cancelled() or done.exception()
        )  # perhaps unheard
        return answer

    def answered(self, name: str, verdict: Verdict | VolunteerError) -> None:
        """The coordinator has said what becomes of a result."""
        answer = self._expected.pop(name, None)
        if answer is None or answer.done():
            return
        if isinstance(verdict, VolunteerError):
            answer.set_exception(verdict)
        else:
            answer.set_result(verdict)

    def change(self) -> Coroutine[Any, Any, Literal[True]]:
        """Wait for the next change. Call it before looking at what may change, await it after."""
        return self._changed.wait()

    def notify(self) -> None:
        before, self._changed = self._changed, asyncio.Event()
        before.set()

    def paused(self, device: str) -> Pause | None:
        for name in ("", device):
            for pause in self.pauses.get(name, {}).values():
                return pause
        return None

    def pause(self, device: str, pause: Pause) -> None:
        self.pauses.setdefault(device, {})[pause.by] = pause
        self.notify()

    def resume(self, device: str, by: str) -> bool:
        """Take a reason away, on all devices where `device` is empty.

        False when it was not there.
        """
        names = list(self.pauses) if not device else [device]
        found = [self.pauses.get(name, {}).pop(by, None) for name in names]
        self.notify()
        return any(found)

    @property
    def exhausted(self) -> bool:
        """Return True if all the tasks that were asked for have been taken.

        One that is lost makes room for another.
        """
        return self._left is not None and self._left <= 0

    @property
    def ending(self) -> bool:
        return self.closing is not None or self.fatal is not None

    def may_claim(self, device: str) -> bool:
        return not (self.finishing or self.ending or self.exhausted or self.paused(device))

    def take(self, held: Held) -> None:
        self.held[held.key] = held
        if self._left is not None:
            self._left -= 1
            self._counted.add(held.key)
        self.notify()

    def put_down(self, held: Held, *, counted: bool) -> None:
        """Work on a lease is over; without a result it does not count against `max_tasks`."""
        self.held.pop(held.key, None)
        if not counted:
            self.lost(held.key)
        self.notify()

    def lost(self, key: tuple[int, int]) -> None:
        """Nothing was, or will be, handed in for this lease."""
        self.late.discard(key)
        if self._left is not None and key in self._counted:
            self._counted.remove(key)
            self._left += 1

    def give_up(self, error: VolunteerError) -> None:
        """Nothing can go on: the agent ends with this."""
        self.fatal = self.fatal or error
        self.notify()

    async def unless(self, hindrance: Callable[[], bool], work: Coroutine[Any, Any, T]) -> T | None:
        """Return what `work` gives, or None as soon as `hindrance` holds; then the work is
        cancelled.
        """
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                changed = asyncio.ensure_future(self.change())
                if hindrance():
                    changed.cancel()
                    return None
                await asyncio.wait({task, changed}, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    def heard(self, run: str, version: int) -> None:
        """A heartbeat told of a run's newest version."""
        if self.heads.get(run, -1) < version:
            self.heads[run] = version
            self.notify()

    def local(self, instant: float) -> float:
        """An instant of the coordinator's clock on ours."""
        return instant - self.offset_s


def with_begin(held: Held, **changes: object) -> None:
    """Change what is stored of a lease."""
    held.stored = msgspec.structs.replace(held.stored, **changes)
