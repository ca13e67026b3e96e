"""Teams and who is in them: rows and their changes."""

from __future__ import annotations

import msgspec
from sqlalchemy import ColumnElement, Connection, delete, func, insert, select, update

from coordinator.database.ledger.payments import EARNING
from coordinator.database.tables.accounts import volunteers
from coordinator.database.tables.contributions import contributions
from coordinator.database.tables.ledger import accounts, events, postings
from coordinator.database.tables.teams import memberships, teams

_T, _M, _V = teams.c, memberships.c, volunteers.c
_OPEN = _M.left_at.is_(None)


class TeamRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `teams`."""

    id: int
    name: str
    name_key: str
    code: str
    founder_id: str
    created_at: float


class MemberRow(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody who is in a team now."""

    volunteer_id: str
    nickname: str
    public: bool
    joined_at: float


def _one(conn: Connection, where: ColumnElement[bool], *, lock: bool = False) -> TeamRow | None:
    query = select(teams).where(where)
    row = conn.execute(query.with_for_update() if lock else query).mappings().first()
    return None if row is None else TeamRow(**row)


def by_key(conn: Connection, key: str) -> TeamRow | None:
    """Return the team whose name looks like this."""
    return _one(conn, _T.name_key == key)


def by_code(conn: Connection, code: str) -> TeamRow | None:
    """Return the team of a code, locked: who joins counts its members."""
    return _one(conn, _T.code == code, lock=True)


def of(conn: Connection, volunteer_id: str) -> TeamRow | None:
    """Return the team that a volunteer is in."""
    mine = select(_M.team_id).where(_M.volunteer_id == volunteer_id, _OPEN).scalar_subquery()
    return _one(conn, _T.id == mine)


def every(conn: Connection, most: int) -> list[TeamRow]:
    """Return the teams, the oldest first."""
    query = select(teams).order_by(_T.id).limit(most)
    return [TeamRow(**row) for row in conn.execute(query).mappings()]


def count(conn: Connection, founder_id: str | None = None) -> int:
    """Return how many teams there are, or how many somebody founded."""
    query = select(func.count()).select_from(teams)
    query = query if founder_id is None else query.where(_T.founder_id == founder_id)
    return int(conn.execute(query).scalar_one())


def add(conn: Connection, row: TeamRow) -> int:
    """Insert a team without members; its number."""
    values = msgspec.structs.asdict(row)
    del values["id"]
    return int(conn.execute(insert(teams).values(**values).returning(_T.id)).scalar_one())


def rename(conn: Connection, team_id: int, name: str, key: str) -> None:
    conn.execute(update(teams).where(_T.id == team_id).values(name=name, name_key=key))


def remove(conn: Connection, team_id: int) -> None:
    """Delete a team and every trace of who was in it."""
    conn.execute(delete(memberships).where(_M.team_id == team_id))
    conn.execute(delete(teams).where(_T.id == team_id))


def join(conn: Connection, team_id: int, volunteer_id: str, now: float) -> None:
    values = {"team_id": team_id, "volunteer_id": volunteer_id, "joined_at": now}
    conn.execute(insert(memberships).values(**values))


def leave(conn: Connection, volunteer_id: str, now: float) -> bool:
    """End a membership; False if there is none."""
    mine = update(memberships).where(_M.volunteer_id == volunteer_id, _OPEN)
    return conn.execute(mine.values(left_at=now)).rowcount > 0


def joined_since(conn: Connection, volunteer_id: str, since: float) -> int:
    """Return how often somebody joined a team since an instant."""
    query = select(func.count()).where(_M.volunteer_id == volunteer_id, _M.joined_at >= since)
    return int(conn.execute(query).scalar_one())


def members(conn: Connection, team_id: int) -> list[MemberRow]:
    """Return who is in a team now, the longest first; banned accounts are left out."""
    query = (
        select(_V.id, _V.nickname, _V.public, _M.joined_at)
        .join(memberships, _M.volunteer_id == _V.id)
        .where(_M.team_id == team_id, _OPEN, _V.state == "active")
        .order_by(_M.joined_at, _V.id)
    )
    return [MemberRow(volunteer_id=r[0], nickname=r[1], public=r[2], joined_at=r[3])
            for r in conn.execute(query)]  # fmt: skip


def sizes(conn: Connection) -> dict[int, int]:
    """Return how many are in each team now."""
    query = select(_M.team_id, func.count()).where(_OPEN).group_by(_M.team_id)
    return {team: int(number) for team, number in conn.execute(query)}


def has_merged(conn: Connection, volunteer_id: str) -> bool:
    """Return True if a contribution of a volunteer was merged."""
    c = contributions.c
    query = select(c.id).where(c.volunteer_id == volunteer_id, c.state == "merged").limit(1)
    return conn.execute(query).first() is not None


def earned(
    conn: Connection,
    run_id: int | None = None,
    since: float | None = None,
    team_id: int | None = None,
) -> dict[tuple[int, str], int]:
    """Return what volunteers earned while they were in a team, by team and volunteer."""
    e = events.c
    while_in = (e.at >= _M.joined_at) & (_OPEN | (e.at < _M.left_at))
    query = (
        select(_M.team_id, _M.volunteer_id, func.sum(postings.c.amount_micro))
        .select_from(memberships)
        .join(accounts, (accounts.c.owner == _M.volunteer_id) & (accounts.c.kind == "earned"))
        .join(postings, postings.c.account_id == accounts.c.id)
        .join(events, (e.id == postings.c.event_id) & while_in)
        .where(e.kind.in_(EARNING))
        .group_by(_M.team_id, _M.volunteer_id)
    )
    for column, value in ((e.run_id, run_id), (_M.team_id, team_id)):
        query = query if value is None else query.where(column == value)
    if since is not None:
        query = query.where(e.at >= since)
    return {(team, who): int(total) for team, who, total in conn.execute(query)}
