"""List of tasks for the organiser, and requeueing of the failed ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from coordinator.database import record, runs, tasks
from coordinator.database.tasks import TaskLine
from shared.clock import Clock

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.database.engine.open_database import Database
    from coordinator.signals import Signals

AUDITED_MAX = 300  # task numbers in one line of the record


class TaskList:
    """Lists open and failed tasks, and requeues failed ones."""

    def __init__(self, db: Database, clock: Clock, signals: Signals) -> None:
        self._db = db
        self._clock = clock
        self._signals = signals

    async def lines(self, run: str | None = None, *, failed: bool = False) -> list[TaskLine]:
        """Return the waiting, leased and discarded tasks of a run or of all runs; with `failed`
        only the discarded tasks. Raises NotFound.
        """
        states = ("discarded",) if failed else ("todo", "doing", "discarded")

        def read(conn: Connection) -> list[TaskLine]:
            of = runs.by_name(conn, run).id if run is not None else None
            return tasks.lines(conn, states, of)

        return await self._db.read(read)

    async def requeue(
        self, run: str | None = None, ids: Sequence[int] | None = None, reason: str = ""
    ) -> list[int]:
        """Requeue the discarded tasks of `ids`, of a run, or of all runs. Return their ids. Raises
        NotFound.
        """

        def put(conn: Connection) -> list[int]:
            of = runs.by_name(conn, run).id if run is not None else None
            requeued = tasks.requeue(conn, ids, of)
            if requeued:
                detail: dict[str, object] = {
                    "count": len(requeued),
                    "tasks": requeued[:AUDITED_MAX],
                }
                detail |= {"reason": reason} if reason else {}
                record.append(
                    conn, "organiser", "task.requeue", run or "", detail, self._clock.now()
                )
            return requeued

        back = await self._db.write(put)
        self._signals.notify("queue")
        return back
