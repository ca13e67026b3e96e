"""Playing against a version of a run: fetched from a whole coordinator, checked, and asked on a
thread of its own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shared.clock import SystemClock
from shared.errors import BadRequest, BadSignature, NotFound
from tests.support.local_coordinator import LocalCoordinator, local_coordinator
from tests.support.local_volunteer import URL, LocalMachine, Network
from tests.support.selfplay_run import RUN
from volunteer.account.profile_directory import Identity, Profile
from volunteer.net.api import Api
from volunteer.net.client import Client
from volunteer.net.tls import Address
from volunteer.opponent import VersionOpponent

Sit = Callable[..., VersionOpponent]


@asynccontextmanager
async def asking(home: LocalCoordinator, path: Path) -> AsyncIterator[tuple[Api, Identity]]:
    """A machine that has joined, and its way to the coordinator."""
    machine = LocalMachine(path / "machine", home)
    await machine.join()
    identity = Profile(machine.directories.profile).current()
    assert identity is not None
    client = Client(
        Address(url=URL, tls_pin=""),
        clock=SystemClock(),
        token=identity.token,
        transport=Network(home.transport),
    )
    try:
        yield Api(client), identity
    finally:
        await client.close()


def rival(
    api: Api, identity: Identity, path: Path, run: str = "gomoku", key: str | None = None
) -> VersionOpponent:
    return VersionOpponent(
        api,
        run,
        public_key=key if key is not None else identity.public_key,
        enabled=("gpt", "gomoku"),
        directory=path / "cache",
    )


async def test_a_version_sits_down_answers_and_gives_hints(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path / "coordinator") as home:
        await home.coordinator.runs.create(RUN)
        await home.coordinator.runs.start("gomoku")
        async with asking(home, tmp_path) as (api, identity):
            one = rival(api, identity, tmp_path)
            seated = await one.sit()
            assert (seated.version, seated.newest, seated.size, seated.win) == (0, 0, 5, 4)
            reply = await one.reply([12], 0)
            assert one.look([12, reply.move]).board.count(0) == 23
            # One move from a row of four, on either side of the board.
            assert (await one.reply([0, 20, 1, 21, 2, 22], 2)).move == 3
            won = one.look([0, 20, 1, 21, 2, 22, 3])
            assert (won.over, won.winner, won.row) == (True, 1, (0, 1, 2, 3))
            for moves in ([12, 12], [25], [0, 20, 1, 21, 2, 22, 3, 4]):
                with pytest.raises(BadRequest):
                    one.look(moves)
            with pytest.raises(NotFound):
                await one.sit(9)
            assert (await one.reply([12], 0)) == reply  # who sat there still does
            one.close()


async def test_nobody_plays_for_a_run_without_games_or_in_the_name_of_another(
    tmp_path: Path,
) -> None:
    async with local_coordinator(tmp_path / "coordinator") as home:
        await home.start_run()
        async with asking(home, tmp_path) as (api, identity):
            with pytest.raises(BadRequest, match='"tiny" writes text'):
                await rival(api, identity, tmp_path, "tiny").sit()
            with pytest.raises(NotFound):
                await rival(api, identity, tmp_path, "chess").sit()
            with pytest.raises(BadSignature):
                await rival(api, identity, tmp_path, "tiny", key="00" * 32).sit()
            with pytest.raises(BadRequest, match="nobody sits"):
                rival(api, identity, tmp_path).look([])
