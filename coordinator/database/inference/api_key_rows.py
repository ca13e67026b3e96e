"""Rows of API keys, and the accounts that may have a key."""

from __future__ import annotations

import msgspec
from sqlalchemy import Connection, func, insert, select, update

from coordinator.database.contributions import UPDATES
from coordinator.database.engine.statements import equals
from coordinator.database.tables.accounts import volunteers
from coordinator.database.tables.contributions import contributions
from coordinator.database.tables.inference import api_keys
from coordinator.database.volunteers import takes_part
from shared.errors import NotFound


class KeyRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `api_keys`; see the table."""

    id: int
    volunteer_id: str
    name: str
    key_hash: str
    prefix: str
    cap_micro: int | None
    spent_micro: int
    runs: str
    organiser: bool
    created_at: float
    expires_at: float | None
    revoked_at: float | None

    def works(self, now: float) -> bool:
        """Return True if the key is neither revoked nor expired."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


_BY_HASH = (
    select(api_keys, takes_part().label("takes_part"))
    .join(volunteers, volunteers.c.id == api_keys.c.volunteer_id)
    .where(equals(api_keys.c.key_hash))
)
_BY_ID = select(api_keys).where(equals(api_keys.c.id))
_LOCKED = _BY_ID.with_for_update()
_SET = update(api_keys).where(equals(api_keys.c.id))


def add(conn: Connection, values: dict[str, object]) -> KeyRow:
    """Insert a key and return its row."""
    row = conn.execute(insert(api_keys).values(**values).returning(api_keys)).mappings().one()
    return KeyRow(**row)


def by_hash(conn: Connection, key_hash: str) -> tuple[KeyRow, bool] | None:
    """Return a key, and whether its account may send requests; None for an unknown key."""
    row = conn.execute(_BY_HASH, {"where_key_hash": key_hash}).mappings().first()
    if row is None:
        return None
    key = KeyRow(**{name: row[name] for name in KeyRow.__struct_fields__})
    return key, bool(row["takes_part"])


def existing(conn: Connection, key_id: int, *, lock: bool = False) -> KeyRow:
    """Return a key; `lock` locks it until the transaction ends. Raises NotFound."""
    row = conn.execute(_LOCKED if lock else _BY_ID, {"where_id": key_id}).mappings().first()
    if row is None:
        raise NotFound(f"there is no key {key_id}")
    return KeyRow(**row)


def of(conn: Connection, volunteer_id: str) -> list[KeyRow]:
    """Return every key of an account, oldest first."""
    query = select(api_keys).where(api_keys.c.volunteer_id == volunteer_id).order_by(api_keys.c.id)
    return [KeyRow(**row) for row in conn.execute(query).mappings()]


def made_since(conn: Connection, volunteer_id: str, at: float) -> int:
    """Return how many keys an account made from `at` on, including revoked ones."""
    c = api_keys.c
    query = select(func.count()).where(c.volunteer_id == volunteer_id, c.created_at >= at)
    return int(conn.execute(query).scalar_one())


def revoke(conn: Connection, key_id: int, now: float) -> None:
    """Revoke a key."""
    conn.execute(_SET, {"where_id": key_id, "revoked_at": now})


def charge(conn: Connection, key_id: int, cost_micro: int) -> None:
    """Add a cost to the spending of a key."""
    spent_micro = api_keys.c.spent_micro + cost_micro
    conn.execute(_SET.values(spent_micro=spent_micro), {"where_id": key_id})


def has_contributed(conn: Connection, volunteer_id: str) -> bool:
    """Return True if a contribution of an account was merged, or accepted and is never merged."""
    c = contributions.c
    done = (c.state == "merged") | ((c.state == "accepted") & c.kind.not_in(UPDATES))
    query = select(c.id).where(c.volunteer_id == volunteer_id, done).limit(1)
    return conn.execute(query).first() is not None
