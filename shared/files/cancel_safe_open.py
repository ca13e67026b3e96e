"""Opening of a file in a thread, for a caller that may be cancelled meanwhile.

`asyncio.to_thread` and `run_in_executor` drop the result when their caller is cancelled: a file
that the thread opens afterwards would stay open until garbage collection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, Protocol, TypeVar


class Closable(Protocol):
    """Resource that must be closed."""

    def close(self) -> object: ...


R = TypeVar("R", bound=Closable)


async def open_in_thread(make: Callable[..., R], *args: object, pool: Executor | None = None) -> R:
    """Return the resource that `make(*args)` opens in a thread; close it if the caller is
    cancelled.
    """
    opening = asyncio.get_running_loop().run_in_executor(pool, make, *args)
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(_close)
        raise


def _close(opening: asyncio.Future[Any]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
