"""Checkers: the organiser's own machines that make recomputes, anywhere.

    taken      held for ten minutes, or longer by renewing; a dead checker's hold expires
    reported   figures, judged by the rules of the server's own recomputes
    given back to other checkers; after two failures the server makes the recompute

A checker is trusted, since it has the organiser's token. It gets the inputs of a comparison,
computes all of it, and returns a few numbers.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from coordinator.checking.recompute_queue import Recomputes, RecomputeTask
from coordinator.database import recomputes, record
from coordinator.database.recomputes import CHECKER, RecomputeRow
from coordinator.platform import Platform, PlatformService
from coordinator.rules.draws import HOLD_S, ComputeDevice, Redone
from shared.errors import BadRequest, Conflict, NotFound, VolunteerError

if TYPE_CHECKING:
    from sqlalchemy import Connection


ENDED_MAX = 64  # recomputes in a row that may end without work
_HOLD = re.compile(r"[0-9a-f]{32}")
_KIND = re.compile(r"[a-z]{1,16}")


class CheckerOffer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a checker that asks for work; `task` is None if no recompute waits."""

    task: RecomputeTask | None


class CheckerOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Report of a checker. Without figures it gives the recompute back to other checkers."""

    found: Redone | None = None
    failed: bool = False
    seconds: Annotated[float, Meta(ge=0)] = 0.0


class CheckerVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a recompute; "" if it was given back and waits."""

    result: str
    message: str


class Checkers(PlatformService):
    """Hands recomputes to checkers and settles their reports."""

    def __init__(self, on: Platform, recomputes: Recomputes) -> None:
        super().__init__(on)
        self._recomputes = recomputes

    async def take(self, name: str, machine: ComputeDevice, hold: str) -> CheckerOffer:
        """Return a recompute, leased under the name `hold`; a repeated request gets the same
        recompute. Raises BadRequest, Conflict.
        """
        if not _HOLD.fullmatch(hold):
            raise BadRequest("a hold is named by 32 hexadecimal digits")
        if not _KIND.fullmatch(machine.kind):
            raise BadRequest(f'"{machine.kind[:40]}" is not a class of devices such as cpu or cuda')

        def taken(conn: Connection) -> RecomputeRow | None:
            now = self._clock.now()
            if recomputes.see_checker(conn, name, machine.kind, now):
                record.append(conn, "organiser", "checker.work", name, machine.kind, now)
            served = recomputes.served(conn, now)
            holder = recomputes.Holder.checker(hold, now)
            return recomputes.take_for_checker(conn, holder, machine.kind, served)

        for _ in range(ENDED_MAX):
            row = await self._db.write(taken)
            task = None if row is None else await self._task(row)
            # a recompute that ended without work is followed by the next recompute
            if row is None or task is not None:
                return CheckerOffer(task=task)
        raise Conflict("too many recomputes ended at once: ask again")

    async def _task(self, row: RecomputeRow) -> RecomputeTask | None:
        try:
            return await self._recomputes.prepare(row)
        # the server's own loop tries it after two failures, and postpones it with the reason
        except VolunteerError:
            await self._give_back(row, failed=True)
            return None

    async def renew(self, contribution: int, hold: str) -> bool:
        """Renew a checker's hold; return False if another checker has the recompute, or it is
        done.
        """

        def renew(conn: Connection) -> bool:
            row = recomputes.get(conn, contribution)
            if row is None or row.owner != CHECKER + hold:
                return False
            return recomputes.JOBS.renew(conn, row, self._clock.now() + HOLD_S)

        return await self._db.write(renew)

    async def report(
        self, contribution: int, hold: str, on: ComputeDevice, outcome: CheckerOutcome
    ) -> CheckerVerdict:
        """Settle a recompute by a checker's report, or give it back to other checkers. Raises
        Conflict if another process holds the recompute by now, NotFound for an unknown recompute.
        """
        row = await self._held(contribution, hold)
        if outcome.found is None:
            await self._give_back(row, failed=outcome.failed)
            return CheckerVerdict(result="", message="")
        if row.state != "done":
            task = await self._recomputes.prepare(row)
            await self._recomputes.judge(row, task.case, outcome.found, on, outcome.seconds)
        row = await self._held(contribution, hold)
        return CheckerVerdict(result=row.result, message=row.message)

    async def _give_back(self, row: RecomputeRow, *, failed: bool) -> None:
        tries = row.tries + int(failed)
        await self._db.write(partial(recomputes.JOBS.release, job=row, tries=tries))
        self._signals.notify("recomputes")

    async def _held(self, contribution: int, hold: str) -> RecomputeRow:
        row = await self._db.read(lambda conn: recomputes.get(conn, contribution))
        if row is None:
            raise NotFound(f"contribution {contribution} is not to be done again")
        if row.owner != CHECKER + hold:
            raise Conflict(
                f"the recompute of contribution {contribution} was not renewed in time and is"
                " another's by now"
            )
        return row
