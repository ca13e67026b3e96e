"""Teams: founding, joining, and how they stand."""

from __future__ import annotations

from shared.protocol.base import Message


class TeamCreate(Message):
    """Found a team; its founder is in it."""

    name: str


class TeamJoin(Message):
    """Join a team by the code that a member handed on."""

    code: str


class TeamMember(Message):
    nickname: str
    earned_micro: int  # for the team
    joined_at: float
    me: bool = False


class MyTeam(Message):
    """The team of the caller; an empty name = none."""

    name: str = ""
    code: str = ""  # to hand on
    rank: int | None = None  # of all times
    teams: int = 0  # that have earned anything
    earned_micro: int = 0
    mine_micro: int = 0
    size: int = 0
    members: tuple[TeamMember, ...] = ()  # those that are shown, and the caller


class TeamStanding(Message):
    """One line of the leaderboard of teams."""

    rank: int
    name: str
    earned_micro: int
    members: int
    me: bool = False
