"""Leaderboard: credits earned by each volunteer in a window of days; spending does not change them,
a reversal does.

A hidden volunteer is shown and counted only to itself. A window is computed at most every five
seconds; a reader's own later earnings are added to its row, so that the row agrees with its
account.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from coordinator.database import runs, statistics
from coordinator.database.ledger.payments import last_event
from coordinator.database.statistics import LeaderboardStanding
from coordinator.ttl_cache import REST, KeyedCache
from shared.errors import BadRequest
from shared.protocol.listings import LeaderRow
from shared.units import DAY_S, HOUR_S

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.database.engine.open_database import Database
    from shared.clock import Clock

FRESH_S = 5.0
ROWS = 100
SELDOM_REST = 200.0  # computing the sums for `seldom` takes at most 1/200 of the time
DAYS_MAX = 3650
WINDOWS = (1, 7, 30, 90, 365, DAYS_MAX)  # another number of days counts as the next longer window
SHOWN_S, SHOWN_MAX = HOUR_S, 10_000  # for how long, and how many, changes of visibility are kept


class Standings(msgspec.Struct, frozen=True, kw_only=True):
    """Standings, and the newest event of the ledger that is counted in them."""

    rows: Sequence[LeaderboardStanding]
    event: int
    earned: dict[str, tuple[int, bool]]  # credits by volunteer, and whether it is public
    public: list[int]  # negated credits of the public volunteers, ascending

    def raised(self, who: str, micro: int) -> Sequence[LeaderboardStanding]:
        """Return the rows with one volunteer moved to its rank after additional credits."""
        if not micro:
            return self.rows
        rows = [
            msgspec.structs.replace(s, earned_micro=s.earned_micro + micro)
            if s.volunteer_id == who
            else s
            for s in self.rows
        ]
        return sorted(rows, key=lambda s: (-s.earned_micro, s.nickname))


class Leaderboard:
    """Reads and caches standings."""

    def __init__(self, db: Database, clock: Clock) -> None:
        self._db = db
        self._clock = clock
        # visibility of volunteers and the instant of its change, newest change last
        self._shown: dict[str, tuple[bool, float]] = {}
        self._fresh: KeyedCache[tuple[str, int], Standings] = KeyedCache(FRESH_S, clock, rest=REST)
        self._seldom: KeyedCache[tuple[str, int], Standings] = KeyedCache(
            FRESH_S, clock, rest=SELDOM_REST
        )

    async def rows(
        self, run: str | None, window_days: int | None, me: str | None, *, seldom: bool = False
    ) -> tuple[LeaderRow, ...]:
        """Return the hundred best volunteers of a run (or of all) in a window (or ever), and the
        row of `me` at any rank.

        The sums may be older with `seldom`, for pages that strangers ask for. A volunteer who hides
        disappears at once in the process that got the request, in others with their next sums.
        Raises NotFound, BadRequest.
        """
        board = await self._standings(run, window_days, self._seldom if seldom else self._fresh)
        rows = board.rows
        if me is not None:
            rows = board.raised(me, await self._earned_since(me, board.event, run))
        places = self._places(rows, me)
        return tuple(
            LeaderRow(
                nickname=s.nickname,
                earned_micro=s.earned_micro,
                accepted=s.accepted,
                device_s=s.device_s,
                workers=s.workers,
                rank=place,
                me=s.volunteer_id == me,
            )
            for index, (place, s) in enumerate(places)
            if index < ROWS or s.volunteer_id == me
        )

    async def rank(self, me: str) -> int | None:
        """Return the place of a volunteer over all runs and times; None before the first credit."""
        board = await self._standings(None, None, self._fresh)
        standing = board.earned.get(me)
        if standing is None:
            return None
        before = bisect_left(board.public, -standing[0])
        since = self._clock.monotonic() - SHOWN_S
        for who, (public, at) in self._shown.items():  # may be newer than the standings
            micro, was_public = board.earned.get(who, (0, False))
            if at > since and micro > standing[0]:
                before += public - was_public
        return before + 1

    def clear(self) -> None:
        """Clear the cached standings after a name or an account has changed."""
        self._fresh.clear()
        self._seldom.clear()

    def show(self, volunteer_id: str, public: bool) -> None:
        """Show or hide one volunteer at once, without computing the standings again."""
        now = self._clock.monotonic()
        self._shown.pop(volunteer_id, None)
        self._shown[volunteer_id] = (public, now)
        while self._shown:
            oldest = next(iter(self._shown))
            if len(self._shown) <= SHOWN_MAX and self._shown[oldest][1] > now - SHOWN_S:
                break
            del self._shown[oldest]

    def _places(
        self, standings: Sequence[LeaderboardStanding], me: str | None
    ) -> list[tuple[int, LeaderboardStanding]]:
        """Rank the public standings; equal credits share a place."""
        since = self._clock.monotonic() - SHOWN_S
        places: list[tuple[int, LeaderboardStanding]] = []
        index = 0
        for standing in standings:
            public, at = self._shown.get(standing.volunteer_id, (standing.public, since))
            if not (public if at > since else standing.public) and standing.volunteer_id != me:
                continue
            index += 1
            tied = places and places[-1][1].earned_micro == standing.earned_micro
            places.append((places[-1][0] if tied else index, standing))
        return places

    async def _standings(
        self, run: str | None, days: int | None, cache: KeyedCache[tuple[str, int], Standings]
    ) -> Standings:
        if days is not None and not 1 <= days <= DAYS_MAX:
            raise BadRequest(f"a leaderboard looks back between 1 and {DAYS_MAX} days")
        if days is not None:
            days = next(window for window in WINDOWS if window >= days)

        def read(conn: Connection) -> Standings:
            run_id = None if run is None else runs.by_name(conn, run).id
            since = None if days is None else self._clock.now() - days * DAY_S
            rows = statistics.standings(conn, run_id, since)
            return Standings(
                rows=rows,
                event=last_event(conn),  # `rows` adds later pay of `me`
                earned={s.volunteer_id: (s.earned_micro, s.public) for s in rows},
                public=[-s.earned_micro for s in rows if s.public],
            )

        return await cache.get((run or "", days or 0), lambda: self._db.read(read))

    async def _earned_since(self, me: str, event: int, run: str | None) -> int:
        """Return the credits that a volunteer earned by ledger events after `event`."""

        def read(conn: Connection) -> int:
            run_id = None if run is None else runs.by_name(conn, run).id
            return statistics.earned_after(conn, me, event, run_id)

        return await self._db.read(read)
