"""Batches of requests: the requests that arrive while a batch is served form the next batch, so
that many requests cost one transaction.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Generic, TypeVar

from shared.errors import Unavailable

Q = TypeVar("Q")
A = TypeVar("A")


class Batcher(Generic[Q, A]):
    """Serves requests in batches of at most `most`. `serve` returns the answers in the order of the
    requests; an exception among them is raised to the caller of its request.

    If `serve` fails for a batch, each request is served alone, so that one cannot harm the others.
    No batch has two requests of one `key`.
    """

    def __init__(
        self,
        serve: Callable[[Sequence[Q]], Awaitable[Sequence[A | Exception]]],
        most: int,
        key: Callable[[Q], Hashable] | None = None,
    ) -> None:
        self.most = most
        self._serve = serve
        self._key = key
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
            batch = self._take()
            try:
                answers = await self._answers([request for request, _ in batch])
            except BaseException:  # otherwise the waiting clients would get no answer
                for _, waiting in (*batch, *self._waiting):
                    waiting.cancel()
                raise
            for (_, waiting), answer in zip(batch, answers, strict=True):
                if waiting.done():
                    continue
                if isinstance(answer, Exception):
                    waiting.set_exception(answer)
                else:
                    waiting.set_result(answer)

    def _take(self) -> list[tuple[Q, asyncio.Future[A]]]:
        """Take the next batch off the queue; drop requests whose client hung up."""
        batch: dict[Hashable, tuple[Q, asyncio.Future[A]]] = {}
        left: list[tuple[Q, asyncio.Future[A]]] = []
        for place, entry in enumerate(self._waiting):
            if len(batch) == self.most:
                left += self._waiting[place:]
                break
            key = id(entry) if self._key is None else self._key(entry[0])
            if not entry[1].done() and batch.setdefault(key, entry) is not entry:
                left.append(entry)
        self._waiting = left
        return [*batch.values()]

    async def _answers(self, requests: Sequence[Q]) -> Sequence[A | Exception]:
        try:
            return await self._serve(requests) if requests else []
        except Exception as error:
            if len(requests) == 1 or isinstance(
                error, Unavailable
            ):  # each request alone would fail in the same way
                return [error] * len(requests)
        alone = await asyncio.gather(*(self._answers([request]) for request in requests))
        return [answer for [answer] in alone]
