"""Several servers on one PostgreSQL: one identity, one invite, and what a stranger among them is
told.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from coordinator.config import Settings
from coordinator.database import key_values
from coordinator.database.engine.open_database import Database
from coordinator.http.server import welcome
from coordinator.services import opened
from shared.errors import Configuration
from shared.proofs.signing import SigningKey
from tests.e2e.conftest import Commanded, Forked
from tests.support.balancer import balanced
from tests.support.databases import Postgres, _run
from tests.support.server_process import COORDINATOR
from tests.support.tmux_screen import TmuxScreen

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("process_as_it_was")]


@pytest.fixture
def shared(postgres: Postgres, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """The options that name one database and one blob store."""
    url = _run(postgres.fresh())
    yield "--database=" + url, f"--blobs={tmp_path / 'blobs'}"
    _run(postgres.recycle(url))


def settings(shared: tuple[str, str], data_dir: Path) -> Settings:
    """Return the settings of a replica that others reach."""
    database, blobs = (option.partition("=")[2] for option in shared)
    url = "https://train.example.org"
    return Settings(data_dir=str(data_dir), database=database, blobs=blobs, url=url)


async def first_replica(shared: tuple[str, str], data_dir: Path) -> list[str]:
    """Start on an empty database; return what the organiser is told."""
    async with opened(settings(shared, data_dir)) as coordinator:
        return await welcome(coordinator)


async def test_a_replica_without_the_key_or_with_another_ends_with_78(
    shared: tuple[str, str], tmp_path: Path, commanded: Commanded
) -> None:
    await first_replica(shared, tmp_path / "r1")
    bare = tmp_path / "r2"
    refused = commanded("serve", *shared, "--port=0", f"--data-dir={bare}")
    assert refused.returncode == 78, refused.stderr
    assert "copy signing.key" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not any(bare.glob("*.key")), "nothing makes a key on a database that has one"
    assert not any(bare.glob("*.token"))
    SigningKey.load_or_create(bare / "signing.key")
    refused = commanded("serve", *shared, "--port=0", f"--data-dir={bare}")
    assert refused.returncode == 78
    assert "belongs to the key" in refused.stderr


async def test_a_server_or_command_with_another_store_ends_with_78(
    shared: tuple[str, str], tmp_path: Path, commanded: Commanded, forked: Forked
) -> None:
    home, text = f"--data-dir={tmp_path / 'r1'}", tmp_path / "text.txt"
    text.write_text("one and one is two\n" * 500)
    add = ("dataset", "add", "sums", f"--text={text}", "--licence=CC0-1.0", "--source=me", home)
    with forked(tmp_path / "r1", *shared, "--port=0"):
        pass
    for command in (("serve", "--port=0", home), add):
        refused = commanded(*command, shared[0])
        assert refused.returncode == 78, refused.stderr
        assert "is not the blob store of this database" in refused.stderr
    assert commanded(*add, *shared).returncode == 0
    assert commanded("run", "list", home, shared[0]).returncode == 0
    (tmp_path / "blobs" / "owner").unlink()  # a store and a database that lost their marks
    database = await Database.open(shared[0].partition("=")[2])
    for name in (key_values.STORE, key_values.STORE_MARKED):
        await database.write(partial(key_values.delete_key, key=name, reason="asked"))
    await database.close()
    assert commanded("serve", "--port=0", home, shared[0]).returncode == 78
    with forked(tmp_path / "r1", *shared, "--port=0"):
        pass
    with forked(tmp_path / "r2", "--port=0"):
        pass
    strange = commanded("serve", "--port=0", f"--data-dir={tmp_path / 'r2'}", shared[1])
    assert strange.returncode == 78
    assert "is the blob store of the key" in strange.stderr


async def test_the_key_alone_makes_an_equal_replica(
    shared: tuple[str, str], tmp_path: Path
) -> None:
    lines = await first_replica(shared, tmp_path / "r1")
    other = tmp_path / "r2"
    other.mkdir()
    shutil.copy(tmp_path / "r1" / "signing.key", other)
    async with opened(settings(shared, other)) as coordinator:
        join = [line for line in lines if "volunteer join" in line]
        assert [line for line in await welcome(coordinator) if "volunteer join" in line] == join
        assert len(await coordinator.volunteers.invites.list()) == 1
    for name in ("admin.token", "metrics.token"):
        assert (other / name).read_bytes() == (tmp_path / "r1" / name).read_bytes()
        assert (other / name).stat().st_mode & 0o777 == 0o600
    (other / "admin.token").write_text("a token that somebody chose for this replica\n")
    with pytest.raises(Configuration, match="delete the file"):
        await first_replica(shared, other)


async def test_tokens_are_made_anew_on_purpose_only(
    shared: tuple[str, str], tmp_path: Path, commanded: Commanded
) -> None:
    await first_replica(shared, tmp_path)
    token = (tmp_path / "admin.token").read_bytes()
    (tmp_path / "admin.token").unlink()
    await first_replica(shared, tmp_path)
    assert (tmp_path / "admin.token").read_bytes() == token
    done = commanded("migrate", "--new-tokens", shared[0], f"--data-dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "admin.token").read_bytes() != token
    await first_replica(shared, tmp_path)


async def test_a_command_that_signs_nothing_needs_the_database_alone(
    shared: tuple[str, str], tmp_path: Path, commanded: Commanded
) -> None:
    await first_replica(shared, tmp_path / "r1")
    listed = commanded("volunteer", "list", shared[0], XDG_DATA_HOME=str(tmp_path / "none"))
    assert listed.returncode == 0, listed.stderr


async def test_a_replica_that_stops_is_left_out_before_it_refuses(
    shared: tuple[str, str], tmp_path: Path, forked: Forked
) -> None:
    await first_replica(shared, tmp_path / "r1")
    (tmp_path / "r2").mkdir()
    shutil.copy(tmp_path / "r1" / "signing.key", tmp_path / "r2")
    options = (*shared, "--port=0", "--log-level=warning")
    with forked(tmp_path / "r1", *options) as one, forked(tmp_path / "r2", *options) as two:
        async with balanced(one.port, two.port) as url, httpx.AsyncClient(base_url=url) as client:
            one.signal(signal.SIGTERM)
            statuses = []
            while one.child.poll() is None:
                async with httpx.AsyncClient(base_url=one.url) as direct:
                    try:
                        ready = (await direct.get("/ready")).status_code
                    except httpx.HTTPError:
                        ready = 0
                statuses.append((ready, (await client.get("/api/v1/server")).status_code))
                await asyncio.sleep(0.05)
            assert {status for _, status in statuses} == {200}
            assert 503 in {ready for ready, _ in statuses}
            assert one.ended() == 0
            two.signal(signal.SIGKILL)


FORGOTTEN_S = 120.0


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
async def test_the_monitor_names_a_frozen_replica_at_80_columns_and_forgets_it_by_a_key(
    shared: tuple[str, str], tmp_path: Path, forked: Forked, commanded: Commanded
) -> None:
    await first_replica(shared, tmp_path / "r1")
    for name in ("r2", "r3"):
        (tmp_path / name).mkdir()
        shutil.copy(tmp_path / "r1" / "signing.key", tmp_path / name)
    options = (*shared, "--port=0", "--log-level=warning")
    home = f"--data-dir={tmp_path / 'r1'}"
    with (
        forked(tmp_path / "r1", *options) as one,
        forked(tmp_path / "r2", *options) as two,
        forked(tmp_path / "r3", *options) as three,
        TmuxScreen([*COORDINATOR, "top", *shared, home], 80, 24) as screen,
    ):
        screen.see("f forget servers that are gone   q quit")
        screen.see("no run is running")
        three.signal(signal.SIGSTOP)
        frozen = time.monotonic()
        named = f"server: {three.url} has been silent for"
        screen.see(named)
        while f"{three.url} has been silent" not in (
            said := commanded("alerts", "list", *shared).stdout
        ):
            assert time.monotonic() - frozen < FORGOTTEN_S, said
            await asyncio.sleep(1.0)
        screen.press("f")
        while three.url in "\n".join(screen.rows()):
            assert time.monotonic() - frozen < FORGOTTEN_S, screen.rows()
            await asyncio.sleep(0.5)
        three.signal(signal.SIGCONT)
        screen.press("q")
        for server in (one, two, three):
            assert server.stop() == 0
