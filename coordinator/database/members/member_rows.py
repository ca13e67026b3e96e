"""Data that machines keep for a run: its numbers, and each machine's own pass over it.

A machine declares how many samples a pass has, and a random mark of its data (`edition`). Another
number or mark means other data: a new pass begins, and no task of an earlier pass is leased again
(`tasks.of_present_data`).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import sqlalchemy as sa

from coordinator.database import tasks
from coordinator.database.engine.statements import among, deletion, equals
from coordinator.database.tables.accounts import volunteers, workers
from coordinator.database.tables.contributions import contributions
from coordinator.database.tables.runs import members
from coordinator.database.tables.versions import heldout_sums
from coordinator.database.volunteers import takes_part
from shared.protocol.members import MemberData

_M = members.c


class MemberRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `members`; see tables/runs.py."""

    run_id: int
    worker_id: str
    volunteer_id: str
    samples: int
    items: int
    heldout: int
    edition: str
    pass_no: int
    cursor: int
    first_pass: int
    declared_at: float | None

    @property
    def numbers(self) -> MemberData:
        return MemberData(
            samples=self.samples, items=self.items, heldout=self.heldout, edition=self.edition
        )


class MemberCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Members of a run, and the sizes of their data together."""

    members: int
    machines: int
    samples: int
    items: int
    heldout: int


_ONE = sa.select(members).where(equals(_M.run_id), equals(_M.worker_id))
_OF_WORKERS = sa.select(members).where(
    among(_M.run_id, "runs"), among(_M.worker_id, "workers"), _M.declared_at.is_not(None)
)
_OF_RUN = (
    sa.select(members)
    .join_from(members, workers, workers.c.id == _M.worker_id)
    .join(volunteers, volunteers.c.id == _M.volunteer_id)
    .where(equals(_M.run_id), _M.declared_at.is_not(None), takes_part())
    .where(workers.c.revoked_at.is_(None), workers.c.state != "left")
)
_SIZES = sa.select(_M.worker_id, _M.samples).where(
    equals(_M.run_id), among(_M.worker_id, "workers")
)
_SET = sa.update(members).where(equals(_M.run_id), equals(_M.worker_id))
_WITHDRAW = sa.update(members).where(equals(_M.volunteer_id)).values(declared_at=None)


def row_of(conn: sa.Connection, run_id: int, worker_id: str) -> MemberRow | None:
    """Return the data of a machine for a run, withdrawn data too; None if it never had any."""
    row = (
        conn.execute(_ONE, {"where_run_id": run_id, "where_worker_id": worker_id})
        .mappings()
        .first()
    )
    return None if row is None else MemberRow(**row)


def of_workers(
    conn: sa.Connection, run_ids: Sequence[int], worker_ids: Sequence[str]
) -> dict[tuple[int, str], MemberRow]:
    """Return the declared data of these machines for these runs, by run and machine."""
    if not run_ids:
        return {}
    rows = conn.execute(_OF_WORKERS, {"runs": run_ids, "workers": worker_ids}).mappings()
    return {(row["run_id"], row["worker_id"]): MemberRow(**row) for row in rows}


def of_run(conn: sa.Connection, run_id: int) -> list[MemberRow]:
    """Return the declared data of a run: of live machines whose account takes part."""
    rows = conn.execute(_OF_RUN, {"where_run_id": run_id}).mappings()
    return [MemberRow(**row) for row in rows]


def sizes(conn: sa.Connection, run_id: int, worker_ids: Sequence[str]) -> dict[str, int]:
    """Return the samples of the data of these machines for a run, withdrawn data too."""
    values = {"where_run_id": run_id, "workers": sorted({*worker_ids})}
    return {worker_id: int(samples) for worker_id, samples in conn.execute(_SIZES, values)}


def counts(rows: Sequence[MemberRow]) -> MemberCounts:
    """Return how many members these machines belong to, and the sums of their data."""
    return MemberCounts(
        members=len({row.volunteer_id for row in rows}),
        machines=len(rows),
        samples=sum(row.samples for row in rows),
        items=sum(row.items for row in rows),
        heldout=sum(row.heldout for row in rows),
    )


def declare(
    conn: sa.Connection, run_id: int, owner: tuple[str, str], data: MemberData, now: float
) -> None:
    """Store the numbers of a machine's data; the run's row is locked. `owner` is the volunteer and
    the machine. Another edition, or another number of samples, begins a new pass.
    """
    volunteer_id, worker_id = owner
    row = row_of(conn, run_id, worker_id)
    numbers: dict[str, object] = {
        "samples": data.samples,
        "items": data.items,
        "heldout": data.heldout,
        "edition": data.edition,
        "declared_at": now,
    }
    if row is None:
        first = {"pass_no": 1, "cursor": 0, "first_pass": 1, "volunteer_id": volunteer_id}
        key = {"run_id": run_id, "worker_id": worker_id}
        conn.execute(sa.insert(members).values(**key, **first, **numbers))
        return
    key = {"where_run_id": run_id, "where_worker_id": worker_id}
    same = (row.edition, row.samples) == (data.edition, data.samples)
    if row.declared_at is None or not same:
        next_pass = row.pass_no + 1
        numbers |= {"pass_no": next_pass, "cursor": 0, "first_pass": next_pass}
    conn.execute(_SET, key | numbers)
    tasks.cancel_absent(conn, now)


def withdraw(conn: sa.Connection, run_id: int, worker_id: str, now: float) -> None:
    """Withdraw the data of a machine; the run's row is locked. Its waiting tasks are cancelled."""
    conn.execute(_SET, {"where_run_id": run_id, "where_worker_id": worker_id, "declared_at": None})
    tasks.cancel_absent(conn, now)


def withdraw_all(conn: sa.Connection, volunteer_id: str, now: float) -> None:
    """Withdraw the data of all machines of an account, and cancel their waiting tasks."""
    conn.execute(_WITHDRAW, {"where_volunteer_id": volunteer_id})
    tasks.cancel_absent(conn, now)


def forget(conn: sa.Connection, volunteer_id: str, now: float) -> None:
    """Withdraw the data of a forgotten account, and delete the losses on them; `delete_forgotten`
    deletes the sizes once no update of the account needs them.
    """
    withdraw_all(conn, volunteer_id, now)
    of_account = heldout_sums.c.volunteer_id == volunteer_id
    conn.execute(deletion(heldout_sums, "asked").where(of_account))


def delete_forgotten(conn: sa.Connection) -> None:
    """Delete the sizes of the data of forgotten accounts that have no update left to merge."""
    accounts = sa.select(volunteers.c.id).where(volunteers.c.state == "forgotten")
    undecided = contributions.c.state.in_(("received", "checking", "accepted"))
    has_updates = sa.exists().where(contributions.c.volunteer_id == _M.volunteer_id, undecided)
    conn.execute(deletion(members, "asked").where(_M.volunteer_id.in_(accounts), ~has_updates))


def set_cursor(conn: sa.Connection, run_id: int, worker_id: str, pass_no: int, cursor: int) -> None:
    """Set the pass of a machine's data, and its first position that no task has yet; the run's row
    is locked.
    """
    key = {"where_run_id": run_id, "where_worker_id": worker_id}
    conn.execute(_SET, key | {"pass_no": pass_no, "cursor": cursor})
