"""Every test of the screens: a clock that stands, one time zone, no animation, no colour setting of
the tester's terminal.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.tui.engine import FakeEngine


@pytest.fixture(autouse=True)
def _same_terminal_everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("NO_COLOR", "TEXTUAL_THEME", "TEXTUAL_ANIMATIONS", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()
