"""Draws of answers: a volunteer's answer is compared with the model's own.

A request's settlement decides the draw and stores it in the database (`answer_pay`). Only
this process holds the prompt and the tokens: if it ends, its draws can no longer be compared.
The draws of one account are compared in order; several accounts are compared side by side.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Protocol

import msgspec
import structlog

from coordinator.accounts import suspension
from coordinator.database.ledger import answer_pay
from coordinator.rules.recompute_result import DRAWN_SHARE
from shared.errors import NotFound, Unavailable, VolunteerError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection

    from coordinator.database.engine.open_database import Database
    from coordinator.inference.answerers import AnswerPart
    from coordinator.inference.inference_engine import Generation
    from shared.clock import Clock

AT_ONCE = 8  # comparisons that run at once
KEPT_MAX = 10_000  # unsettled requests whose answers are kept; the oldest are dropped
WAITING_MAX = 8  # an account with so many waiting draws gets no prompts
SUSPENSION_REASON = "answers of its machine were not those of the model"

log = structlog.get_logger("answers")


class Comparer(Protocol):
    """Compares the tokens of an answer with the model's tokens; see `BuiltinEngine.compare`."""

    async def __call__(
        self, request: Generation, tokens: Sequence[int], *, ended: bool
    ) -> tuple[int, int]: ...


class AccountParts(msgspec.Struct, frozen=True):
    """Parts of a request computed by one account, each with the `Generation` that it answers."""

    request_id: str
    parts: list[tuple[Generation, AnswerPart]]


class AnswerDraws:
    """Keeps answers until they are settled, and compares the drawn ones."""

    def __init__(self, db: Database, clock: Clock) -> None:
        self._db = db
        self._clock = clock
        self.roll: Callable[[], float] = random.SystemRandom().random
        self._compare: Comparer | None = None
        self._kept: dict[str, dict[str, AccountParts]] = {}  # keyed by request and account
        # settled requests whose drawn answers are not queued yet, oldest first
        self._settled: dict[str, None] = {}
        self._queues: dict[str, deque[AccountParts]] = {}  # by account
        self._room = asyncio.Semaphore(AT_ONCE)
        # comparisons, keyed by account; "" is the key of the task that queues drawn answers
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def connect(self, compare: Comparer) -> None:
        """Set the function that compares the tokens of an answer with the model's tokens."""
        self._compare = compare

    @property
    def waiting(self) -> int:
        """Return the number of settled requests to look up, plus drawn answers to compare."""
        return len(self._settled) + sum(len(queue) for queue in self._queues.values())

    @property
    def busy(self) -> set[str]:
        """Return the accounts with so many waiting draws that they get no more prompts."""
        return {who for who, queue in self._queues.items() if len(queue) >= WAITING_MAX}

    def keep(self, request: Generation, part: AnswerPart) -> None:
        """Keep a machine's answer until its request is settled."""
        if part.tokens or part.finish == "stop":
            request_id, who = request.sequence.id.rpartition("-")[0], part.volunteer_id
            by_account = self._kept.setdefault(request_id, {})
            by_account.setdefault(who, AccountParts(request_id, [])).parts.append((request, part))
            while len(self._kept) > KEPT_MAX:
                del self._kept[next(iter(self._kept))]

    def note_settled(self, request_id: str, answered: Collection[str]) -> None:
        """Queue the drawn answers of a settled request for comparison; drop the other answers."""
        if answered or request_id in self._kept:
            self._settled[request_id] = None
            self.start_comparisons()

    def start_comparisons(self) -> None:
        """Start the waiting comparisons, and any that a failed read or write interrupted."""
        if self._settled:
            self._begin("", self._queue_drawn)
        for who in self._queues:
            self._begin(who, partial(self._compare_queue, who))

    async def close(self) -> None:
        """End the comparisons; another process records the waiting draws as not comparable."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, name: str, job: Callable[[], Coroutine[None, None, None]]) -> None:
        if name not in self._tasks:
            self._tasks[name] = asyncio.create_task(job())

    async def _queue_drawn(self) -> None:
        """Queue the drawn answers of settled requests, and a share of the unpaid answers."""
        try:
            while self._settled:
                request_id = next(iter(self._settled))
                states = await self._db.read(partial(answer_pay.states, request_id=request_id))
                self._settled.pop(request_id, None)
                by_account = self._kept.pop(request_id, {})
                drawn = {who for who, state in states.items() if state == "drawn"}
                drawn |= {
                    who for who in by_account if who not in states and self.roll() < DRAWN_SHARE
                }
                for who in sorted(drawn):
                    parts = by_account.get(who, AccountParts(request_id, []))
                    self._queues.setdefault(who, deque()).append(parts)
                self.start_comparisons()
        except VolunteerError as error:
            log.warning("draws are looked at later", error=error.message)
        finally:
            del self._tasks[""]

    async def _compare_queue(self, who: str) -> None:
        """Compare the queued answers of an account, oldest first."""
        queue = self._queues[who]
        try:
            while queue:
                async with self._room:
                    await self._compare_answer(who, queue[0])
                queue.popleft()
        except VolunteerError as error:
            log.warning("a draw waits", volunteer=who, error=error.message)
        finally:
            del self._tasks[who]
            if not queue:
                del self._queues[who]

    async def _compare_answer(self, who: str, parts: AccountParts) -> None:
        """Compare an answer and record the result."""
        comparison, now, name = await self._comparison(parts), self._clock.now(), parts.request_id

        def change(conn: Connection) -> bool:
            if comparison is None:
                answer_pay.mark_untold(conn, name, who, now)
                return False
            reason = f"{SUSPENSION_REASON}: {comparison[1]} of {comparison[0]} tokens"
            other = answer_pay.record_comparison(conn, name, who, comparison, reason, now)
            if other:
                with suppress(NotFound):
                    suspension.suspend(conn, who, reason, now)
            return other

        if await self._db.write(change):
            log.warning("an answer was not the model's", volunteer=who)

    async def _comparison(self, account_parts: AccountParts) -> tuple[int, int] | None:
        """Return how many tokens were compared and how many are wrong; None if no token can be
        compared.
        """
        compared = wrong = 0
        try:
            if self._compare is None:
                raise Unavailable("no engine compares answers here")
            for request, part in account_parts.parts:
                comparison = await self._compare(request, part.tokens, ended=part.finish == "stop")
                compared, wrong = compared + comparison[0], wrong + comparison[1]
        except VolunteerError as error:  # the model could not compute: no account is at fault
            log.warning("an answer was not compared", error=error.message)
            return None
        return (compared, wrong) if compared else None
