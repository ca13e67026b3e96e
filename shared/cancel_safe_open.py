"""Resources opened in a thread for a caller that may be cancelled meanwhile.

`asyncio.to_thread` and `run_in_executor` drop the result when their caller is cancelled: a file
that the thread opens meanwhile would stay open until it is collected.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, Generic, Protocol, TypeVar


class Closable(Protocol):
    """Resource that must be closed."""

    def close(self) -> object: ...


R = TypeVar("R", bound=Closable)


class _Opening(Generic[R]):
    """One call of `make`, and whether its caller still waits."""

    def __init__(self, make: Callable[[], R]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._made: R | None = None
        self._wanted = True

    def run(self) -> R:
        """Open the resource, in the thread; close it at once if its caller is gone."""
        made = self._make()
        with self._lock:
            self._made = made
            wanted = self._wanted
        if not wanted:
            made.close()
        return made

    def abandon(self) -> None:
        """Give the resource up: close it, now or as soon as it is made."""
        with self._lock:
            self._wanted = False
            made = self._made
        if made is not None:
            made.close()


async def opened(make: Callable[..., R], *args: Any, pool: Executor | None = None) -> R:
    """Return what `make(*args)` opens in a thread; closed if the caller is cancelled."""
    opening = _Opening(lambda: make(*args))
    try:
        return await asyncio.get_running_loop().run_in_executor(pool, opening.run)
    except asyncio.CancelledError:
        opening.abandon()
        raise
