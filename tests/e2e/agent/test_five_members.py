"""Five machines with files of their own, unlike each other's: one has nine tenths of them, one a
single sample, one is killed, one's copies are damaged. All are real processes; a proxy records
every byte to the server, and where the kernel allows it every packet is captured too.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from typing_extensions import override

from coordinator.config import Settings
from coordinator.http.app import opened
from tests.benchmarks.peers.counting import CountingProxy, running
from tests.e2e.agent.test_volunteer import WAIT_S, Machine, Working
from tests.support.forkserver import ForkServer
from tests.support.local_coordinator import RUN, LocalCoordinator
from tests.support.packets import captured
from tests.support.server_process import Process, command
from tests.support.virtual_clock import VirtualClock

NAMES = ("Ann", "Ben", "Cat", "Dan", "Eve")
MEMBERS = (
    RUN.replace("quorum = 2", "quorum = 3\ndeadline_seconds = 20").replace(
        "local_steps = 2", "local_steps = 20"
    )
    + '[data]\nat = "members"\n[evaluation]\nevery = 1000\n'
)
MARK = "zq7canary"
LINES = 4000  # marked notes in all
PAGES = ("/", "/runs/tiny", "/metrics")


class Tap(CountingProxy):
    """TCP proxy that keeps every byte that clients send."""

    def __init__(self, target: int) -> None:
        super().__init__(target)
        self.sent = bytearray()

    @override
    def passed(self, data: bytes, up: bool) -> None:
        super().passed(data, up)
        if up:
            self.sent += data


class Watched:
    """A volunteer at work whose lines a thread reads, so that it never waits for its reader."""

    def __init__(self, working: Working) -> None:
        self.child = working.child
        self.trains, self.merged, self._over = (threading.Event() for _ in range(3))
        self.lacks_data = threading.Event()
        self._last = ""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.child.stdout is not None
        for line in self.child.stdout:
            self._last = line
            event = msgspec.json.decode(line)
            if event["type"] == "TaskEnded" and "are damaged: `volunteer" in event["message"]:
                assert event["how"] == "released"
                self.lacks_data.set()
            if event["type"] == "Training":
                self.trains.set()
            if event["type"] == "Judged" and event["verdict"]["state"] == "merged":
                self.merged.set()
        self._over.set()
        for awaited in (self.merged, self.trains, self.lacks_data):
            awaited.set()

    def until(self, awaited: threading.Event) -> None:
        """Wait for an event of this machine, such as `merged`: its contribution was."""
        assert awaited.wait(WAIT_S)
        assert not self._over.is_set(), self._last


def files(path: Path, member: int, lines: int) -> Path:
    """Marked notes about one member's own subject; without lines, two of a word each, of which one
    is kept back.
    """
    path.mkdir()
    if not lines:
        for number in range(2):
            (path / f"{MARK} {number}.txt").write_text(f"{MARK} {number}")
        return path
    rng = random.Random(member)
    words = [f"{chr(97 + member) * 3}{rng.randrange(1000)}" for _ in range(20)]
    for number in range(max(2, lines // 50)):
        text = [f"{MARK} {' '.join(rng.sample(words, 4))}\n" for _ in range(lines)[:50]]
        (path / f"{MARK} {number}.txt").write_text("".join(text))
    return path


def answered(fork_server: ForkServer, machine: Machine, *words: str) -> dict[str, Any]:
    """Return the JSON of a command on a machine."""
    with fork_server.piped(["volunteer", *words, "--json"], machine.environment) as process:
        out, errors = process.communicate()
        assert process.wait(WAIT_S) == 0, errors
    fields: dict[str, Any] = msgspec.json.decode(out)
    return fields


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data directory of a coordinator with a run over members' data."""
    path = tmp_path_factory.mktemp("prepared") / "coordinator"
    settings = Settings(data_dir=str(path), space_floor_bytes=0)

    async def prepare() -> None:
        async with opened(settings) as coordinator:
            await LocalCoordinator(coordinator, VirtualClock()).start_run(MEMBERS)

    asyncio.run(prepare())
    return path


def joined(fork_server: ForkServer, machine: Machine, link: str, member: int, folder: Path) -> int:
    """Let a machine join with its own files; return the samples of a pass."""
    answered(fork_server, machine, "join", link, "--name", NAMES[member])
    fields = answered(fork_server, machine, "data", "add", "tiny", str(folder), "--yes")
    return int(fields["samples"])


def damage(home: Path) -> None:
    """Overwrite the copies of the data on a machine, as a failing disk does."""
    copies = [path for path in home.rglob("members/*/*/*") if len(path.name) == 64]
    assert copies
    for path in copies:
        path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.slow
def test_five_members_learn_together_and_nothing_of_theirs_is_anywhere_else(
    prepared: Path, tmp_path: Path, fork_server: ForkServer
) -> None:
    place = tmp_path / "coordinator"
    shutil.copytree(prepared, place)
    machines = [Machine(tmp_path / name, fork_server) for name in NAMES]
    with ExitStack() as stack:
        server = stack.enter_context(Process(place, "--port", "0", command=fork_server))
        packets = stack.enter_context(captured(server.port))
        tap = stack.enter_context(running(Tap(server.port)))
        link = server.link.replace(f":{server.port}/", f":{tap.port}/")
        folders = [
            files(tmp_path / f"{MARK} {member}", member, lines)
            for member, lines in enumerate((LINES - 300, 100, 100, 100, 0))
        ]
        shares = [
            joined(fork_server, machine, link, member, folders[member])
            for member, machine in enumerate(machines)
        ]
        assert shares[0] >= 0.9 * sum(shares)
        assert shares[4] == 1
        damage(tmp_path / NAMES[3])
        work = [Watched(stack.enter_context(machine.working())) for machine in machines]
        work[1].until(work[1].trains)
        work[1].child.send_signal(signal.SIGKILL)
        work[3].until(work[3].lacks_data)
        for watched in (work[0], work[2], work[4]):  # the run goes on
            watched.until(watched.merged)
        answered(fork_server, machines[3], "data", "add", "tiny", str(folders[3]), "--yes")
        again = Watched(stack.enter_context(machines[1].working()))  # with its own data, as before
        for watched in (work[3], again):
            watched.until(watched.merged)
        for watched in (*work, again):
            watched.child.kill()
        to = tmp_path / "taken home"
        tuned = answered(fork_server, machines[1], "export", "tiny", "--tune", "--to", str(to))
        assert tuned["steps"] >= 1
        pages = [httpx.get(f"{server.url}{path}").content for path in PAGES]
        assert server.stop() == 0
        written = "".join(server.errors).encode()
    checked = command("check", "--data-dir", str(place))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    stored = [path.read_bytes() for path in place.rglob("*") if path.is_file()]
    assert b"loss_first" in tap.sent  # the bytes that are searched hold the submissions
    assert b"loss_first" in packets.data or packets.refusal
    assert all(b"tiny" in page for page in pages)
    for data in (bytes(tap.sent), bytes(packets.data), written, *pages, *stored):
        assert MARK.encode() not in data
