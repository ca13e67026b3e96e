"""Event loop in virtual time: it jumps to the next timer instead of waiting for it.

Work for a thread runs immediately on the loop's own thread. A program that never waits for anything
outside of the process therefore does the same things in the same order every time, and its hours
pass as fast as its work is computed.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

from typing_extensions import override

from shared.errors import Internal

T = TypeVar("T")

# Later than the time of any present file, so that files written during a simulation are never "from
# the future" for the coordinator.
EPOCH = 4_000_000_000.0


class _Selector(selectors.DefaultSelector):
    """Selector that moves the virtual clock instead of waiting."""

    loop: VirtualLoop

    @override
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Internal("the simulation has come to a stop: no event is left")
        if timeout > 0:
            self.loop.skip(timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop whose time begins at 0 and moves in jumps."""

    def __init__(self) -> None:
        self._virtual = 0.0
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    @override
    def time(self) -> float:
        return self._virtual

    def skip(self, seconds: float) -> None:
        """Advance the virtual clock through idle time."""
        self._virtual += seconds

    @override
    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Call the function immediately, on this thread."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


class LoopClock:
    """Clock of a virtual loop. `sleep` takes at least `tick_s`, since the periodic jobs that a
    server runs each second would otherwise take most of the time of a long simulation; `nap` takes
    exactly its seconds.
    """

    def __init__(self, tick_s: float = 0.0) -> None:
        self.tick_s = tick_s

    def now(self) -> float:
        return EPOCH + self.monotonic()

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(seconds, self.tick_s))

    async def nap(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds))


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
