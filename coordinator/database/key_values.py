"""Single values of the installation, by name."""

from __future__ import annotations

from sqlalchemy import Connection, select, update

from coordinator.database.engine.statements import deletion, equals, insert_new
from coordinator.database.tables.record import meta
from shared.files.deletions import Reason

KEY = "key"  # fingerprint of the key that signs for this database
STORE = "store"  # random mark, which the blob store of this database carries, too
STORE_MARKED = "store.marked"  # address of the blob store that carries the mark
STORE_TURNS = "store.turns"  # newest turns at the blob store, JSON
STORE_TROUBLE = "store.trouble"  # why the blob store is not this database's alone; "" = it is
LOST = "lost"  # what the database lost since its last signed statement; "" = nothing
TOKENS = "tokens"  # number of times that the tokens were replaced
INVITE = "invite"  # counts the server's invites; the join link has the newest
RESTORED = "restored"  # signed statement of the last restore, JSON
ADDRESS = "address"  # address of the last server, for join links
SETTINGS = "settings"  # settings of the server's last start, JSON
OPEN = "open"  # "yes" if the last server admitted strangers
ANNOUNCEMENTS = "announcements"  # JSON
ALERTS = "alerts"  # open alerts, and those still to be delivered, JSON
BACKUP = "backup"  # time of the newest backup, UTC epoch seconds
BACKUP_ROOM = "backup.room"  # why backups have no room, or will soon have none; "" = there is room
ACCOUNTS = "accounts"  # stamp, renewed with each change of an account that servers must notice


_GET = select(meta.c.value).where(equals(meta.c.key))
_LOCKED = _GET.with_for_update()


def get(conn: Connection, key: str, *, lock: bool = False) -> str | None:
    """Return a value, None for a missing key; `lock` locks it until the transaction ends."""
    return conn.execute(_LOCKED if lock else _GET, {"where_key": key}).scalar()


def put_new(conn: Connection, key: str, value: str) -> bool:
    """Write a value under a new name; return False if the name has a value."""
    fresh = insert_new(conn, meta, "key", "key").values(key=key, value=value)
    return conn.execute(fresh).first() is not None


def locked(conn: Connection, key: str) -> str:
    """Return a value, locked until the transaction ends; a missing value is inserted as ""."""
    conn.execute(insert_new(conn, meta, "key").values(key=key, value=""))
    query = select(meta.c.value).where(meta.c.key == key).with_for_update()
    return str(conn.execute(query).scalar_one())


def put(conn: Connection, key: str, value: str) -> None:
    if not put_new(conn, key, value):
        conn.execute(update(meta).where(meta.c.key == key).values(value=value))


def delete_key(conn: Connection, key: str, reason: Reason) -> None:
    conn.execute(deletion(meta, reason).where(meta.c.key == key))
