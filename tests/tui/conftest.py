"""Every test of the screens: a clock that stands, one time zone, no animation, no colour setting of
the tester's terminal.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion
from syrupy.extensions.single_file import SingleFileSnapshotExtension, WriteMode
from textual.app import App
from textual.pilot import Pilot

from tests.tui.engine import FakeEngine, screen_text
from tests.tui.pages import Snapshot


@pytest.fixture(autouse=True)
def _same_terminal_everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("NO_COLOR", "TEXTUAL_THEME", "TEXTUAL_ANIMATIONS", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


SOON_S = 0.03  # a timer that is due earlier belongs to the drawing that a test waits for
TIMERS_MAX = 20  # waited for in a row: that of a screen that is left never rests


async def run_until_idle(min_sleep: float = 0.0, max_sleep: float = 1.0) -> None:
    """Wait until no callback is ready and no timer is due soon.

    Textual's own guesses this from the CPU time of pauses of 20 ms, two of them for each key: a
    third of the time of these tests, and wrong when another process has the cores.
    """
    loop: Any = asyncio.get_running_loop()  # which does not publish its queues
    until = time.thread_time() + max_sleep  # of computing: others may have the cores meanwhile
    for _ in range(TIMERS_MAX):
        await asyncio.sleep(0)
        while loop._ready and time.thread_time() < until:
            await asyncio.sleep(0)
        due = min((t.when() for t in loop._scheduled if not t.cancelled()), default=math.inf)
        if due - loop.time() > SOON_S:
            return
        await asyncio.sleep(max(0.0, due - loop.time()))


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("textual.app.wait_for_idle", run_until_idle)
    monkeypatch.setattr("textual.pilot.wait_for_idle", run_until_idle)
    monkeypatch.setattr("textual.screen.UPDATE_PERIOD", 0.001)  # 1/60 s, waited for at each step


class _TextFile(SingleFileSnapshotExtension):
    """Text of a screen, a file each."""

    _file_extension = "txt"
    _write_mode = WriteMode.TEXT


@pytest.fixture
def stored(snapshot: SnapshotAssertion) -> SnapshotAssertion:
    """Text of screens, as it is stored; `--snapshot-update` stores it."""
    return snapshot.use_extension(_TextFile)


@pytest.fixture
def text_compare(stored: SnapshotAssertion) -> Snapshot:
    """Compare the text on a screen with the stored one, as `snap_compare` does the picture of it."""

    def compare(
        app: App[int],
        terminal_size: tuple[int, int],
        run_before: Callable[[Pilot[Any]], Awaitable[None]],
    ) -> bool:
        texts = []

        async def read(pilot: Pilot[Any]) -> None:
            await run_before(pilot)
            await pilot.pause()
            texts.append(screen_text(app))
            app.exit()

        app.run(headless=True, auto_pilot=read, size=terminal_size)
        [text] = texts
        assert text == stored
        return True

    return compare


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()
