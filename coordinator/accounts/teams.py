"""Teams: founded by whoever has done something, joined by a code, left at any time.

A volunteer is in one team at most. A team has what its members earned while they were in it: who
comes brings nothing, who goes takes nothing away.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from coordinator.accounts.leaderboard import FRESH_S, SELDOM_REST, WINDOWS
from coordinator.database import memberships, record, runs
from coordinator.database.memberships import TeamRow
from coordinator.rules import codes, nicknames
from coordinator.ttl_cache import KeyedCache
from shared.errors import BadRequest, Conflict, Forbidden, InvalidName, NotFound, TooManyRequests
from shared.protocol.limits import NICKNAME_MAX
from shared.protocol.teams import MyTeam, TeamCreate, TeamJoin, TeamMember, TeamStanding
from shared.text import escaped
from shared.units import DAY_S

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.accounts.authentication import Principal
    from coordinator.database.engine.open_database import Database
    from shared.clock import Clock

TEAMS_MAX = 10_000
FOUNDED_MAX = 3  # of one volunteer
MEMBERS_MAX = 1000
JOINS_MAX = 5  # of one volunteer within a day
CODE_CHARS = 12
ROWS = 100

Earned = Mapping[tuple[int, str], int]


class TeamInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A team as the organiser sees it."""

    name: str
    founder_id: str
    members: int
    earned_micro: int
    created_at: float


class TeamPage(msgspec.Struct, frozen=True, kw_only=True):
    """A team as everybody sees it: its members that are shown, and how many there are."""

    name: str
    created_at: float
    size: int
    earned_micro: int
    members: tuple[TeamMember, ...]


