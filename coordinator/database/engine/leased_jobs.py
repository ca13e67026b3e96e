"""Leased jobs: rows of a table that one process at a time works on.

Each row has the columns `state`, `attempt`, `owner` and `lease_until`. A lease counts the attempt
up, and every later change of the job names its attempt: a process that was silent for longer than
its lease cannot change a job that another process has taken over. `lease_until` of a free job is
the end of a pause: nobody leases it before.

Merges, their parts, evaluations and recomputes are such jobs. Two kinds of rows resemble leased
jobs, but are not:

- Tasks (`database/lease_grants`). Their lease goes to a machine elsewhere: it has one deadline for
  heartbeats and one for the work, is bound to a version, and many are handed out in one statement.
- Answers at stake (`ledger/answer_pay`) and requests (`inference/request_rows`). Only the process
  that answers can finish, since prompts are in no table: no other process takes such a row over,
  and the rows of a silent process are ended.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from sqlalchemy import BindParameter, ColumnElement, Connection, Select, Table, and_, update

from coordinator.database.engine.statements import equals, one_of


class LeasedJob(Protocol):
    """Row of a leased job; it has the columns of its table's primary key too."""

    @property
    def attempt(self) -> int: ...


J = TypeVar("J", bound=LeasedJob)


class LeasedJobs(Generic[J]):
    """Leased jobs of one table, with its names for the state of a free and of a leased job."""

    def __init__(self, table: Table, row: type[J], *, free: str, leased: str) -> None:
        self._table = table
        self._columns = table.c
        self._row = row
        self._keys = tuple(column.key for column in table.primary_key)
        self._free, self._leased = free, leased
        self._open = free, leased
        here = [equals(column) for column in table.primary_key]
        self._lease = update(table).where(*here)
        self._change = update(table).where(*here, equals(table.c.attempt), table.c.state == leased)
        self._all = update(table).where(table.c.state == leased)

    def ready(self, now: float | BindParameter[float]) -> ColumnElement[bool]:
        """Return the condition of jobs that may be leased: free, or left by a silent owner."""
        return and_(one_of(self._columns.state, self._open), self._columns.lease_until <= now)

    def take(
        self,
        conn: Connection,
        candidates: Select[*tuple[object, ...]],
        owner: str,
        until: float,
        **values: object,
    ) -> J | None:
        """Lease the first of `candidates`, a query of the table's rows, and set `values` in it;
        return None if the query has no free row. A job that another transaction has locked is
        waited for: that transaction may leave it free, and announces nothing then.
        """
        query = candidates.limit(1).with_for_update(of=self._table)
        row = conn.execute(query).mappings().first()
        if row is None:
            return None
        lease = {"state": self._leased, "owner": owner, "lease_until": until}
        lease |= {"attempt": row["attempt"] + 1} | values
        conn.execute(self._lease, {f"where_{key}": row[key] for key in self._keys} | lease)
        return self._row(**{**row, **lease})

    def change(self, conn: Connection, job: J, **values: object) -> bool:
        """Change a leased job; return False if another process took it over, or it has ended."""
        key = {f"where_{name}": getattr(job, name) for name in (*self._keys, "attempt")}
        return conn.execute(self._change, key | values).rowcount == 1

    def renew(self, conn: Connection, job: J, until: float) -> bool:
        """Lengthen a job's lease; return False as `change` does."""
        return self.change(conn, job, lease_until=until)

    def release(self, conn: Connection, job: J, after: float = 0.0, **values: object) -> bool:
        """Free a leased job for any process after an instant; return False as `change` does."""
        free = {"state": self._free, "owner": "", "lease_until": after}
        return self.change(conn, job, **free, **values)

    def release_all(self, conn: Connection, now: float, **values: object) -> None:
        """Free every leased job. Only for a server that is alone on the database."""
        free = {"state": self._free, "owner": "", "lease_until": now}
        conn.execute(self._all.values(**free, **values))
