"""Names of the blobs that a sweep may delete: blobs announced before they are written, and blobs
let go because nothing uses them any more.

    announced ── registered ── let go ── old enough: deleted
        └─────────────────────────────────────┘

A sweeper holds the names that it deletes for at most SWEEPER_S: it stops before, or has died. A
blob whose name is not in this table is never deleted, even if nothing refers to it. An announcement
keeps its serial until a sweep may have deleted the blob: while the serial is the same, the bytes
that were written after the announcement are there.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from coordinator.database.engine.statements import (
    Incoming,
    among,
    deletion,
    insert_new,
    upsert,
)
from coordinator.database.tables.datasets import blobs, unreferenced_blobs
from shared.errors import Unavailable

SWEEPER_S = 120.0  # a sweeper that holds a name for longer has died

_U = unreferenced_blobs.c
_OF = among(_U.sha256, "names")
_REFERENCED = (
    deletion(unreferenced_blobs, "moved").where(_OF).returning(_U.sha256, _U.sweeper, _U.serial)
)
_OLD = sa.or_(
    _U.since < sa.bindparam("before"),
    sa.and_(_U.sweeper.is_not(None), _U.since < sa.bindparam("died")),
)
_DUE = sa.select(_U.sha256).where(_OLD).order_by(_U.since)
_SERIALS = sa.select(_U.sha256, _U.serial).where(_OF, _U.sweeper.is_(None))
_LOCKED = _SERIALS.with_for_update()
_DELETED = deletion(unreferenced_blobs, "settled").where(_OF, _U.sweeper == sa.bindparam("owner"))
_RELEASE = (
    sa.update(unreferenced_blobs).where(_U.sweeper == sa.bindparam("owner")).values(sweeper=None)
)
_HOLD = (
    sa.update(unreferenced_blobs)
    .where(_OF, _U.sweeper.is_(None), _U.sha256.not_in(sa.select(blobs.c.sha256)))
    .values(since=sa.bindparam("now"), sweeper=sa.bindparam("owner"))
    .returning(_U.sha256)
)
_TAKE = (
    sa.update(unreferenced_blobs)
    .where(_OF, _OLD)
    .values(since=sa.bindparam("now"), sweeper=sa.bindparam("owner"))
    .returning(_U.sha256)
)


def _announcement(table: sa.Table, incoming: Incoming) -> dict[str, sa.ColumnElement[Any]]:
    """Return the changes to a name that was announced before: no change while a sweeper lives."""
    died = _U.sweeper.is_not(None) & (_U.since < incoming.since - SWEEPER_S)
    later = (_U.sweeper.is_(None) | died) & (incoming.since > _U.since)
    return {
        "since": sa.case((later, incoming.since), else_=_U.since),
        "sweeper": sa.case((died, sa.null()), else_=_U.sweeper),
        "serial": sa.case((died, incoming.serial), else_=_U.serial),
    }


def _row(name: str, since: float) -> dict[str, str | float]:
    return {"sha256": name, "since": since, "serial": secrets.token_hex(8)}


def announce(conn: sa.Connection, names: Collection[str], since: float) -> dict[str, str]:
    """Announce blobs that are about to be written; return the serials of the announcements by name;
    blobs that a sweep is deleting are left out.
    """
    if not names:
        return {}
    rows = [_row(name, since) for name in sorted(names)]  # in one order: no deadlock
    conn.execute(upsert(conn, unreferenced_blobs, _announcement), rows)
    return dict(conn.execute(_SERIALS, {"names": sorted(names)}).all())


def being_deleted() -> Unavailable:
    return Unavailable("an old copy of these bytes is being deleted: try again", retry_after_s=5.0)


def demand(conn: sa.Connection, serials: Mapping[str, str]) -> None:
    """Raise Unavailable unless every announcement still has its serial, given by name: otherwise a
    sweep deleted a blob. A row inserted in this transaction that refers to the blobs keeps them
    from then on.
    """
    if serials:
        rows = conn.execute(_LOCKED, {"names": sorted(serials)}).all()
        if dict(rows) != dict(serials):
            raise being_deleted()


def reference(
    conn: sa.Connection,
    names: Sequence[str],
    new: Collection[str],
    serials: Mapping[str, str] | None,
) -> None:
    """Take registered blobs out of the sweep's reach.

    Raises Unavailable for a blob that is being deleted, and for a `new` blob whose announcement no
    longer has its serial in `serials`: a sweep deleted the blob before this transaction. `serials`
    is None if rows have referred to the blobs since they were announced: then any announcement
    counts.
    """
    if not names:
        return
    rows = conn.execute(_REFERENCED, {"names": list(names)}).all()
    current = {row.sha256: row.serial for row in rows if row.sweeper is None}
    proofs = current if serials is None else serials
    are_there = all(name in current and proofs.get(name) == current[name] for name in new)
    if len(current) < len(rows) or not are_there:
        raise being_deleted()


def let_go(conn: sa.Connection, used: Collection[str], before: float) -> int:
    """Let go of the registered blobs that nothing uses and that are older than an instant; return
    the number of blobs that stay.
    """
    registered = dict(conn.execute(sa.select(blobs.c.sha256, blobs.c.created_at)).all())
    free = [name for name, at in sorted(registered.items()) if at < before and name not in used]
    if free:
        rows = [_row(name, registered[name]) for name in free]
        conn.execute(insert_new(conn, unreferenced_blobs, "sha256"), rows)
        conn.execute(
            deletion(blobs, "let go").where(among(blobs.c.sha256, "names")), {"names": free}
        )
    return len(registered) - len(free)


def take(
    conn: sa.Connection, used: Collection[str], owner: str, times: tuple[float, float], most: int
) -> list[str]:
    """Take the oldest unused names for deletion by one sweeper, at most `most`. `times` are the
    instant before which they must be announced or let go, and now.
    """
    before, now = times
    names_due = [
        name
        for name in conn.execute(_DUE, {"before": before, "died": now - SWEEPER_S}).scalars()
        if name not in used
    ]
    values = {"names": names_due[:most], "now": now, "owner": owner}
    values |= {"before": before, "died": now - SWEEPER_S}
    return sorted(conn.execute(_TAKE, values).scalars()) if names_due else []


def hold(conn: sa.Connection, names: Collection[str], owner: str, now: float) -> list[str]:
    """Hold blobs for deletion in the transaction that takes the last reference to them away; return
    the held blobs, which are announced and not registered.
    """
    values = {"names": sorted(names), "now": now, "owner": owner}
    return sorted(conn.execute(_HOLD, values).scalars()) if names else []


def end_sweep(conn: sa.Connection, owner: str, deleted: Sequence[str]) -> None:
    """Forget the names whose blobs a sweeper has deleted; release the other names that it holds."""
    if deleted:
        conn.execute(_DELETED, {"names": list(deleted), "owner": owner})
    conn.execute(_RELEASE, {"owner": owner})


def names(conn: sa.Connection) -> set[str]:
    return set(conn.execute(sa.select(_U.sha256)).scalars())
