"""Every page without colours, in seven bits and in high contrast: state is told by signs and words, never by colour alone."""

from __future__ import annotations

import pytest

from tests.tui.engine import FakeEngine
from tests.tui.pages import Snapshot, picture
from volunteer.tui.app import Look

PAGES = ("runs", "device", "history", "leaderboard", "settings", "log")


@pytest.mark.parametrize("page", PAGES)
def test_picture_without_colours(
    engine: FakeEngine, snap_compare: Snapshot, monkeypatch: pytest.MonkeyPatch, page: str
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert picture(engine, snap_compare, page)


@pytest.mark.parametrize("page", PAGES)
def test_picture_in_seven_bits(engine: FakeEngine, snap_compare: Snapshot, page: str) -> None:
    assert picture(engine, snap_compare, page, look=Look(ascii=True))


@pytest.mark.parametrize("page", PAGES)
def test_picture_in_high_contrast(engine: FakeEngine, snap_compare: Snapshot, page: str) -> None:
    assert picture(engine, snap_compare, page, look=Look(theme="volunteer-high-contrast"))
