"""Run of games on a small board, and helpers for its tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from sqlalchemy import select

from coordinator.database.tables.experience import harvests
from shared.protocol.versions import VersionInfo
from shared.workloads.gomoku.records import GameRecord
from shared.workloads.gomoku.records import decode as read_games
from tests.support.local_coordinator import LocalCoordinator, local_coordinator
from tests.support.local_volunteer import LocalMachine
from tests.support.scripted_worker import Player

RUN = """
name = "gomoku"
workload = "gomoku"
[model]
size = 5
win = 4
blocks = 1
channels = 8
[task]
local_steps = 4
batch_size = 16
[plan]
codec = "float32"
[task.options]
games = 4
simulations = 16
slots = 4
window = 64
window_min = 4
chunk = 4
queue = 16
match_games = 4
match_simulations = 16
"""


@asynccontextmanager
async def selfplay_machine(path: Path, text: str = RUN) -> AsyncIterator[LocalMachine]:
    """A run of games, and a whole machine that has joined it."""
    async with local_coordinator(path / "coordinator") as home:
        await home.coordinator.runs.create(text)
        await home.coordinator.runs.start("gomoku")
        async with home.coordinator.working():
            machine = LocalMachine(path / "machine", home)
            await machine.join()
            yield machine


async def history(home: LocalCoordinator) -> tuple[VersionInfo, ...]:
    return await home.coordinator.runs.queries.versions("gomoku")


async def player(home: LocalCoordinator, name: str) -> Player:
    return Player(home, await home.join(name, workloads=["gomoku"]))


async def harvested(home: LocalCoordinator) -> list[GameRecord]:
    """The good games of the newest contribution with games."""
    newest = select(harvests.c.sha256).order_by(harvests.c.contribution_id.desc()).limit(1)
    sha256 = await home.coordinator.db.read(lambda conn: str(conn.execute(newest).scalar_one()))
    return read_games((await home.coordinator.blobs.local(sha256)).read_bytes())
