"""Joiner: collects the requests that arrive while others are served, and serves them together next,
so that many cost one transaction.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from shared.errors import Unavailable

Q = TypeVar("Q")
A = TypeVar("A")


class Joiner(Generic[Q, A]):
    """Serves requests, at most `most` at once. `serve` returns the answers in the order of the
    requests; an error among them is raised to its own requester.

    If serving several fails, each is served alone, so that a wrong one does not harm the others.
    """

    def __init__(
        self, serve: Callable[[Sequence[Q]], Awaitable[Sequence[A | Exception]]], most: int
    ) -> None:
        self.most = most
        self._serve = serve
        self._waiting: list[tuple[Q, asyncio.Future[A]]] = []
        self._serving: asyncio.Task[None] | None = None

    async def ask(self, request: Q) -> A:
        """Return the answer to one request. Raises its error."""
        answer: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve_all())
        return await answer

    async def _serve_all(self) -> None:
        while self._waiting:
            batch = self._waiting[: self.most]
            del self._waiting[: self.most]
            batch = [each for each in batch if not each[1].done()]  # skip clients that hung up
            answers = await self._answers([request for request, _ in batch])
            for (_, waiting), answer in zip(batch, answers, strict=True):
                if waiting.done():
                    continue
                if isinstance(answer, Exception):
                    waiting.set_exception(answer)
                else:
                    waiting.set_result(answer)

    async def _answers(self, requests: Sequence[Q]) -> Sequence[A | Exception]:
        try:
            return await self._serve(requests) if requests else []
        except Exception as error:
            if len(requests) == 1 or isinstance(error, Unavailable):  # one by one would not help
                return [error] * len(requests)
        alone = await asyncio.gather(*(self._answers([request]) for request in requests))
        return [answer for [answer] in alone]
