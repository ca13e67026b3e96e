"""Digest of an absence: one line at a start and at a return, about what changed, and only once."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import msgspec
import pytest
from textual import events as terminal
from textual.pilot import Pilot
from typing_extensions import override

from tests.tui import scenes
from tests.tui.engine import FakeEngine
from volunteer.control import events
from volunteer.control.status import Status
from volunteer.tui.absence_digest import ABSENCE_S, Visit, Visits, digest
from volunteer.tui.app import VolunteerApp

replace = msgspec.structs.replace


class Watched(VolunteerApp):
    """Program whose notifications stay, however slow the machine is."""

    CSS_PATH = str(Path(inspect.getfile(VolunteerApp)).with_name("app.tcss"))

    def __init__(self, engine: FakeEngine, path: Path) -> None:
        super().__init__(engine.control, clock=engine.clock, tick_s=None, visits=Visits(path))
        self.messages: list[str] = []

    @override
    def notify(self, message: str, **options: Any) -> None:
        self.messages.append(message)


HOUR_S = 3600.0
BEFORE = Visit(
    volunteer_id="ann",
    at=0.0,
    earned_micro=5_000_000,
    accepted=40,
    rejected=3,
    versions={"my-gpt": 28, "other": 5, "third": 1},
)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"earned_micro": 17_400_000, "accepted": 71, "rejected": 5},
            "12.40 credits earned, 31 tasks accepted, 2 tasks refused",
        ),
        ({"accepted": 41, "rejected": 4}, "1 task accepted, 1 task refused"),
        ({"earned_micro": 4_000_000}, "1.00 credits taken back"),
        ({"earned_micro": 5_000_400, "accepted": 41}, "1 task accepted"),  # not "0.00 credits"
        (
            {"versions": {"my-gpt": 40, "other": 6, "third": 9, "new": 70}},
            "my-gpt at version 40 (+12), third at version 9 (+8)",
        ),
    ],
)
def test_a_digest_names_what_changed(changes: dict[str, object], line: str) -> None:
    after = replace(BEFORE, at=9 * HOUR_S, **changes)
    assert digest(BEFORE, after) == f"since your last look 9 h ago: {line}"


@pytest.mark.parametrize(
    "after",
    [
        replace(BEFORE, at=9 * HOUR_S),
        replace(BEFORE, at=ABSENCE_S - 1, accepted=90),
        replace(BEFORE, at=9 * HOUR_S, accepted=90, volunteer_id="bob"),
        replace(BEFORE, at=9 * HOUR_S, versions={"my-gpt": 3}),
    ],
    ids=["nothing", "a moment", "another account", "rolled back"],
)
def test_no_news_is_no_digest(after: Visit) -> None:
    assert digest(BEFORE, after) == ""


@pytest.mark.parametrize("content", [b"", b"\0", b'{"volunteer_id": 3}'])
def test_a_damaged_file_is_no_digest_and_is_replaced(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "last-look.json"
    path.write_bytes(content)
    visits = Visits(path)
    status = Status(me=scenes.ME, runs=(scenes.RUN,))
    assert visits.start(status, 0.0) == ""
    visits.end(status, 0.0)
    assert Visits(path).start(status, HOUR_S) == ""
    later = replace(status, me=replace(scenes.ME, accepted=scenes.ME.accepted + 1))
    assert "1 task accepted" in Visits(path).start(later, HOUR_S)


def test_a_disk_that_takes_nothing_ends_nothing(tmp_path: Path) -> None:
    visits = Visits(tmp_path / "missing" / "last-look.json")
    status = Status(me=scenes.ME, runs=(scenes.RUN,))
    visits.start(status, 0.0)
    visits.end(status, 0.0)


async def test_a_start_and_a_return_show_what_happened_meanwhile(
    engine: FakeEngine, tmp_path: Path
) -> None:
    path = tmp_path / "last-look.json"
    first = Watched(engine, path)
    async with first.run_test(size=(100, 30)) as pilot:
        await engine.play(scenes.filled())
        assert await _news(first, pilot) == []
    await engine.clock.advance(9 * HOUR_S)
    await engine.play([_accepted(31)])
    again = Watched(engine, path)
    async with again.run_test(size=(100, 30)) as pilot:
        assert await _news(again, pilot) == ["since your last look 9 h ago: 31 tasks accepted"]
        again.post_message(terminal.AppBlur())
        await pilot.pause()
        await engine.clock.advance(2 * HOUR_S)
        await engine.play([_accepted(33)])
        assert len(await _news(again, pilot)) == 1  # nobody looks
        again.post_message(terminal.AppFocus())
        await pilot.pause()
        news = await _news(again, pilot)
        assert news[1:] == ["since your last look 2 h ago: 2 tasks accepted"]


def _accepted(count: int) -> events.Credits:
    """Figures of an account with so many more accepted tasks."""
    me = replace(scenes.ME, at=scenes.ME.at + count, accepted=scenes.ME.accepted + count)
    return events.Credits(me=me)


async def _news(app: Watched, pilot: Pilot[int]) -> list[str]:
    """Digests that the program has shown, after two more drawings."""
    for _ in range(2):
        app.publish()
        await pilot.pause()
    return [message for message in app.messages if message.startswith("since your last look")]
