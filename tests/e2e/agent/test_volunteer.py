"""The volunteer's program as people and scripts run it: real processes, real sockets, signals and
crashes.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coordinator.config import Settings
from coordinator.http.app import opened
from shared.clock import SystemClock
from tests.support.forkserver import ForkServer, Piped
from tests.support.local_coordinator import RUN, LocalCoordinator
from tests.support.server_process import Process, command
from tests.support.virtual_clock import VirtualClock
from volunteer.control import commands
from volunteer.control.local_socket import attach
from volunteer.settings.settings import directories

VOLUNTEER = [sys.executable, "-c", "from volunteer.__main__ import main; main()"]
LONG = RUN.replace("local_steps = 2", "local_steps = 1500").replace("quorum = 2", "quorum = 1")
WAIT_S = 150.0
MODULES_MAX = 500  # that --help loads, cyclopts and rich among them


class Machine:
    """A machine with a home directory of its own."""

    def __init__(self, path: Path, fork_server: ForkServer | None = None) -> None:
        self._fork_server = fork_server
        self.environment = os.environ | {
            "VOLUNTEER_HOME": str(path),
            "VOLUNTEER_DEVICE": "cpu",
            "VOLUNTEER_THREADS": "1",
            "VOLUNTEER_PRIORITY": "normal",
            "PYTHONFAULTHANDLER": "1",
        }
        self.environment.pop("VOLUNTEER_JOIN", None)

    def run(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*VOLUNTEER, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=self.environment | more,
            timeout=WAIT_S,
        )

    def retry(self) -> None:
        """Retry as the key `r` on the screen does."""

        async def ask() -> None:
            place = directories(self.environment).profile / "control.json"
            async with attach(place, SystemClock()) as control:
                await control.do(commands.Retry())

        asyncio.run(ask())

    @contextmanager
    def working(self, *words: str, **more: str) -> Iterator[Working]:
        assert self._fork_server is not None
        line = ["volunteer", "--no-ui", "--json", *words]
        child = self._fork_server.piped(line, self.environment | more)
        patience = threading.Timer(WAIT_S, child.send_signal, [signal.SIGABRT])
        patience.start()  # so that a test which waits for too long fails, with a trace
        with child:
            try:
                yield Working(child)
            finally:
                patience.cancel()
                child.kill()


class Working:
    """A volunteer at work, and its lines."""

    def __init__(self, child: Piped) -> None:
        self.child = child
        self.told: list[dict[str, Any]] = []

    def until(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Read on to the next event of a kind with these fields."""
        assert self.child.stdout is not None
        for line in self.child.stdout:
            event: dict[str, Any] = msgspec.json.decode(line)  # nothing but data on stdout
            self.told.append(event)
            if event["type"] == kind and all(event[key] == fields[key] for key in fields):
                return event
        raise AssertionError(f"it ended without {kind}: {self.told[-3:]} {self.complaints()}")

    def complaints(self) -> str:
        assert self.child.stderr is not None
        return self.child.stderr.read()

    def ended(self) -> int:
        assert self.child.stdout is not None
        self.told += [msgspec.json.decode(line) for line in self.child.stdout]
        return self.child.wait(WAIT_S)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data directory of a coordinator with one run of long tasks."""
    path = tmp_path_factory.mktemp("prepared") / "coordinator"

    async def prepare() -> None:
        async with opened(Settings(data_dir=str(path), space_floor_bytes=0)) as coordinator:
            await LocalCoordinator(coordinator, VirtualClock()).start_run(LONG)

    asyncio.run(prepare())
    return path


@pytest.fixture
def server(prepared: Path, tmp_path: Path, fork_server: ForkServer) -> Iterator[Process]:
    shutil.copytree(prepared, tmp_path / "coordinator")
    with Process(tmp_path / "coordinator", "--port", "0", command=fork_server) as process:
        yield process


@pytest.fixture
def machine(tmp_path: Path, fork_server: ForkServer) -> Machine:
    return Machine(tmp_path / "machine", fork_server)


@pytest.mark.slow
def test_from_the_link_to_the_first_credits(
    server: Process, machine: Machine, tmp_path: Path
) -> None:
    joined = machine.run("join", server.link, "--name", "Ann", "--json")
    assert joined.returncode == 0, joined.stderr
    assert msgspec.json.decode(joined.stdout)["nickname"] == "Ann"
    again = machine.run("join", server.link)
    assert 'already joined, "Ann"' in again.stdout
    assert "nickname stays" not in again.stdout
    assert "the nickname stays" in machine.run("join", server.link, "--name", "Bob").stdout
    with machine.working("--max-tasks", "1") as work:
        work.until("Training")
        status = machine.run("status", "--json")
        assert msgspec.json.decode(status.stdout)["tasks"][0]["run"] == "tiny"
        second = machine.run("--no-ui")
        assert second.returncode == 75  # a service tries again, and begins once this one has ended
        assert "already at work" in second.stderr
        assert machine.run("pause").stdout == "paused; continue with `volunteer resume`\n"
        work.until("Paused", by="you")
        assert "paused by you; continue with `volunteer resume`" in machine.run("status").stdout
        assert machine.run("resume").returncode == 0
        assert work.ended() == 0
        assert {event["verdict"]["state"] for event in work.told if event["type"] == "Judged"} & {
            "accepted",
            "merged",
        }
        assert work.told[-1]["type"] == "Stopped"
        assert work.complaints() == ""
    place = ["--data-dir", str(tmp_path / "coordinator")]
    assert server.stop() == 0
    checked = command("check", *place)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.slow
def test_a_crash_keeps_the_task_a_signal_gives_it_back_a_second_ends_at_once(
    server: Process, machine: Machine
) -> None:
    join = {"VOLUNTEER_JOIN": server.link}
    with machine.working(VOLUNTEER_SNAPSHOT_SECONDS="0.2", **join) as work:
        work.until("Training")
        doing = work.until("Training")["task"]
        work.child.send_signal(signal.SIGKILL)
    with machine.working(**join) as work:
        claimed = work.until("Claimed")
        assert (claimed["task"], claimed["attempt"]) == (doing, 1)
        work.until("Training")
        work.child.send_signal(signal.SIGTERM)
        assert work.ended() == 0
        ended = [event for event in work.told if event["type"] == "TaskEnded"]
        assert (ended[0]["task"], ended[0]["how"]) == (doing, "released")
        assert "a second signal exits at once" in work.complaints()
    with machine.working() as work:
        work.until("Training")
        work.until("Training")
        work.child.send_signal(signal.SIGINT)
        assert work.child.stderr is not None
        assert "SIGINT" in work.child.stderr.readline()  # it waits for the task
        work.child.send_signal(signal.SIGINT)
        assert work.ended() == 1


@pytest.mark.slow
def test_training_goes_on_while_the_coordinator_is_away(
    server: Process, machine: Machine, tmp_path: Path, fork_server: ForkServer
) -> None:
    with machine.working("--max-tasks", "1", VOLUNTEER_JOIN=server.link) as work:
        work.until("Training")
        assert server.stop() == 0
        away = work.until("Connection", online=False, queued=1)
        assert away["retry_at"] > away["at"]
        assert "1 result waits" in machine.run("status").stdout
        port = str(server.port)
        with Process(tmp_path / "coordinator", "--port", port, command=fork_server):
            machine.retry()
            work.until("Submitted")
            assert work.ended() == 0


# What needs no coordinator.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["--no-ui"], 78, "joined no coordinator yet"),
        ([], 2, "use `volunteer --no-ui`"),
        (["status"], 75, "no volunteer is running"),
        (["pause"], 75, "no volunteer is running"),
        (["link"], 78, "joined no coordinator yet"),
        (["join", "not a link"], 2, "is not a link: a join link begins"),
        (["join", "http://203.0.113.9:1/join"], 2, "without encryption"),
        (["join", "nonsense"], 2, '"nonsense" is not a link'),
        (["--no-ui", "--set", "thread=1"], 2, 'did you mean "threads"'),
        (["--no-ui", "--max-tasks", "-1"], 2, "Must be >= 1"),
        (["--no-ui", "--set", "threads"], 2, "NAME=VALUE"),
        (["--no-ui", "--threads", "many"], 2, "many"),
        (["no-such-command"], 2, "no-such-command"),
    ],
)
def test_bad_input_gets_a_sentence_and_a_code(
    tmp_path: Path, words: list[str], code: int, sentence: str
) -> None:
    done = Machine(tmp_path).run(*words)
    assert done.returncode == code, done.stderr
    assert sentence in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_help_is_quick_and_loads_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from volunteer.cli.main import run_command\n"
        "assert run_command(['--help']) == 0\n"
        "heavy = {'torch', 'textual', 'numpy', 'httpx', 'cryptography'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "print('modules', len(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.rpartition("modules ")[2]) < MODULES_MAX
