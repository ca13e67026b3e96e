"""Teams, and who was in which from when to when: a team has what was earned meanwhile."""

from __future__ import annotations

from sqlalchemy import Column, Double, ForeignKey, Index, String, Table

from coordinator.database.tables.base import Key, metadata

teams = Table(
    "teams",
    metadata,
    Column("id", Key, primary_key=True, autoincrement=True),
    Column("name", String(64), nullable=False),
    Column("name_key", String(128), nullable=False, unique=True),  # its skeleton
    # Members hand it on, so it is kept as it is; it opens nothing but the team.
    Column("code", String(32), nullable=False, unique=True),
    Column("founder_id", ForeignKey("volunteers.id"), nullable=False, index=True),
    Column("created_at", Double, nullable=False),
)

memberships = Table(
    "memberships",
    metadata,
    Column("id", Key, primary_key=True, autoincrement=True),
    Column("team_id", ForeignKey("teams.id"), nullable=False, index=True),
    Column("volunteer_id", ForeignKey("volunteers.id"), nullable=False),
    Column("joined_at", Double, nullable=False),
    Column("left_at", Double, nullable=True),
)
Index("ix_memberships_volunteer", memberships.c.volunteer_id, memberships.c.joined_at)
# Whoever is in a team is in one.
Index(
    "ix_memberships_one",
    memberships.c.volunteer_id,
    unique=True,
    sqlite_where=memberships.c.left_at.is_(None),
    postgresql_where=memberships.c.left_at.is_(None),
)
