"""Replies to heartbeats: orders about tasks, the state of the runs, unseen verdicts.

Renewals are gathered in memory, and the state of the runs is cached for a second. One query finds,
for all heartbeats that arrive together, the workers with unseen or recent verdicts.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec

from coordinator.accounts.announcements import Announcements
from coordinator.batcher import Batcher
from coordinator.database import verdicts, volunteers
from coordinator.database.ledger import payments
from coordinator.traffic import Durations
from coordinator.ttl_cache import CachedValue
from shared.protocol.contributions import Verdict
from shared.protocol.heartbeat import HeartbeatReply, HeartbeatRequest, OwnOrder
from shared.protocol.limits import HEARTBEAT_S, NEWS_MAX
from shared.units import DAY_S

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.accounts.accounts import Principal
    from coordinator.database.engine.open_database import Database
    from coordinator.runs.runs import Runs
    from coordinator.scheduling.renewals import Renewals
    from shared.clock import Clock

T = TypeVar("T")

BATCH_MAX = 256  # heartbeats in one query
SHARED_S = 1.0
ANNOUNCED_S = 5.0
ORDER_S = DAY_S  # an owner's order to an absent machine lapses after this time
MORE_S = 1.0  # time until the next heartbeat if more unseen verdicts wait
TOLD_MAX = 16_384  # workers whose newest verdict is remembered


class VerdictNews(msgspec.Struct, frozen=True, kw_only=True):
    """Unseen verdicts, the number of the last one, and the balance after them."""

    verdicts: tuple[Verdict, ...]
    until: int
    earned_micro: int
    pending_micro: int
    sent: Counter[int]  # how often each recent verdict has been sent, these included


class Heartbeats:
    """Answers heartbeats."""

    def __init__(self, db: Database, clock: Clock, renewals: Renewals, runs: Runs) -> None:
        self._db = db
        self._clock = clock
        self._renewals = renewals
        self.durations = Durations()
        self._runs = CachedValue(runs.queries.beats, SHARED_S, clock)
        self._told: OrderedDict[str, int] = OrderedDict()  # newest verdict by worker
        # how often each recent verdict was sent, by worker
        self._sent: OrderedDict[str, Counter[int]] = OrderedDict()
        self._newest = CachedValue(lambda: db.read(verdicts.newest), SHARED_S, clock)
        self._concerned: Batcher[tuple[str, int], bool] = Batcher(
            self._ask, BATCH_MAX, key=lambda question: question[0]
        )
        self.announcements = Announcements(db, clock)
        self._announced = CachedValue(self.announcements.standing, ANNOUNCED_S, clock)
        self._ordered = CachedValue(self._orders, SHARED_S, clock)  # orders of owners, by machine

    async def _orders(self) -> dict[str, OwnOrder]:
        since = self._clock.now() - ORDER_S
        return await self._db.read(lambda conn: volunteers.orders(conn, since))

    async def _ask(self, questions: Sequence[tuple[str, int]]) -> list[bool]:
        recent_at, since = self._clock.now() - verdicts.RECENT_S, dict(questions)
        concerned = await self._db.read(lambda conn: verdicts.concerned(conn, since, recent_at))
        return [worker in concerned for worker, _ in questions]

    async def answer(
        self, principal: Principal, request: HeartbeatRequest
    ) -> tuple[HeartbeatReply, bool]:
        """Renew the leases of a worker; return its orders and the runs, and True if it may have new
        verdicts, which `news` returns.
        """
        with self.durations.timed():
            return await self._answer(principal, request)

    async def _answer(
        self, principal: Principal, request: HeartbeatRequest
    ) -> tuple[HeartbeatReply, bool]:
        orders = await self._renewals.beat(principal, request)
        runs = await self._runs.get()
        announced = await self._announced.get()
        newest, newest_at = await self._newest.get()
        now, since = self._clock.now(), request.news_since
        news = newest > since or newest_at > now - verdicts.RECENT_S
        news = news and await self._concerned.ask((principal.worker_id, since))
        ordered = (await self._ordered.get()).get(principal.worker_id)
        reply = HeartbeatReply(
            now=now,
            next_s=HEARTBEAT_S,
            orders=orders,
            runs=runs,
            news_until=max(since, newest),
            announcements=announced,
            ordered=ordered if ordered and ordered.at > request.ordered_at else None,
        )
        return reply, news

    def told_until(self, principal: Principal) -> int:
        """Return the number of the last verdict that a reply to the worker contained: the next
        heartbeat repairs a lost reply.
        """
        return self._told.get(principal.worker_id, 0)

    def record_told(self, principal: Principal, until: int) -> None:
        """Record that a reply contains the verdicts up to a number."""
        _remember(self._told, principal.worker_id, until)

    def news(self, conn: Connection, principal: Principal, since: int) -> VerdictNews:
        """Return a worker's verdicts and its owner's balances; call `record_sent` once they are
        sent.
        """
        recent_at = self._clock.now() - verdicts.RECENT_S
        worker = principal.worker_id
        sent = Counter(self._sent.get(worker))
        unseen, until = verdicts.news(conn, worker, since, recent_at, NEWS_MAX, sent)
        balances = payments.balances(conn, principal.volunteer_id)
        return VerdictNews(
            verdicts=tuple(unseen),
            until=until,
            earned_micro=balances.earned_micro,
            pending_micro=balances.pending_micro,
            sent=sent,
        )

    def record_sent(self, principal: Principal, news: VerdictNews) -> None:
        """Record that a reply contains these verdicts."""
        _remember(self._sent, principal.worker_id, news.sent)


def _remember(memory: OrderedDict[str, T], worker: str, value: T) -> None:
    """Store a value for a worker as the newest value; drop the oldest beyond `TOLD_MAX`."""
    memory[worker] = value
    memory.move_to_end(worker)
    if len(memory) > TOLD_MAX:
        memory.popitem(last=False)
