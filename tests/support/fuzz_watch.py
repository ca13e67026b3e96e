"""A fuzzing run as it is seen: how much is sent, faults and slow answers as they happen, progress,
and memory that stays flat.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

GROWTH_BYTES = 64 << 20
ANSWER_S = 10.0
PATIENCE_S = 300.0  # for an answer, and for a start
PROGRESS_S = 15.0
TICK_S = 0.1
FAULTS_MAX = 20  # after which a run ends
TOGETHER = 16


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Amount and choice of requests."""

    count: int
    seconds: float
    seed: int
    route: str = ""  # only routes with this in their name
    first: int = 0  # number of the first one
    folder: Path | None = None  # for the bodies of faults
    until: float = float("inf")

    def batches(self) -> Iterator[range]:
        """Yield the numbers of requests that are sent together."""
        end = self.first + self.count
        for first in range(self.first, end, TOGETHER):
            yield range(first, min(first + TOGETHER, end))

    def begun(self, count: int | None = None, seconds: float | None = None, seed: int = 0) -> Plan:
        """Return the plan with these changes, its time running from now on."""
        lasts = self.seconds if seconds is None else seconds
        return replace(
            self,
            count=self.count if count is None else count,
            seed=self.seed + seed,
            until=time.monotonic() + lasts,
        )


@dataclass(eq=False)
class Wait:
    """A request that is not answered yet."""

    sent: Any
    since: float
    slow: bool = False


@dataclass(eq=False)
class Watch:
    """Record of a run: faults as they happen, progress, and how late this program itself is.

    Answers are timed by `lived_s`, a clock that stands still while this program is halted or gets
    no processor: then the server mostly gets none either, and that is no hang.
    """

    what: str
    total: int
    process: psutil.Process
    folder: Path | None = None
    faults: list[str] = field(default_factory=list)
    done: int = 0
    slow: int = 0
    late_s: float = 0.0  # of this program's event loop, since it was last told
    lived_s: float = 0.0
    waits: dict[asyncio.Timeout, Wait] = field(default_factory=dict)

    def fault(self, why: str, sent: Any, whole: bytes) -> None:
        """Report a fault, with its request."""
        said = f"FAULT {why}\n{sent}"
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"fault-{int(time.time())}-{len(self.faults)}.body"
            path.write_bytes(whole)
            said += f"\n  whole body: {path}"
        self.faults.append(said)
        print(said, flush=True)

    @property
    def ended(self) -> bool:
        return len(self.faults) >= FAULTS_MAX

    def check(self) -> None:
        assert not self.faults, "\n".join(self.faults)

    @asynccontextmanager
    async def patience(self, sent: Any) -> AsyncIterator[None]:
        """The block may take PATIENCE_S. Raises TimeoutError after that."""
        async with asyncio.timeout(None) as limit:
            self.waits[limit] = Wait(sent, self.lived_s)
            try:
                yield
            finally:
                del self.waits[limit]

    async def told(self) -> None:
        """Measure how late this program is, and print progress, until cancelled."""
        began = last = time.monotonic()
        first = self.process.memory_info().rss
        spent: deque[float] = deque(maxlen=round(ANSWER_S / TICK_S))
        while True:
            asked = time.monotonic()
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            self.late_s = max(self.late_s, now - asked - TICK_S)
            self.lived_s += min(now - asked, 2 * TICK_S)
            spent.append(sum(self.process.cpu_times()[:2]))
            self._overdue(spent[-1] - spent[0])
            if now - last < PROGRESS_S:
                continue
            last = now
            grown = (self.process.memory_info().rss - first) / 2**20
            rate = self.done / (now - began)
            left = (self.total - self.done) / max(1e-9, rate)
            print(
                f"{self.what}: {self.done:,} of {self.total:,}, {rate:,.0f}/s, "
                f"{left / 60:.0f} min left, {len(self.faults)} faults, {self.slow} slow, "
                f"server {grown:+.0f} MB, this program up to {self.late_s:.1f} s late",
                flush=True,
            )
            self.late_s = 0.0

    def _overdue(self, spent: float) -> None:
        """Report requests that take longer than ANSWER_S, and end the ones beyond PATIENCE_S."""
        for limit, wait in self.waits.items():
            waited = self.lived_s - wait.since
            if waited > ANSWER_S and not wait.slow:
                wait.slow = True
                self.slow += 1
                print(f"slow: in {waited:.0f} s the server used {spent:.1f} s\n{wait.sent}")
            if waited > PATIENCE_S:
                limit.reschedule(0.0)


@contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """Print progress inside the block."""
    telling = asyncio.get_running_loop().create_task(watch.told())
    try:
        yield
    finally:
        telling.cancel()


@contextmanager
def flat(process: psutil.Process, most: int = GROWTH_BYTES) -> Iterator[Callable[[], int]]:
    """The memory of a process may not have grown at the end; calling it says by how much."""
    before = process.memory_info().rss

    def grown() -> int:
        return int(process.memory_info().rss - before)

    yield grown
    assert grown() < most, f"{grown() >> 20} MB"
