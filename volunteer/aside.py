"""A thread for calls that may block for as long as they like: whoever waits for one of them holds nobody else up."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Aside:
    """One daemon thread. It does not keep the process alive: a call that never comes back is left behind."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._main, name=name, daemon=True).start()

    async def do(self, call: Callable[[], T]) -> T:
        """What `call` gives, after all that were asked for before."""
        future: Future[T] = Future()
        self._jobs.put((call, future))
        return await asyncio.wrap_future(future)

    def _main(self) -> None:
        while True:
            call, future = self._jobs.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
