"""Heartbeat in a loop of its own, so that training and transfers cannot delay it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from shared.errors import VolunteerError
from shared.protocol import endpoints
from shared.protocol.heartbeat import HeartbeatReply, HeartbeatRequest, TaskBeat, TaskOrder
from shared.protocol.limits import HEARTBEAT_S
from shared.sentences import Sentence
from shared.text import printable
from volunteer.agent.held_leases import LeaseInWork
from volunteer.agent.lifecycle import FATAL
from volunteer.agent.pause_board import PauseBoard
from volunteer.agent.run_watcher import RunWatcher
from volunteer.agent.workplace import Workplace
from volunteer.storage.leases import HeldLease

NEXT_S_MIN, NEXT_S_MAX = 1.0, 60.0


@dataclass(eq=False, kw_only=True)
class Heartbeat:
    """Reports the state of the tasks to the coordinator and obeys its orders."""

    place: Workplace
    pauses: PauseBoard
    watcher: RunWatcher
    obey_owner: Callable[[Literal["pause", "resume", "finish"]], None]  # order from another machine
    celsius: Callable[[], float | None]  # temperature of the hottest lent device
    _send_now: bool = field(default=False, init=False)

    async def run(self) -> None:
        """Send heartbeats until cancelled; at once when a pause begins or ends."""
        while True:
            sent = self.pauses.reasons()
            self._send_now = False
            next_s = await self.once()
            await self.place.life.sleep(
                next_s,
                lambda: self._send_now or self.pauses.reasons() != sent,  # noqa: B023
            )

    def send_soon(self) -> None:
        """Send the next heartbeat now; its reply has the account and its verdicts."""
        self._send_now = True
        self.place.life.notify()

    async def confirm_leases(self, leases: tuple[HeldLease, ...]) -> tuple[HeldLease, ...]:
        """Send a heartbeat with the leases of an earlier process; return those that this machine
        still holds in time.
        """
        extra = tuple(LeaseInWork(lease).report(paused=False) for lease in leases)
        reply = await self._send(lambda: self._request(extra))
        self._apply_reply(reply)
        continued = {(order.task, order.attempt) for order in reply.orders if _continues(order)}
        return tuple(lease for lease in leases if lease.key in continued - self.place.held.late)

    async def once(self) -> float:
        """Send one heartbeat. Return the seconds until the next heartbeat."""
        try:
            reply = await self._send(self._request)
        except FATAL as error:
            self.place.life.give_up(error)
            return NEXT_S_MAX
        except VolunteerError as error:
            self.watcher.notice(
                Sentence("the coordinator refused a heartbeat: {error}", error=error.message),
                "error",
            )
            return HEARTBEAT_S
        self._apply_reply(reply)
        for order in reply.orders:
            self._obey(order)
        return min(max(reply.next_s, NEXT_S_MIN), NEXT_S_MAX)

    async def _send(self, request: Callable[[], HeartbeatRequest]) -> HeartbeatReply:
        """Send a heartbeat; each try calls `request` again, for the current progress."""
        return await self.place.remote.api.call(endpoints.HEARTBEAT, body=request)

    def _request(self, extra: tuple[TaskBeat, ...] = ()) -> HeartbeatRequest:
        reports = [
            work.report(paused=bool(self.pauses.paused(work.stored.device)))
            for work in self.place.held
        ]
        for entry in self.place.store.outbox.entries():
            task, attempt = entry.task, entry.submit.attempt
            if self.place.held.get((task, attempt)) is None:
                steps = entry.submit.steps
                reports.append(
                    TaskBeat(task=task, attempt=attempt, phase="upload", step=steps, steps=steps)
                )
        pause = self.pauses.paused("")
        return HeartbeatRequest(
            tasks=(*reports, *extra),
            paused=pause is not None,
            reason=pause.message[:200] if pause else "",
            celsius=self.celsius(),
            news_since=self.watcher.verdicts.news_until,
            ordered_at=self.place.store.home.memory.ordered_at,
        )

    def _apply_reply(self, reply: HeartbeatReply) -> None:
        self.place.server_clock.learn(reply.now)
        self.place.held.late = {
            (order.task, order.attempt)
            for order in reply.orders
            if _continues(order) and order.renew_by <= reply.now
        }
        self.watcher.apply_heartbeat(reply)
        ordered = reply.ordered
        if ordered is not None and ordered.at > self.place.store.home.memory.ordered_at:
            self.place.store.home.remember(ordered_at=ordered.at)
            self.obey_owner(ordered.order)

    def _obey(self, order: TaskOrder) -> None:
        work = self.place.held.get((order.task, order.attempt))
        if work is None:
            return
        message = printable(order.message)
        if order.order == "cancel":
            work.end("cancelled", message or Sentence("the coordinator cancelled this task"))
        elif order.order == "gone":
            work.end("gone", message or Sentence("another volunteer holds this task now"))


def _continues(order: TaskOrder) -> bool:
    return order.order == "continue"
