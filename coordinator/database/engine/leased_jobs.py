"""Leased jobs: rows of a table that one process at a time works on.

Each row has the columns `state`, `attempt`, `owner` and `lease_until`. A lease counts the attempt
up, and every later change of the job names its attempt: a process that was silent for longer than
its lease cannot change a job that another process has taken over.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from sqlalchemy import ColumnElement, Connection, Select, Table, and_, or_, update

from coordinator.database.engine.statements import its


class LeasedJob(Protocol):
    """Row of a leased job; it has the columns of its table's primary key too."""

    @property
    def attempt(self) -> int: ...


J = TypeVar("J", bound=LeasedJob)


class LeasedJobs(Generic[J]):
    """Leased jobs of one table, with the states of a job that is free and of one that is leased."""

    def __init__(self, table: Table, row: type[J], *, free: str, leased: str) -> None:
        self._columns = table.c
        self._row = row
        self._keys = tuple(column.key for column in table.primary_key)
        self._free, self._leased = free, leased
        here = [its(column) for column in table.primary_key]
        self._lease = update(table).where(*here)
        self._change = update(table).where(*here, its(table.c.attempt), table.c.state == leased)
        self._all = update(table).where(table.c.state == leased)

    def ready(self, now: float) -> ColumnElement[bool]:
        """Return the condition of jobs that may be leased: free, or left by a silent owner."""
        c = self._columns
        lapsed = and_(c.state == self._leased, c.lease_until <= now)
        return and_(c.state.in_((self._free, self._leased)), or_(c.state == self._free, lapsed))

    def take(
        self, conn: Connection, candidates: Select[*tuple[object, ...]], owner: str, until: float
    ) -> J | None:
        """Lease the first of `candidates`, which select the table's rows; None without one. Jobs
        that another transaction leases meanwhile are passed over.
        """
        query = candidates.limit(1).with_for_update(skip_locked=True)
        row = conn.execute(query).mappings().first()
        if row is None:
            return None
        lease = {"state": self._leased, "owner": owner, "lease_until": until}
        lease |= {"attempt": row["attempt"] + 1}
        conn.execute(self._lease, {f"its_{key}": row[key] for key in self._keys} | lease)
        return self._row(**{**row, **lease})

    def change(self, conn: Connection, job: J, **values: object) -> bool:
        """Change a leased job; return False if another process took it over, or it has ended."""
        key = {f"its_{name}": getattr(job, name) for name in (*self._keys, "attempt")}
        return conn.execute(self._change, key | values).rowcount == 1

    def renew(self, conn: Connection, job: J, until: float) -> bool:
        """Lengthen a job's lease; return False as `change` does."""
        return self.change(conn, job, lease_until=until)

    def release(self, conn: Connection, job: J) -> bool:
        """Free a leased job for any process; return False as `change` does."""
        return self.change(conn, job, state=self._free)

    def end_all(self, conn: Connection, **values: object) -> None:
        """Change every leased job. Only for a server that is alone on the database."""
        conn.execute(self._all.values(**values))
