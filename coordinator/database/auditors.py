"""Auditors of the organiser's own: machines that do tasks again, and when each was seen."""

from __future__ import annotations

import msgspec
from sqlalchemy import Connection, delete, func, insert, select, update

from coordinator.database.engine.statements import its
from coordinator.database.tables.trust import auditors
from coordinator.rules.checks import Machine, is_served

FORGOTTEN_S = 30 * 86_400.0


class AuditorRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `auditors`."""

    name: str
    kind: str
    model: str
    seen_at: float


_A = auditors.c
_ALL = select(auditors).order_by(_A.seen_at.desc(), _A.name)
_SEEN = update(auditors).where(its(_A.name))
_NEWEST = select(_A.kind, func.max(_A.seen_at)).group_by(_A.kind)


def see(conn: Connection, name: str, machine: Machine, now: float) -> bool:
    """Note that an auditor is at work; True if it was not known. Those long gone are forgotten."""
    told = {"kind": machine.kind, "model": machine.model, "seen_at": now}
    if conn.execute(_SEEN.values(**told), {"its_name": name}).rowcount:
        return False
    conn.execute(delete(auditors).where(_A.seen_at < now - FORGOTTEN_S))
    conn.execute(insert(auditors).values(name=name, **told))
    return True


def listing(conn: Connection) -> list[AuditorRow]:
    """Return every auditor, the one seen last first."""
    return [AuditorRow(**row) for row in conn.execute(_ALL).mappings()]


def served(conn: Connection, now: float) -> frozenset[str]:
    """Return the classes of devices whose tasks are left to auditors."""
    return frozenset(kind for kind, seen in conn.execute(_NEWEST) if is_served(kind, seen, now))