class Teams:
    """The teams of a coordinator."""

    def __init__(self, db: Database, clock: Clock) -> None:
        self._db = db
        self._clock = clock
        self._kept: KeyedCache[tuple[str, int], Earned] = KeyedCache(
            FRESH_S, clock, rest=SELDOM_REST
        )

    # --- coming and going ---

    async def create(self, principal: Principal, request: TeamCreate) -> MyTeam:
        """Found a team. Raises InvalidName, Conflict, Forbidden."""
        name = _named(request.name)
        key, now, who = nicknames.skeleton(name), self._clock.now(), principal.volunteer_id
        code = codes.new_code(CODE_CHARS)

        def write(conn: Connection) -> None:
            if memberships.of(conn, who) is not None:
                raise Conflict("you are in a team: `volunteer team leave` first")
            if not memberships.has_merged(conn, who):
                raise Forbidden(
                    "a team is founded by whoever has a merged contribution: let this machine work"
                )
            if memberships.by_key(conn, key) is not None:
                raise Conflict(f'there is a team called like "{name}": choose another name')
            if memberships.count(conn, who) >= FOUNDED_MAX:
                raise Forbidden(f"you have founded {FOUNDED_MAX} teams; join one")
            if memberships.count(conn) >= TEAMS_MAX:
                raise Forbidden(f"there are {TEAMS_MAX} teams: no more are taken; join one")
            row = TeamRow(
                id=0,
                name=name,
                name_key=key,
                code=codes.normal(code),
                founder_id=who,
                created_at=now,
            )
            memberships.join(conn, memberships.add(conn, row), who, now)

        await self._db.write(write)
        return await self.mine(principal)

    async def join(self, principal: Principal, request: TeamJoin) -> MyTeam:
        """Join the team of a code; joining it again changes nothing.

        Raises NotFound, Conflict, TooManyRequests.
        """
        code, now, who = codes.normal(request.code), self._clock.now(), principal.volunteer_id

        def write(conn: Connection) -> None:
            team = memberships.by_code(conn, code)
            if team is None:
                raise NotFound("no team has this code: ask a member for `volunteer team show`")
            mine = memberships.of(conn, who)
            if mine is not None and mine.id == team.id:
                return
            if mine is not None:
                raise Conflict(f'you are in "{mine.name}": `volunteer team leave` first')
            if len(memberships.members(conn, team.id)) >= MEMBERS_MAX:
                raise Conflict(f'"{team.name}" has {MEMBERS_MAX} members: it takes no more')
            if memberships.joined_since(conn, who, now - DAY_S) >= JOINS_MAX:
                raise TooManyRequests(
                    f"you joined {JOINS_MAX} teams within a day: come back tomorrow",
                    retry_after_s=DAY_S,
                )
            memberships.join(conn, team.id, who, now)

        await self._db.write(write)
        return await self.mine(principal)

    async def leave(self, principal: Principal) -> None:
        """Leave the team, if there is one; what was earned for it stays with it."""
        now, who = self._clock.now(), principal.volunteer_id
        await self._db.write(lambda conn: memberships.leave(conn, who, now))

    # --- reading ---

    async def mine(self, principal: Principal) -> MyTeam:
        """Return the team that a volunteer is in, with its code."""
        who = principal.volunteer_id
        team = await self._db.read(lambda conn: memberships.of(conn, who))
        if team is None:
            return MyTeam()
        page, mine = await self._db.read(lambda conn: _page(conn, team, who))
        board = await self._standings(None, None)
        return MyTeam(
            name=team.name,
            code=_shown(team.code),
            rank=next((row.rank for row in _ranked(board, team.id) if row.me), None),
            teams=len(board),
            earned_micro=page.earned_micro,
            mine_micro=mine,
            size=page.size,
            members=page.members,
        )

    async def ranking(
        self, principal: Principal, days: int | None = None
    ) -> tuple[TeamStanding, ...]:
        """Return the first hundred teams and one's own. Raises BadRequest."""
        who = principal.volunteer_id
        team = await self._db.read(lambda conn: memberships.of(conn, who))
        return await self.board(None, days, team.id if team else None)

    async def board(
        self, run: str | None = None, days: int | None = None, mine: int | None = None
    ) -> tuple[TeamStanding, ...]:
        """Return the first hundred teams, of a run or all. Raises NotFound, BadRequest."""
        ranked = _ranked(await self._standings(run, days), mine)
        return tuple(row for place, row in enumerate(ranked) if place < ROWS or row.me)

    async def page(self, name: str) -> TeamPage:
        """Return a team as everybody sees it. Raises NotFound."""
        key = nicknames.skeleton(name) if len(name) <= NICKNAME_MAX else ""

        def read(conn: Connection) -> TeamPage:
            team = memberships.by_key(conn, key)
            if team is None:
                raise NotFound(f'there is no team "{escaped(name)}"')
            return _page(conn, team, "")[0]

        return await self._db.read(read)

    async def _standings(
        self, run: str | None, days: int | None
    ) -> list[tuple[int, str, int, int]]:
        """Return number, name, credits and members of the teams that earned something, the most
        first.
        """
        if days is not None and not 1 <= days <= WINDOWS[-1]:
            raise BadRequest(f"a leaderboard looks back between 1 and {WINDOWS[-1]} days")
        if days is not None:
            days = next(window for window in WINDOWS if window >= days)

        def read(conn: Connection) -> Earned:
            run_id = None if run is None else runs.by_name(conn, run).id
            since = None if days is None else self._clock.now() - days * DAY_S
            return memberships.earned(conn, run_id, since)

        totals: dict[int, int] = {}
        earned = await self._kept.get((run or "", days or 0), lambda: self._db.read(read))
        for (team, _), micro in earned.items():
            totals[team] = totals.get(team, 0) + micro
        rows, sizes = await self._db.read(
            lambda conn: (memberships.every(conn, TEAMS_MAX), memberships.sizes(conn))
        )
        found = [
            (row.id, row.name, totals[row.id], sizes.get(row.id, 0))
            for row in rows
            if totals.get(row.id, 0) > 0
        ]
        return sorted(found, key=lambda each: (-each[2], each[1]))

    # --- the organiser ---

    async def list(self) -> tuple[TeamInfo, ...]:
        """Return every team, the oldest first."""

        def read(conn: Connection) -> tuple[TeamInfo, ...]:
            sizes, earned = memberships.sizes(conn), memberships.earned(conn)
            return tuple(
                TeamInfo(
                    name=row.name,
                    founder_id=row.founder_id,
                    members=sizes.get(row.id, 0),
                    earned_micro=sum(m for (team, _), m in earned.items() if team == row.id),
                    created_at=row.created_at,
                )
                for row in memberships.every(conn, TEAMS_MAX)
            )

        return await self._db.read(read)

    async def rename(self, name: str, to: str) -> str:
        """Give a team another name; the name as stored. Raises NotFound, InvalidName, Conflict."""
        new, now = _named(to), self._clock.now()
        key = nicknames.skeleton(new)

        def change(conn: Connection, team: TeamRow) -> None:
            other = memberships.by_key(conn, key)
            if other is not None and other.id != team.id:
                raise Conflict(f'there is a team called like "{new}": choose another name')
            memberships.rename(conn, team.id, new, key)
            detail = {"from": team.name, "to": new}
            record.append(conn, "organiser", "team.rename", team.name, detail, now)

        await self._change(name, change)
        return new

    async def remove(self, name: str) -> str:
        """Remove a team; its members keep what is theirs. Raises NotFound."""
        now = self._clock.now()

        def change(conn: Connection, team: TeamRow) -> None:
            memberships.remove(conn, team.id)
            record.append(conn, "organiser", "team.remove", team.name, "", now)

        return await self._change(name, change)

    async def _change(self, name: str, change: Callable[[Connection, TeamRow], None]) -> str:
        key = nicknames.skeleton(name[:NICKNAME_MAX])

        def write(conn: Connection) -> str:
            team = memberships.by_key(conn, key)
            if team is None:
                raise NotFound(f'there is no team "{escaped(name)}": `coordinator team list`')
            change(conn, team)
            return team.name

        try:
            return await self._db.write(write)
        finally:
            self._kept.clear()


