"""Drop four columns that were written and never read; complete databases made before the last
tables, columns and indexes of the first revision.
"""

from __future__ import annotations

from typing import Any

from alembic import op
from sqlalchemy import Column, Connection, inspect

from coordinator.database.migrations.versions.r0001_tables import metadata

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

DROPPED = (
    ("runs", "pass_seed"),
    ("runs", "median_task_s"),
    ("runs", "last_merge_at"),
    ("versions", "merge_s"),
)


def upgrade() -> None:
    _complete(op.get_bind())
    for table, column in DROPPED:
        op.drop_column(table, column)


def _complete(connection: Connection) -> None:
    """Add what the first revision gained while it was developed: all of it is empty or has a
    default.
    """
    metadata.create_all(connection)
    there = inspect(connection)
    for table in metadata.sorted_tables:
        known = {column["name"] for column in there.get_columns(table.name)}
        for column in table.columns:
            if column.name not in known:
                op.add_column(table.name, _alone(column))
        for index in table.indexes:
            index.create(connection, checkfirst=True)


def _alone(column: Column[Any]) -> Column[Any]:
    """Return a column without its table."""
    return Column(
        column.name, column.type, nullable=column.nullable, server_default=column.server_default
    )
