"""Verdicts on contributions, from submissions and heartbeats, applied in one place."""

from __future__ import annotations

import asyncio

import msgspec

from shared.errors import VolunteerError
from shared.protocol.accounts import Me
from shared.protocol.contributions import Verdict
from shared.text import printable
from volunteer.account.profile_directory import Home
from volunteer.control import events
from volunteer.control.event_bus import EventBus
from volunteer.control.status import is_news
from volunteer.storage.outbox import QueuedResult


class Verdicts:
    """Stores and announces verdicts."""

    def __init__(self, home: Home, bus: EventBus) -> None:
        self._home = home
        self._bus = bus
        self._expected: dict[str, asyncio.Future[Verdict]] = {}  # by the name of the result

    @property
    def news_until(self) -> int:
        """Return the last news number that a heartbeat carried."""
        return self._home.memory.news_until

    def apply(
        self,
        verdicts: tuple[Verdict, ...],
        *,
        me: Me | None = None,
        until: int = 0,
        result: QueuedResult | None = None,
        news: tuple[Verdict, ...] = (),
    ) -> None:
        """Apply verdicts: after a submission, the verdicts on `result` and the attached `news`;
        without `result`, the verdicts of a heartbeat.

        The coordinator may repeat news, so only new verdicts count. `until` is the number of the
        newest verdict. `me` is the account after these verdicts: one event carries both, so that no
        screen shows one without the other.
        """
        if result is None:
            news, verdicts = verdicts, ()
        judged = {verdict.contribution for verdict in verdicts}
        by_contribution = {verdict.contribution: verdict for verdict in self._home.memory.verdicts}
        other = tuple(
            verdict
            for verdict in news
            if verdict.contribution not in judged
            and is_news(verdict, by_contribution.get(verdict.contribution))
        )
        fresh = tuple(
            msgspec.structs.replace(verdict, message=printable(verdict.message))
            for verdict in (*verdicts, *other)
        )
        if fresh or until > self._home.memory.news_until:
            self._home.remember_verdicts(fresh, until)
        if me is not None and (fresh or _differs(me, self._bus.status.me)):
            self._bus.emit(events.Credits(me=me, verdicts=fresh))
        for verdict in fresh:
            self._bus.emit(events.Judged(verdict=verdict))

    def expect(self, name: str) -> asyncio.Future[Verdict]:
        """Return a future for the verdict on a result that is about to be submitted."""
        answer = self._expected[name] = asyncio.get_running_loop().create_future()
        # Reads the exception, so that asyncio logs none if the work that waits for it has ended.
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        return answer

    def resolve(self, name: str, verdict: Verdict | VolunteerError) -> None:
        """Resolve the future of `expect`."""
        answer = self._expected.pop(name, None)
        if answer is None or answer.done():
            return
        if isinstance(verdict, VolunteerError):
            answer.set_exception(verdict)
        else:
            answer.set_result(verdict)


def _differs(me: Me, before: Me | None) -> bool:
    """Return True if an account differs in more than its machines and its time `at`."""
    same = (
        before is not None and msgspec.structs.replace(before, workers=me.workers, at=me.at) == me
    )
    return not same
