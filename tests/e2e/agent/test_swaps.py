"""Games that go on while newer versions come: heartbeats announce them, and what they took the
place of is let go.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from coordinator.scheduling.heartbeat_replies import SHARED_S
from shared import decoding
from shared.protocol.leases import BeginReply, Lease
from shared.protocol.versions import VersionManifest
from tests.support.local_volunteer import LocalMachine, Process
from tests.support.scripted_worker import Player
from tests.support.selfplay_run import RUN, harvested, history, player, selfplay_machine
from volunteer.control import events

LONG = (
    RUN.replace("\ngames = 4", "\ngames = 24")
    .replace("slots = 4", "slots = 1")  # one game after the other
    .replace("queue = 16", "queue = 96\nlearners = 2")
)


@pytest.mark.slow
async def test_versions_that_heartbeats_announce_play_the_games_that_begin_after_them(
    tmp_path: Path,
) -> None:
    async with selfplay_machine(tmp_path, LONG) as machine:
        home = machine.home
        ben, cem = [await player(home, "Ben"), await player(home, "Cem")]
        await ben.do(await ben.claim("selfplay"))
        await home.coordinator.replay.tend(1)
        lessons = [await Lesson.learnt(ben), await Lesson.learnt(cem)]
        async with machine.working(cache_gb=0.1) as process:
            playing = await process.until(events.Training, lambda event: event.counted == "games")
            first = await announced(lessons[0], machine, process)
            fill(machine.directories.cache)
            second = await announced(lessons[1], machine, process)
            assert (first.exists(), second.exists()) == (False, True)
            assert not process.all(events.Judged)
            judged = await process.until(
                events.Judged, lambda event: event.verdict.task == playing.task, 120
            )
        assert judged.verdict.state == "accepted"
        versions = [game.version for game in await harvested(home)]
        assert versions == sorted(versions)
        assert {0, 1} <= set(versions) <= {0, 1, 2}


class Lesson:
    """An update that somebody has trained and not yet submitted."""

    def __init__(self, who: Player, lease: Lease, begun: BeginReply, update: bytes) -> None:
        self._who = who
        self._parts = (lease, begun, update)

    @classmethod
    async def learnt(cls, who: Player) -> Lesson:
        lease = await who.claim("learn")
        begun = await who.worker.begin(lease)
        return cls(who, lease, begun, await who.result(lease, begun))

    async def hand_in(self) -> None:
        await self._who.hand_in(*self._parts)


async def announced(lesson: Lesson, machine: LocalMachine, process: Process) -> Path:
    """The file of the version that comes of a lesson, in the cache of a machine that plays with it
    by now.
    """
    home = machine.home
    before = len(await history(home))
    await lesson.hand_in()
    async with process.eventually(60):
        while len(await history(home)) == before:
            await process.tick()
        await home.clock.advance(SHARED_S + 1)  # what heartbeats say of runs is read again
        signed = await home.coordinator.runs.queries.manifest("gomoku")
        sha256 = decoding.decode(signed.payload, VersionManifest).weights.sha256
        path = machine.directories.cache / sha256[:2] / sha256
        while not path.exists():
            await process.tick()
        # The next game to begin takes it, and one after that is surely played with it.
        played = games(process)
        while games(process) < played + 2:
            await process.tick()
    return path


def games(process: Process) -> int:
    """Return how many games of the newest task are over."""
    return process.all(events.Training)[-1].step


def fill(cache: Path) -> None:
    """More than the cache may hold, in a file that is thrown away last and takes no room on the
    disk.
    """
    path = cache / "ff" / ("f" * 64)
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        file.truncate(1 << 28)
    os.utime(path, (2e9, 2e9))
