"""Volunteers' machines that wait for prompts, and the tokens that arrive from answering machines.

Machines and prompts are held in memory only, and a machine answers only requests to the process
to which it offered itself. Asker and owner both agree that the machine may read the prompt. The
machine's answer is not trusted: its tokens are counted, bounded and timed, and may be compared with
the model's afterwards.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import AsyncGenerator, Collection
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from coordinator.database import volunteers as store
from shared.errors import Forbidden
from shared.protocol.inference import (
    AnswerGoOn,
    AnswerOffer,
    AnswerTask,
    AnswerTokens,
    AnswerWork,
)
from shared.protocol.limits import LONG_POLL_S_MAX

if TYPE_CHECKING:
    from coordinator.accounts.bearer_tokens import Principal
    from coordinator.database.engine.open_database import Database
    from shared.clock import Clock

WAITING_MAX = 10_000  # machines; beyond this the longest waiting one is dropped
# longest wait for the first and for each further token, before another machine is asked
FIRST_S, NEXT_S = 20.0, 5.0
PACE_S = 1.0  # a whole answer may take FIRST_S, and this time for each of its tokens
REST_S = 60.0  # time without prompts for a machine that was too slow


class SilentMachine(Exception):
    """Raised when a machine stops, fails or is too slow in the middle of an answer."""


class WaitingMachine:
    """Machine waiting for a prompt."""

    def __init__(self, principal: Principal, runs: Collection[str]) -> None:
        self.worker_id = principal.worker_id
        self.volunteer_id = principal.volunteer_id
        self.runs = frozenset(runs)
        self.task: asyncio.Future[AnswerTask | None] = asyncio.get_running_loop().create_future()


class AnswerPart:
    """Tokens of an answer that come from one machine."""

    def __init__(self, waiting: WaitingMachine, task: AnswerTask) -> None:
        self.id = task.id
        self.worker_id = waiting.worker_id
        self.volunteer_id = waiting.volunteer_id
        self.tokens: list[int] = []
        self.finish = ""  # "stop", "length" or "failed" at the end
        self.wanted = True  # False once nobody needs further tokens
        self._tokens_max = task.max_tokens
        self._arrived = asyncio.Event()

    def take(self, sent: AnswerTokens) -> bool:
        """Accept a machine's tokens, each only once if they are sent again; return False if no more
        are wanted. The part fails if tokens before them are missing, or if "length" ends fewer
        tokens than were asked for: no comparison of tokens would show that.
        """
        if not self.wanted or self.finish:
            return False
        if sent.start > len(self.tokens):
            self.finish = "failed"
        else:
            new = sent.tokens[len(self.tokens) - sent.start :]
            self.tokens += new[: self._tokens_max - len(self.tokens)]
            full = len(self.tokens) == self._tokens_max
            too_early = sent.finish == "length" and not full
            self.finish = "failed" if too_early else sent.finish or ("length" if full else "")
        self._arrived.set()
        return not self.finish

    async def stream(self) -> AsyncGenerator[int]:
        """Yield tokens as they arrive, until the end. Raises SilentMachine if they stop, or
        arrive too slowly.
        """
        sent, limit_s, now = 0, FIRST_S, asyncio.get_running_loop().time
        began = now()
        while True:
            for token in self.tokens[sent:]:
                sent, limit_s = sent + 1, NEXT_S
                yield token
            if self.finish == "failed":
                raise SilentMachine
            if self.finish and sent == len(self.tokens):
                return
            self._arrived.clear()
            if sent == len(self.tokens) and not self.finish:
                left_s = began + FIRST_S + sent * PACE_S - now()
                try:
                    await asyncio.wait_for(self._arrived.wait(), min(limit_s, left_s))
                except TimeoutError:
                    raise SilentMachine from None


class Answerers:
    """Machines waiting for prompts, and machines answering prompts."""

    def __init__(self, db: Database, clock: Clock) -> None:
        self._db = db
        self._clock = clock
        self._rng = random.SystemRandom()
        self._waiting: dict[str, WaitingMachine] = {}  # keyed by worker, the longest waiting first
        self._parts: dict[str, AnswerPart] = {}
        self._rests: dict[str, float] = {}  # worker -> end of its time without prompts

    @property
    def waiting(self) -> int:
        """Return how many machines wait for prompts."""
        return len(self._waiting)

    async def offer(self, principal: Principal, request: AnswerOffer) -> AnswerWork:
        """Wait for a prompt as long as the request allows, and end an earlier wait of this
        machine.

        Raises Forbidden for an account that is not vetted.
        """
        who = principal.volunteer_id
        account = await self._db.read(lambda conn: store.by_id(conn, who))
        if account is None or not account.takes_part or account.standing != "vetted":
            raise Forbidden("answering prompts is for accounts that are vetted: train first")
        wait_s = max(0.0, min(request.wait_s, LONG_POLL_S_MAX))
        waiting = WaitingMachine(principal, request.runs)
        self._end(self._waiting.pop(waiting.worker_id, None))
        while len(self._waiting) >= WAITING_MAX:
            self._end(self._waiting.pop(next(iter(self._waiting))))
        self._waiting[waiting.worker_id] = waiting
        try:
            with suppress(TimeoutError):
                return AnswerWork(task=await asyncio.wait_for(waiting.task, wait_s))
            return AnswerWork()
        finally:
            if self._waiting.get(waiting.worker_id) is waiting:
                del self._waiting[waiting.worker_id]

    def begin(self, run: str, task: AnswerTask, *, excluded: Collection[str]) -> AnswerPart | None:
        """Assign a task to a waiting machine whose account is not in `excluded`; return None if
        there is none. Each volunteer has the same chance, whatever the number of its machines.
        """
        now = self._clock.monotonic()
        self._rests = {worker: until for worker, until in self._rests.items() if until > now}
        candidates = [
            offer
            for offer in self._waiting.values()
            if not offer.task.done()  # the machine's wait has just ended
            and offer.volunteer_id not in excluded
            and (not offer.runs or run in offer.runs)
            and offer.worker_id not in self._rests
        ]
        if not candidates:
            return None
        owner = self._rng.choice(sorted({offer.volunteer_id for offer in candidates}))
        waiting = self._rng.choice([offer for offer in candidates if offer.volunteer_id == owner])
        task = msgspec.structs.replace(task, id=secrets.token_hex(16))
        part = self._parts[task.id] = AnswerPart(waiting, task)
        del self._waiting[waiting.worker_id]
        waiting.task.set_result(task)
        return part

    def end(self, part: AnswerPart, *, silent: bool = False) -> None:
        """Accept no more tokens of a part; a silent machine gets no prompts for REST_S."""
        part.wanted = False
        self._parts.pop(part.id, None)
        if silent:
            self._rests[part.worker_id] = self._clock.monotonic() + REST_S

    async def tokens(self, principal: Principal, answer: str, request: AnswerTokens) -> AnswerGoOn:
        """Accept the next tokens of an answer; the reply says whether more are wanted. None are
        wanted if the answer is not assigned to this machine.
        """
        part = self._parts.get(answer)
        if part is None or part.worker_id != principal.worker_id:
            return AnswerGoOn(go_on=False)
        return AnswerGoOn(go_on=part.take(request))

    def _end(self, waiting: WaitingMachine | None) -> None:
        if waiting is not None and not waiting.task.done():
            waiting.task.set_result(None)
