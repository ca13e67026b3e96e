"""Teams by the commands of volunteers and of the organiser, on a real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from shared.protocol.accounts import ServerInfo
from tests.e2e.pages.test_pages import text
from tests.support.local_coordinator import LocalCoordinator, Worker, local_coordinator
from tests.support.rounds import MergeRounds
from tests.support.served import served
from tests.support.server_process import command
from volunteer.account.profile import Identity, Profile
from volunteer.cli.main import run_command
from volunteer.settings.settings import directories

Run = Callable[..., Awaitable[tuple[int, str, str]]]


async def keep(home: LocalCoordinator, url: str, worker: Worker, profile: str) -> None:
    """Store an account as `volunteer join` does."""
    server: ServerInfo = await home.coordinator.server.info()
    identity = Identity(
        url=url, tls_pin="", public_key=server.public_key, fingerprint=server.fingerprint,
        server=server.name, volunteer_id=worker.volunteer_id, worker_id=worker.worker_id,
        secret=worker.secret, nickname=worker.name, registered=True,
    )  # fmt: skip
    Profile(directories(profile=profile).profile).use(identity)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command of a volunteer; the log of the server stands above what it prints."""

    async def call(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = await asyncio.to_thread(run_command, list(words))
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


async def test_a_team_from_its_founding_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.setenv("VOLUNTEER_HOME", str(tmp_path / "home"))
    async with local_coordinator(tmp_path / "server") as home:
        name = await home.start_run()
        mia, bob = await home.join("Mia"), await home.join("Bob")
        async with served(home, ticking=False) as url:
            await keep(home, url, mia, "")
            await keep(home, url, bob, "bob")
            code, _, err = await run("team", "create", "Owls")
            assert code == 1
            assert "merged contribution" in err
            await MergeRounds(home, name, (mia, bob), lambda: 0.0).round(1)
            code, out, _ = await run("team", "create", "Owls")
            assert code == 0
            secret = out.partition("volunteer team join ")[2].partition("`")[0]
            code, out, err = await run("team", "join", "nonsense", "--profile", "bob")
            assert code == 1
            assert "code" in err
            code, out, _ = await run("team", "join", secret, "--profile", "bob")
            assert code == 0
            assert "Mia" in out
            assert "Bob (you)" in out
            await MergeRounds(home, name, (mia, bob), lambda: 0.0).round(20)
            await home.clock.advance(60.0)
            said = (await run("team", "show", "--json"))[1].splitlines()
            shown = json.loads(next(line for line in said if line.startswith("{")))
            assert (shown["name"], shown["rank"], shown["size"]) == ("Owls", 1, 2)
            assert shown["earned_micro"] == 2 * shown["mine_micro"] > 0

            async with httpx.AsyncClient(base_url=url) as client:
                assert "1 Owls" in text(await client.get("/leaderboard?by=team"))
                assert "Members 2" in text(await client.get("/teams/Owls"))

            code, out, _ = await run("team", "leave", "--profile", "bob")
            assert (code, "you are in no team" in out) == (0, True)
            assert "no team" in (await run("team", "show", "--profile", "bob"))[1]
            token = home.coordinator.settings.admin_token_file
            where = ("--server", url, "--token-file", str(token))
            await asyncio.to_thread(command, "team", "rename", "Owls", "Larks", *where)
            assert "\nLarks\n" in (await run("team", "show"))[1]
