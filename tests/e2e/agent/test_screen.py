"""The screen before a real coordinator and a real task: from the first key to the last, the
terminal is left as it was.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.forkserver import ForkServer
from tests.support.local_coordinator import RUN
from tests.support.server_process import Process, command
from tests.tui.terminal import Terminal

VOLUNTEER = [sys.executable, "-c", "from volunteer.__main__ import main; main()"]
PLAN = RUN.replace("local_steps = 2", "local_steps = 1000").replace("quorum = 2", "quorum = 1")
PAGES = (
    ("2", "helping: tiny", "for you"),
    ("3", "Devices", "training"),
    ("4", "Contributions", "balance"),
    ("5", "Ranks", "no credits were earned"),
    ("6", "When to work", "unused after"),
    ("7", "what happened", "following"),
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> Iterator[Process]:
    """A coordinator with one run, whose tasks take some seconds."""
    home = tmp_path_factory.mktemp("coordinator")
    place = ["--data-dir", str(home / "data")]
    words = home / "sums.txt"
    words.write_text("".join(f"{n} plus {n} is {n + n};\n" for n in range(4000)))
    (home / "run.toml").write_text(PLAN)
    for line in (
        ["dataset", "add", "sums", "--text", str(words), "--vocab-size", "300"],
        ["run", "create", str(home / "run.toml")],
        ["run", "start", "tiny"],
    ):
        done = command(*line, *place)
        assert done.returncode == 0, done.stderr
    with Process(home / "data", "--port", "0", command=fork_server) as serving:
        yield serving
        assert serving.stop() == 0
    assert command("check", *place).returncode == 0


def volunteer(home: Path, **more: str) -> Terminal:
    settings = {"VOLUNTEER_HOME": str(home), "VOLUNTEER_DEVICE": "cpu", "VOLUNTEER_THREADS": "1"}
    return Terminal(VOLUNTEER, **settings, **more)


@pytest.mark.slow
def test_from_the_first_key_to_the_last(tmp_path: Path, server: Process) -> None:
    with volunteer(tmp_path) as screen:
        screen.see("Which coordinator do you want to help?", "paste your join link")
        screen.press(server.link)
        screen.see("as your link says", "enter: next")
        screen.press("\r")
        screen.see("What shall we call you?", "What is sent")
        screen.press("ada\r")
        screen.see("What may volunteer use?", "processor threads")
        screen.press("\r")
        screen.see("welcome, ", "ada", "s: skip")  # it measures
        screen.press("s")
        screen.see("enter: next")
        screen.press("\r")
        screen.see("Which run do you want to help?", "any run", "tiny")
        screen.press("\x1b[B\r")
        screen.see("Everything is ready.", "ENTER  to start")
        screen.press("\r")
        screen.see("Loss of the model", "● train", "step ")
        screen.press(" ")
        screen.see("‖ paused", "press space to resume")
        for key, *words in PAGES:
            screen.press(key)
            screen.see(*words)
        screen.press("1")
        screen.see("‖ paused", "Loss of this task")
        screen.press(" ")
        screen.see("● training")
        screen.press("f")
        screen.see("● finishing")
        screen.see("finished", "accepted")
        screen.press("q")
        assert screen.ended() == 0
        assert screen.left_as_found()
        assert "1 task submitted" in screen.text  # on the screen that was there before


@pytest.mark.slow
def test_a_signal_while_it_trains_gives_the_task_back(tmp_path: Path, server: Process) -> None:
    with volunteer(tmp_path, VOLUNTEER_JOIN=server.link) as screen:
        screen.see("Loss of the model", "● train", "step ")
        assert not screen.left_as_found()
        screen.child.send_signal(signal.SIGTERM)
        assert screen.ended() == 0
        assert screen.left_as_found()


@pytest.mark.slow
def test_who_joined_before_is_asked_before_anything_is_measured(
    tmp_path: Path, server: Process
) -> None:
    settings = {**os.environ, "VOLUNTEER_HOME": str(tmp_path)}
    joined = [*VOLUNTEER, "join", server.link, "--name", "grace"]
    subprocess.run(joined, env=settings, check=True, capture_output=True)
    with volunteer(tmp_path) as screen:
        screen.see("What may volunteer use?", "processor threads")
        assert list(tmp_path.rglob("memory.json")) == []  # where figures would be kept
        screen.press("\r")
        screen.see("welcome, ", "s: skip")
        screen.press("s")
        screen.see("enter: next")
