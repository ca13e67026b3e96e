"""Audits among the tasks that wait, and who of those that ask may have one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from coordinator.database import audits
from coordinator.rules.audits import AUDIT, AccountMarks, Auditor
from coordinator.rules.checks import ComputeDevice, device_kind
from coordinator.rules.fit import Todo, Waiter

if TYPE_CHECKING:
    from sqlalchemy import Connection


def matched(
    conn: Connection, todo: Sequence[Todo], waiters: Sequence[Waiter], now: float
) -> tuple[list[Todo], list[Waiter]]:
    """Return the tasks with the terms of those that are audits, and the workers with what makes
    them auditors; nothing is read where no audit waits.
    """
    ids = [task.id for task in todo if task.beside == AUDIT]
    able = {waiter.volunteer_id for waiter in waiters if waiter.audits}
    if not ids or not able:
        return list(todo), list(waiters)
    terms, known = audits.waiting(conn, ids, now), audits.auditors(conn, able)
    tasks = [msgspec.structs.replace(task, audit=terms.get(task.id)) for task in todo]
    return tasks, [_able(waiter, known) for waiter in waiters]


def _able(waiter: Waiter, known: dict[str, tuple[AccountMarks, int, int]]) -> Waiter:
    found = known.get(waiter.volunteer_id)
    if found is None or not waiter.audits:
        return waiter
    person, accepted, had = found
    machine = ComputeDevice(kind=device_kind(waiter.device), model=waiter.model)
    auditor = Auditor(person=person, machine=machine, accepted=accepted, audits=had)
    return msgspec.structs.replace(waiter, auditor=auditor)
