"""The run card keeps pace with the run, also while every heartbeat brings news."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

import msgspec

from shared.protocol import endpoints
from shared.protocol.base import Cause, Standstill
from shared.protocol.endpoint import Endpoint
from shared.protocol.heartbeat import HeartbeatReply, RunBeat
from tests.support.virtual_clock import VirtualClock
from tests.support.workplaces import workplace
from volunteer.agent.run_watcher import FOLLOWED_MAX, GAP_S, LISTING_S, RunWatcher, merging_words
from volunteer.control.status import Status

HEARTBEAT_S = 30.0


class StubApi:
    """Counts the listings that are asked for."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.listed: list[float] = []

    async def query(self, endpoint: Endpoint[Any], **args: str) -> tuple[()] | None:
        if endpoint is endpoints.RUNS:
            self.listed.append(self.clock.now())
        return None if endpoint is endpoints.ME else ()


def beat(version: int, needs: int = 1, name: str = "tiny") -> HeartbeatReply:
    run = RunBeat(
        run=name,
        state="running",
        version=version,
        loss=float(needs),
        needs=needs,
        merge_in_s=None,
        workers=1,
    )
    return HeartbeatReply(now=0.0, next_s=HEARTBEAT_S, runs=(run,))


async def listings(replies: list[HeartbeatReply]) -> list[float]:
    """Return the seconds at which the watcher asked for the runs, one heartbeat each 30 s."""
    clock = VirtualClock()
    api: Any = StubApi(clock)
    nobody: Any = SimpleNamespace(memory=SimpleNamespace(show_name=None, read=()))
    bus: Any = SimpleNamespace(emit=lambda event: None, status=Status())
    judge: Any = SimpleNamespace(apply=lambda news, me, until: None)
    place = workplace(clock, remote={"api": api}, store={"home": nobody}, bus=bus)
    watcher = RunWatcher(place=place, verdicts=judge)
    start = clock.now()
    polling = asyncio.ensure_future(watcher.run())
    for reply in replies:
        watcher.apply_heartbeat(reply)
        for _ in range(int(HEARTBEAT_S)):
            await clock.advance(1.0)
    polling.cancel()
    await asyncio.gather(polling, return_exceptions=True)
    return [at - start for at in api.listed]


async def test_a_new_version_asks_for_the_runs_within_seconds() -> None:
    at = await listings([beat(version) for version in range(1, 6)])
    assert {later // HEARTBEAT_S for later in at} == {0, 1, 2, 3, 4}
    assert all(later % HEARTBEAT_S <= 2 * GAP_S for later in at)


async def test_news_of_every_heartbeat_does_not_put_the_listing_off_for_ever() -> None:
    count = int(3 * LISTING_S / HEARTBEAT_S)
    at = await listings([beat(1, needs=1 + turn % 2) for turn in range(count)])
    assert len(at) >= 3
    assert max(b - a for a, b in itertools.pairwise(at)) <= LISTING_S + HEARTBEAT_S


async def test_a_new_run_is_listed_within_a_heartbeat_beside_many_others() -> None:
    old = tuple(run for n in range(FOLLOWED_MAX + 1) for run in beat(1, name=f"old{n}").runs)
    many = msgspec.structs.replace(beat(1), runs=old)
    more = msgspec.structs.replace(beat(1), runs=(*old, *beat(1, name="new").runs))
    at = await listings([many, many, more, more])
    assert [int(later // HEARTBEAT_S) for later in at] == [0, 2]


async def test_the_end_of_a_run_asks_for_its_last_version() -> None:
    ended = msgspec.structs.replace(beat(1), runs=())
    at = await listings([beat(1), beat(1), ended, ended])
    assert [int(later // HEARTBEAT_S) for later in at] == [0, 2]


async def test_the_cause_of_a_standstill_is_told_when_it_changes_and_when_it_ends() -> None:
    clock, notices = VirtualClock(), list[str]()
    memory = SimpleNamespace(memory=SimpleNamespace(show_name=None, read=()))
    bus: Any = SimpleNamespace(
        emit=lambda event: None,
        status=Status(),
        notice=lambda message, level="info": notices.append(f"{level}: {message}"),
    )
    judge: Any = SimpleNamespace(apply=lambda news, me, until: None)
    place = workplace(clock, store={"home": memory}, bus=bus)
    watcher = RunWatcher(place=place, verdicts=judge)
    for cause, message in (
        (None, ""),
        (Cause.NOBODY, "nobody is here, the last machine was seen 30 s ago"),
        (Cause.STALLED, "no new version for 10:00 min"),
        (Cause.STALLED, "no new version for 11:00 min"),
        (Cause.FAILING, "its last 3 tasks failed, on 2 machines: bad rate"),
        (None, ""),
        (None, ""),
    ):
        still = None if cause is None else Standstill(cause=cause, message=message)
        (run,) = beat(1).runs
        run = msgspec.structs.replace(run, standstill=still)
        watcher.apply_heartbeat(msgspec.structs.replace(beat(1), runs=(run,)))
        assert merging_words(run) == (message or "next version after 1 more contribution")
    assert notices == [  # somebody is here who reads this
        "warning: tiny does not go on: no new version for 10:00 min",
        "warning: tiny does not go on: its last 3 tasks failed, on 2 machines: bad rate",
        "info: tiny goes on",
    ]
