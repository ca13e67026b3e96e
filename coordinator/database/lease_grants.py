"""Leases: assignments are written as leased tasks, by one statement for reissued tasks and one for
new ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.types import TypeEngine

from coordinator.database.engine.bulk_statements import BulkStatement
from coordinator.database.tables.tasks import failures, tasks
from coordinator.database.tasks import TaskRow, rows_of
from coordinator.rules.dispatch import Assignment
from coordinator.rules.eligibility import Waiter
from coordinator.rules.task_size import task_seed
from shared.errors import Conflict
from shared.protocol.limits import RENEW_S


class NewLease(msgspec.Struct, frozen=True, kw_only=True):
    """Assignment of a lease, with the other values of its row."""

    assignment: Assignment
    waiter: Waiter
    kind: str
    update_kind: str
    part_steps: int
    batch_size: int
    options: str
    run_seed: int


def take(conn: sa.Connection, items: Sequence[NewLease], now: float) -> list[TaskRow]:
    """Write assignments as leases; return their rows in the order of `items`. Raises Conflict if
    another coordinator took one of the tasks.
    """
    again = [item for item in items if item.assignment.task_id is not None]
    fresh = [item for item in items if item.assignment.task_id is None]
    by_claim = {row.claim_id: row for row in _reissue(conn, again, now) + _insert(conn, fresh, now)}
    if len(by_claim) != len(items):
        raise Conflict("the tasks have just been taken by another coordinator; claim again")
    return [by_claim[item.waiter.claim_id] for item in items]


def _reissued(lines: sa.CTE) -> sa.ClauseElement:
    now = sa.bindparam("now", type_=sa.Double)
    return (
        sa.update(tasks)
        .where(tasks.c.id == lines.c.id, tasks.c.state == "todo")
        .values(
            state="doing",
            attempt=tasks.c.attempt + 1,
            claim_id=lines.c.claim_id,
            worker_id=lines.c.worker_id,
            volunteer_id=lines.c.volunteer_id,
            device=lines.c.device,
            flops=lines.c.flops,
            stop=lines.c.stop,
            steps=lines.c.steps,
            price_micro=lines.c.price_micro,
            update_kind=lines.c.update_kind,
            part_steps=lines.c.part_steps,
            claimed_at=now,
            begun_at=None,
            base_version=None,
            renew_by=now + RENEW_S,
            finish_by=now + lines.c.finish_in_s,
            finish_limit=now + lines.c.finish_in_s * 2.0,
            returned=False,
        )
        .returning(*tasks.c)
    )


_REISSUE = BulkStatement(
    "given",
    {
        "id": sa.BigInteger(),
        "claim_id": sa.String(),
        "worker_id": sa.String(),
        "volunteer_id": sa.String(),
        "device": sa.String(),
        "flops": sa.Double(),
        "stop": sa.BigInteger(),
        "steps": sa.Integer(),
        "price_micro": sa.BigInteger(),
        "update_kind": sa.String(),
        "part_steps": sa.Integer(),
        "finish_in_s": sa.Double(),
    },
    _reissued,
    blank=(-1, "", "", "", "", 0.0, 0, 0, 0, "", 0, 0.0),
)


def _reissue(conn: sa.Connection, items: Sequence[NewLease], now: float) -> list[TaskRow]:
    if not items:
        return []
    for item in items:
        if item.assignment.rest_stop > item.assignment.stop:
            _split(conn, item)
    result = _REISSUE.execute(conn, [_reissue_line(item) for item in items], now=now)
    return rows_of(result)


def _reissue_line(item: NewLease) -> tuple[object, ...]:
    assignment, waiter = item.assignment, item.waiter
    return (
        assignment.task_id,
        waiter.claim_id,
        waiter.worker_id,
        waiter.volunteer_id,
        waiter.device,
        waiter.flops,
        assignment.stop,
        assignment.steps,
        assignment.price_micro,
        item.update_kind,
        item.part_steps,
        assignment.finish_in_s,
    )


def _split(conn: sa.Connection, item: NewLease) -> None:
    """Store the second part of a split task as a new task, with the failures counted so far.

    The claim of that task sets its steps and price, as for every task of a pass.
    """
    assignment = item.assignment
    of_task = sa.select(tasks).where(tasks.c.id == assignment.task_id)
    task = conn.execute(of_task).mappings().one()
    rest = {name: value for name, value in task.items() if name != "id"} | {
        "start": assignment.stop,
        "stop": assignment.rest_stop,
        "seed": task_seed(item.run_seed, assignment.pass_no, assignment.stop),
        "worker_id": None,
        "volunteer_id": None,
        "returned": False,
        "begun_at": None,
        "base_version": None,
    }
    task_id = conn.execute(sa.insert(tasks).values(**rest).returning(tasks.c.id)).scalar_one()
    c = failures.c
    copies = sa.select(task_id + 0 * c.task_id, c.attempt, c.worker_id, c.kind, c.message, c.at)
    names = ["task_id", "attempt", "worker_id", "kind", "message", "at"]
    copies = copies.where(c.task_id == assignment.task_id)
    conn.execute(sa.insert(failures).from_select(names, copies))


def _new(lines: sa.CTE) -> sa.ClauseElement:
    now = sa.bindparam("now", type_=sa.Double)
    filled: dict[str, Any] = {name: lines.c[name] for name in _FRESH if name != "finish_in_s"} | {
        "state": sa.literal("doing"),
        "attempt": sa.literal(1),
        "claimed_at": now,
        "renew_by": now + RENEW_S,
        "finish_by": now + lines.c.finish_in_s,
        "finish_limit": now + lines.c.finish_in_s * 2.0,
        "returned": sa.literal(False),
        "failures": sa.literal(0),
        "timeouts": sa.literal(0),
    }
    source = sa.select(*filled.values()).where(lines.c.stop > lines.c.start)
    return sa.insert(tasks).from_select(list(filled), source).returning(*tasks.c)


_FRESH: dict[str, TypeEngine[Any]] = {
    "run_id": sa.BigInteger(),
    "kind": sa.String(),
    "pass_no": sa.Integer(),
    "start": sa.BigInteger(),
    "stop": sa.BigInteger(),
    "seed": sa.BigInteger(),
    "steps": sa.Integer(),
    "batch_size": sa.Integer(),
    "price_micro": sa.BigInteger(),
    "options": sa.String(),
    "update_kind": sa.String(),
    "part_steps": sa.Integer(),
    "claim_id": sa.String(),
    "worker_id": sa.String(),
    "volunteer_id": sa.String(),
    "device": sa.String(),
    "flops": sa.Double(),
    "home": sa.String(),
    "finish_in_s": sa.Double(),
}
_INSERT = BulkStatement(
    "given",
    _FRESH,
    _new,
    blank=(0, "", 0, 0, 0, 0, 0, 0, 0, "", "", 0, "", "", "", "", 0.0, "", 0.0),
)


def _insert(conn: sa.Connection, items: Sequence[NewLease], now: float) -> list[TaskRow]:
    if not items:
        return []
    result = _INSERT.execute(conn, [_new_line(item) for item in items], now=now)
    return rows_of(result)


def _new_line(item: NewLease) -> tuple[object, ...]:
    assignment, waiter = item.assignment, item.waiter
    return (
        assignment.run_id,
        item.kind,
        assignment.pass_no,
        assignment.start,
        assignment.stop,
        assignment.seed,
        assignment.steps,
        item.batch_size,
        assignment.price_micro,
        item.options,
        item.update_kind,
        item.part_steps,
        waiter.claim_id,
        waiter.worker_id,
        waiter.volunteer_id,
        waiter.device,
        waiter.flops,
        assignment.home,
        assignment.finish_in_s,
    )
