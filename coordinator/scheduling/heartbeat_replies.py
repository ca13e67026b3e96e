"""Replies to heartbeats: orders about tasks, the state of the runs, unseen verdicts.

Renewals are gathered in memory, and the state of the runs is cached for a second. Verdicts are
queried only if the newest of all is unseen or recent.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, TypeVar

import msgspec

from coordinator.accounts.announcements import Announcements
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

SHARED_S = 1.0
ANNOUNCED_S = 5.0
ORDER_S = DAY_S  # an owner's order to an absent machine lapses after this time
# Verdicts younger than this are sent again: a transaction may commit an older number late.
RECENT_S = 60.0
MORE_S = 1.0  # time until the next heartbeat if more unseen verdicts wait
TOLD_MAX = 4096  # workers whose newest verdict is remembered


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
        self.announcements = Announcements(db, clock)
        self._announced = CachedValue(self.announcements.standing, ANNOUNCED_S, clock)
        self._ordered = CachedValue(self._orders, SHARED_S, clock)  # orders of owners, by machine

    async def _orders(self) -> dict[str, OwnOrder]:
        since = self._clock.now() - ORDER_S
        return await self._db.read(lambda conn: volunteers.orders(conn, since))

    async def answer(self, principal: Principal, request: HeartbeatRequest) -> HeartbeatReply:
        """Renew the leases of a worker and return its orders, the runs and its new verdicts."""
        with self.durations.timed():
            return await self._answer(principal, request)

    async def _answer(self, principal: Principal, request: HeartbeatRequest) -> HeartbeatReply:
        orders = await self._renewals.beat(principal, request)
        runs = await self._runs.get()
        announced = await self._announced.get()
        newest, newest_at = await self._newest.get()
        now = self._clock.now()
        found = None
        if newest > request.news_since or newest_at > now - RECENT_S:
            since = request.news_since
            found = await self._db.read(lambda conn: self.news(conn, principal, since))
        ordered = (await self._ordered.get()).get(principal.worker_id)
        return HeartbeatReply(
            now=now,
            next_s=MORE_S if found and found.until < newest else HEARTBEAT_S,
            orders=orders,
            runs=runs,
            news=found.verdicts if found else (),
            news_until=found.until if found else request.news_since,
            earned_micro=found.earned_micro if found else None,
            pending_micro=found.pending_micro if found else None,
            announcements=announced,
            ordered=ordered if ordered and ordered.at > request.ordered_at else None,
        )

    def untold(self, conn: Connection, principal: Principal) -> tuple[tuple[Verdict, ...], int]:
        """Return the verdicts of the last minute that no reply to the worker has contained yet, and
        the number of the last, for `told`: the next heartbeat repairs a lost reply.
        """
        worker, recent_at = principal.worker_id, self._clock.now() - RECENT_S
        since = self._told.get(worker, 0)
        found, until = verdicts.newest_of(conn, worker, since, recent_at, NEWS_MAX)
        return tuple(found), until

    def told(self, principal: Principal, until: int) -> None:
        """Record that a reply contains the verdicts up to a number."""
        _remember(self._told, principal.worker_id, until)

    def news(self, conn: Connection, principal: Principal, since: int) -> VerdictNews:
        """Return a worker's verdicts and its owner's balances; call `sent` once they are sent."""
        recent_at = self._clock.now() - RECENT_S
        worker = principal.worker_id
        sent = Counter(self._sent.get(worker))
        found, until = verdicts.news(conn, worker, since, recent_at, NEWS_MAX, sent)
        held = payments.balances(conn, principal.volunteer_id)
        return VerdictNews(
            verdicts=tuple(found),
            until=until,
            earned_micro=held.earned_micro,
            pending_micro=held.pending_micro,
            sent=sent,
        )

    def sent(self, principal: Principal, news: VerdictNews) -> None:
        """Record that a reply contains these verdicts."""
        _remember(self._sent, principal.worker_id, news.sent)


def _remember(what: OrderedDict[str, T], worker: str, value: T) -> None:
    """Store a value for a worker as the newest; the oldest is dropped beyond `TOLD_MAX`."""
    what[worker] = value
    what.move_to_end(worker)
    if len(what) > TOLD_MAX:
        what.popitem(last=False)
