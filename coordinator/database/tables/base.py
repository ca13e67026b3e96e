"""Metadata and the type of 64-bit keys, shared by all tables.

Instants (`*_at`) are UTC epoch seconds as doubles, from the Clock; money is integer micro-credits;
JSON is text written by msgspec. Rows that must never change (postings, events, record, versions)
are guarded by triggers, made by the migrations. SQLite and PostgreSQL have the same tables.
"""

from __future__ import annotations

import sqlalchemy as sa

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s",
    "pk": "pk_%(table_name)s",
}
metadata = sa.MetaData(naming_convention=NAMING)

# 64-bit keys that SQLite still numbers by itself.
Key = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def lease_columns() -> tuple[sa.Column[str], sa.Column[int], sa.Column[float]]:
    """Return the columns of a lease: owner, attempt and end."""
    return (
        sa.Column("owner", sa.String(64), nullable=False, default=""),
        sa.Column("attempt", sa.Integer, nullable=False, default=0),
        sa.Column("lease_until", sa.Double, nullable=False, default=0.0),
    )
