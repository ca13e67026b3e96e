"""The heartbeat: a loop of its own, so that neither training nor transfers can make it late."""

from __future__ import annotations

from collections.abc import Callable

from shared.errors import VolunteerError
from shared.protocol.contributions import Verdict
from shared.protocol.heartbeat import HeartbeatReply, HeartbeatRequest, RunBeat, TaskBeat, TaskOrder
from shared.protocol.limits import HEARTBEAT_S
from volunteer.account.profile import is_news
from volunteer.agent.context import Parts
from volunteer.agent.shared_state import FATAL, Held
from volunteer.control import events
from volunteer.storage.leases import HeldLease
from volunteer.text import printable

NEXT_S_MIN, NEXT_S_MAX = 1.0, 60.0


class Beat:
    """Tells the coordinator how the tasks stand and obeys what comes back."""

    def __init__(
        self,
        parts: Parts,
        on_runs: Callable[[tuple[RunBeat, ...]], None],
        on_credits: Callable[[], None],
        on_pause: Callable[[str, bool, str], None],
    ) -> None:
        self._parts = parts
        self._desk = parts.desk
        self._on_runs = on_runs
        self._on_credits = on_credits
        self._on_pause = on_pause
        self._notice = ""
        self._balance: tuple[int | None, int | None] = (None, None)

    async def run(self) -> None:
        """Beat until cancelled; at once when a pause begins or ends."""
        while True:
            said = self._paused()
            next_s = await self.once()
            await self._sleep(next_s, said)

    async def _sleep(self, seconds: float, said: frozenset[tuple[str, str]]) -> None:
        await self._desk.unless(lambda: self._paused() != said, self._parts.clock.sleep(seconds))

    async def alive(self, stored: tuple[HeldLease, ...]) -> tuple[HeldLease, ...]:
        """Return which leases of an earlier process are still ours and not yet late: somebody else
        may claim those that are.
        """
        extra = tuple(Held(lease).beat(paused=False) for lease in stored)
        reply = await self._parts.api.heartbeat(lambda: self._request(extra))
        self._learn(reply)
        ours = {(order.task, order.attempt) for order in reply.orders if _ours(order)}
        return tuple(lease for lease in stored if lease.key in ours - self._desk.late)

    async def once(self) -> float:
        """One heartbeat. Returns the seconds until the next."""
        try:
            reply = await self._parts.api.heartbeat(self._request)
        except FATAL as error:
            self._desk.give_up(error)
            return NEXT_S_MAX
        except VolunteerError as error:
            self._parts.hub.notice(f"the coordinator refused a heartbeat: {error.message}", "error")
            return HEARTBEAT_S
        self._learn(reply)
        for order in reply.orders:
            self._obey(order)
        return min(max(reply.next_s, NEXT_S_MIN), NEXT_S_MAX)

    def _paused(self) -> frozenset[tuple[str, str]]:
        return frozenset((name, by) for name, found in self._desk.pauses.items() for by in found)

    def _request(self, extra: tuple[TaskBeat, ...] = ()) -> HeartbeatRequest:
        desk = self._desk
        beats = [
            held.beat(bool(held.ordered_pause or desk.paused(held.stored.device)))
            for held in desk.held.values()
        ]
        known = set(desk.held)
        for entry in self._parts.outbox.entries():
            key = entry.task, entry.submit.attempt
            if key not in known:
                steps = entry.submit.steps
                beats.append(
                    TaskBeat(task=key[0], attempt=key[1], phase="upload", step=steps, steps=steps)
                )
        pause = desk.paused("")
        return HeartbeatRequest(
            tasks=(*beats, *extra),
            paused=pause is not None,
            reason=pause.message[:200] if pause else "",
            news_since=self._parts.home.memory.news_until,
        )

    def _learn(self, reply: HeartbeatReply) -> None:
        self._desk.offset_s = reply.now - self._parts.clock.now()
        self._desk.late = {
            (order.task, order.attempt)
            for order in reply.orders
            if _ours(order) and order.renew_by <= reply.now
        }
        self._news(reply.news, reply.news_until)
        self._on_runs(reply.runs)
        balance = (reply.earned_micro, reply.pending_micro)
        if balance != (None, None) and balance != self._balance:
            self._balance = balance
            self._on_credits()
        notice = printable(reply.notice)
        if notice and notice != self._notice:
            self._parts.hub.notice(notice)
        self._notice = notice

    def _news(self, verdicts: tuple[Verdict, ...], until: int) -> None:
        """Store and tell what is new; the coordinator may say the same twice."""
        known = {verdict.contribution: verdict for verdict in self._parts.home.memory.verdicts}
        fresh = tuple(v for v in verdicts if is_news(v, known.get(v.contribution)))
        if fresh or until > self._parts.home.memory.news_until:
            self._parts.home.remember_verdicts(fresh, until)
        devices = tuple(device.id for device in self._parts.hub.status.devices)
        for verdict in fresh:
            self._parts.residuals.judged(verdict, devices)
            self._parts.hub.emit(events.Judged(verdict=verdict))

    def _obey(self, order: TaskOrder) -> None:
        held = self._desk.held.get((order.task, order.attempt))
        if held is None:
            return
        message = printable(order.message)
        if order.order == "cancel":
            held.end("cancelled", message or "the coordinator cancelled this task")
        elif order.order == "gone":
            held.end("gone", message or "somebody else holds this task now")
        else:
            self._pause(held, order.order == "pause", message)

    def _pause(self, held: Held, wanted: bool, message: str) -> None:
        if held.ordered_pause == wanted:
            return
        held.ordered_pause = wanted
        self._on_pause(held.stored.device, wanted, message or "the coordinator asked to pause")


def _ours(order: TaskOrder) -> bool:
    return order.order in ("continue", "pause")
