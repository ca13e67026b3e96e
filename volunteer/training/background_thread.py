"""Thread for long blocking calls, separate from asyncio's pool of threads."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from volunteer.machine.priority import LOWEST, lower_thread

T = TypeVar("T")


class BackgroundThread:
    """One daemon thread for blocking calls.

    The thread does not keep the process alive: a call that never returns is abandoned.
    `low_priority` lowers the thread below the rest of the process, on systems whose threads have
    priorities.
    """

    def __init__(self, name: str, *, low_priority: bool = False) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._low_priority = low_priority
        threading.Thread(target=self._main, name=name, daemon=True).start()

    async def do(self, call: Callable[[], T]) -> T:
        """Return the result of `call`, which runs after all earlier calls."""
        future: Future[T] = Future()
        self._jobs.put((call, future))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """End the thread after the calls in its queue; no further call is allowed."""
        self._jobs.put(None)

    def _main(self) -> None:
        if self._low_priority:
            lower_thread(LOWEST)
        while (job := self._jobs.get()) is not None:
            call, future = job
            del job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            del call, future  # call and future may hold a model
