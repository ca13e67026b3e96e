"""Announcements: shown by every heartbeat until they end or are withdrawn, read once by each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.accounts.announcements import Announcements
from shared.decoding import decode
from shared.errors import BadRequest, Conflict, NotFound
from shared.protocol.heartbeat import ANNOUNCEMENTS_MAX, Announcement, HeartbeatReply
from tests.support.local_coordinator import LocalCoordinator, Worker, local_coordinator
from tests.support.workplaces import workplace
from volunteer.account.profile_directory import Home, ProfileState
from volunteer.agent.run_watcher import RunWatcher
from volunteer.control.event_bus import EventBus
from volunteer.control.event_sentences import announcement_words
from volunteer.headless import status_lines


@pytest.fixture
async def home(tmp_path: Path, database_url: str) -> AsyncIterator[LocalCoordinator]:
    async with local_coordinator(tmp_path / "house", database=database_url) as made:
        yield made


def of(home: LocalCoordinator) -> Announcements:
    return home.coordinator.heartbeats.announcements


async def heard(worker: Worker) -> tuple[Announcement, ...]:
    reply = decode((await worker.post("/workers/heartbeat", {})).content, HeartbeatReply)
    return reply.announcements


async def test_it_comes_with_heartbeats_until_its_end(home: LocalCoordinator) -> None:
    run = await home.start_run()
    ann = await home.join("Ann")
    assert await heard(ann) == ()
    made = await of(home).add("down tonight", run, home.clock.now() + 600)
    await of(home).add("thank you all")
    await home.clock.advance(6)
    assert [each.text for each in await heard(ann)] == ["down tonight", "thank you all"]
    await of(home).withdraw(made.id + 1)
    await home.clock.advance(6)
    assert await heard(ann) == (made,)
    await home.clock.advance(700)
    assert await heard(ann) == ()
    assert await of(home).standing() == ()


async def test_what_cannot_be_announced_is_refused(home: LocalCoordinator) -> None:
    for text in ("", "two\nlines", "red \x1b[31m", "x" * 301, "right \u202eto left"):
        with pytest.raises(BadRequest, match="one line of 1 to 300 characters"):
            await of(home).add(text)
    with pytest.raises(BadRequest, match="in the future"):
        await of(home).add("late", until=home.clock.now() - 1)
    with pytest.raises(NotFound):
        await of(home).add("who", "nobody")
    with pytest.raises(NotFound, match="there is no announcement 7"):
        await of(home).withdraw(7)


async def test_announcements_at_once_are_all_kept_and_few(home: LocalCoordinator) -> None:
    texts = [f"number {n}" for n in range(ANNOUNCEMENTS_MAX)]
    await asyncio.gather(*(of(home).add(text) for text in texts))
    standing = await of(home).standing()
    assert {each.text for each in standing} == set(texts)
    assert len({each.id for each in standing}) == ANNOUNCEMENTS_MAX
    with pytest.raises(Conflict, match="withdraw one"):
        await of(home).add("one more")


def watcher(home: LocalCoordinator, bus: EventBus, kept: Any) -> RunWatcher:
    verdicts: Any = SimpleNamespace(apply=lambda news, me, until: None)
    place = workplace(home.clock, store={"home": kept}, bus=bus)
    return RunWatcher(place=place, verdicts=verdicts)


async def test_a_volunteer_sees_each_until_it_is_read(
    home: LocalCoordinator, tmp_path: Path
) -> None:
    bus, kept = EventBus(home.clock), Home(tmp_path)
    one = Announcement(id=1, text="down \x1b[2Jtonight")
    two = Announcement(id=2, text="again", run="tiny")

    def says(*found: Announcement) -> HeartbeatReply:
        return HeartbeatReply(now=0.0, next_s=30.0, announcements=found)

    def shown() -> list[str]:
        return [announcement_words(each) for each in bus.status.announcements]

    seen = watcher(home, bus, kept)
    seen.apply_heartbeat(says(one))
    assert shown() == ["announcement: down  [2Jtonight"]
    assert any("announcement: down" in text for text in status_lines(bus.status))
    seen.read_announcements()
    assert shown() == []
    again = watcher(home, EventBus(home.clock), Home(tmp_path))  # a restart
    again.apply_heartbeat(says(one, two))
    assert [each.id for each in again.place.bus.status.announcements] == [2]
    again.read_announcements()
    again.apply_heartbeat(says())
    again.read_announcements()
    assert kept.memory == ProfileState(read=(1,))
    assert Home(tmp_path).memory.read == ()