def _named(raw: str) -> str:
    """Return a name as it is stored. Raises InvalidName by the rules of nicknames."""
    try:
        return nicknames.normal(raw)
    except InvalidName as error:
        raise InvalidName(error.message.replace("nickname", "name of a team")) from error


def _shown(code: str) -> str:
    """Return a code in groups of four."""
    return "-".join(code[at : at + 4] for at in range(0, len(code), 4))


def _page(conn: Connection, team: TeamRow, me: str) -> tuple[TeamPage, int]:
    """Return a team with its members that are shown, and what `me` earned for it."""
    earned = memberships.earned(conn, team_id=team.id)
    rows = memberships.members(conn, team.id)
    shown = [
        TeamMember(
            nickname=row.nickname,
            earned_micro=earned.get((team.id, row.volunteer_id), 0),
            joined_at=row.joined_at,
            me=row.volunteer_id == me,
        )
        for row in rows
        if row.public or row.volunteer_id == me
    ]
    page = TeamPage(
        name=team.name,
        created_at=team.created_at,
        size=len(rows),
        earned_micro=sum(earned.values()),
        members=tuple(sorted(shown, key=lambda m: (-m.earned_micro, m.joined_at))[:ROWS]),
    )
    return page, earned.get((team.id, me), 0)


def _ranked(board: list[tuple[int, str, int, int]], mine: int | None) -> list[TeamStanding]:
    """Return the teams with their ranks; the same credits share one."""
    found: list[TeamStanding] = []
    for place, (team, name, micro, members) in enumerate(board, start=1):
        tied = found and found[-1].earned_micro == micro
        rank = found[-1].rank if tied else place
        found.append(
            TeamStanding(rank=rank, name=name, earned_micro=micro, members=members, me=team == mine)
        )
    return found
