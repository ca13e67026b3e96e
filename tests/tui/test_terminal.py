"""However the program ends, the terminal is as it was."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import psutil
import pytest

from tests.support.sources import ROOT
from tests.tui.terminal import Terminal
from volunteer.account.instance_lock import instance_lock
from volunteer.account.profile_directory import Profile
from volunteer.cli import start
from volunteer.settings.settings import directories

PROGRAM = """
import asyncio, os, signal, sys
from shared.clock import SystemClock
from volunteer.control import commands, events
from volunteer.control.control import Control
from volunteer.control.event_bus import EventBus
from volunteer.tui.app import VolunteerApp
from volunteer.tui.screens.run_keys import lend_terminal

hub = EventBus(SystemClock())

async def obey(command):
    if isinstance(command, commands.Stop):
        hub.notice("stop by " + command.how)
        if WAY != "slow":
            hub.emit(events.Stopped(code=0, message="ended", tasks=0, credits_micro=0,
                                    sent_bytes=0, received_bytes=0, seconds=0.0))
            hub.close()
    if isinstance(command, commands.Finish):
        raise RuntimeError("a fault in our own code")

WAY = sys.argv[1]

async def main():
    screen = VolunteerApp(Control(hub, obey))
    if WAY == "busy":
        def draw_much():
            for _ in range(100):
                screen._driver.write(".")
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, draw_much)
    if WAY == "lent":
        chat = "print('chat of a model', flush=True); input()"

        async def lend():
            await lend_terminal(screen, [sys.executable, "-c", chat])

        def begin_chat():
            screen.run_worker(lend())
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, begin_chat)
    code = await screen.run_async()
    sys.stdout.flush()
    os._exit(screen.return_code or code or 0)

asyncio.run(main())
"""


BOARD = """
import asyncio
from volunteer.tui.play.app import PlayApp

class Opponent:
    async def sit(self, version=None):
        await asyncio.Event().wait()

asyncio.run(PlayApp(Opponent(), "a-game").run_async())
"""


def run(way: str = "quick", errors: IO[bytes] | None = None) -> Terminal:
    return Terminal([sys.executable, "-c", PROGRAM, way], None, errors, PYTHONPATH=str(ROOT))


def test_after_q() -> None:
    with run() as terminal:
        terminal.see("Loss of the model")
        terminal.written(b"\x1b[22;2t", "\x1b]2;volunteer · starting\x07".encode())  # a title
        assert not terminal.left_as_found()
        terminal.press("q")
        assert terminal.ended() == 0
        terminal.written(b"\x1b[23;2t")
        assert terminal.left_as_found()


def test_with_standard_error_in_a_file_the_screen_is_drawn_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "errors"
    with path.open("wb") as errors, run(errors=errors) as terminal:
        terminal.see("Loss of the model")
        terminal.press("q")
        assert terminal.ended() == 0
        assert terminal.left_as_found()
    assert path.read_bytes() == b""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_after_a_signal(number: signal.Signals) -> None:
    with run() as terminal:
        terminal.see("Loss of the model")
        os.kill(terminal.child.pid, number)
        assert terminal.ended() == 0
        assert terminal.left_as_found()


def test_a_program_that_has_the_terminal_is_stopped_and_continued() -> None:
    with run("lent") as terminal:
        terminal.see("Loss of the model")
        terminal.press("")
        os.kill(terminal.child.pid, signal.SIGUSR1)
        terminal.see("chat of a model")
        os.killpg(terminal.child.pid, signal.SIGTSTP)
        terminal.stopped()
        os.killpg(terminal.child.pid, signal.SIGCONT)
        terminal.press("\r")  # the enter key, which ends a line only outside of the raw mode
        terminal.see("Loss of the model")
        terminal.press("q")
        assert terminal.ended() == 0
        assert terminal.left_as_found()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_board_after_a_signal(number: signal.Signals) -> None:
    with Terminal([sys.executable, "-c", BOARD], PYTHONPATH=str(ROOT)) as terminal:
        terminal.see("downloading the version")
        os.kill(terminal.child.pid, number)
        assert terminal.ended() == 0
        assert terminal.left_as_found()


def test_the_second_signal_does_not_wait() -> None:
    with run("slow") as terminal:
        terminal.see("Loss of the model")
        os.kill(terminal.child.pid, signal.SIGTERM)
        terminal.see("ending")
        os.kill(terminal.child.pid, signal.SIGTERM)
        assert terminal.ended() == 0
        assert terminal.left_as_found()


def test_ctrl_c_in_a_program_that_has_the_terminal_ends_only_that_program() -> None:
    with run("lent") as terminal:
        terminal.see("Loss of the model")
        terminal.press("")
        os.kill(terminal.child.pid, signal.SIGUSR1)
        terminal.see("chat of a model")
        terminal.press("")
        os.killpg(terminal.child.pid, signal.SIGINT)
        terminal.see("Loss of the model")
        os.killpg(terminal.child.pid, signal.SIGINT)
        assert terminal.ended() == 0
        assert terminal.left_as_found()


def test_the_whole_screen_is_drawn_again() -> None:
    with run() as terminal:
        terminal.see("Loss of the model")
        for way in ("ctrl+z", "SIGTSTP", "SIGSTOP", "ctrl+l"):
            if way.startswith("ctrl"):
                terminal.press({"ctrl+z": "\x1a", "ctrl+l": "\x0c"}[way])
            else:
                os.kill(terminal.child.pid, getattr(signal, way))
            if way != "ctrl+l":
                terminal.stopped()
                terminal.press("")
                os.kill(terminal.child.pid, signal.SIGCONT)
            terminal.see("Loss of the model", "Home", "Runs")
        terminal.press("q")
        assert terminal.ended() == 0
        assert terminal.left_as_found()


def test_after_a_crash_with_the_error_on_the_normal_screen() -> None:
    with run() as terminal:
        terminal.see("Loss of the model")
        terminal.press("f")
        assert terminal.ended() != 0
        assert terminal.left_as_found()
        assert "a fault in our own code" in terminal.text


def test_when_the_window_is_gone_it_still_obeys() -> None:
    with run("busy") as terminal:
        terminal.see("Loss of the model")
        terminal.vanish()
        os.kill(terminal.child.pid, signal.SIGUSR1)  # much is drawn for nobody
        os.kill(terminal.child.pid, signal.SIGTERM)
        terminal.ended()


def test_when_the_window_is_gone_no_thread_reads_on() -> None:
    with run() as terminal:
        terminal.see("Loss of the model")
        process = psutil.Process(terminal.child.pid)
        terminal.vanish()
        until, share = time.monotonic() + 60, 1.0
        while share > 0.2:
            assert time.monotonic() < until, f"{share:.2f} of a core is used for nobody"
            before, began = sum(process.cpu_times()[:2]), time.monotonic()
            time.sleep(1.0)
            share = (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - began)


# The program itself, with settings that are no TOML.

VOLUNTEER = [sys.executable, "-c", "from volunteer.__main__ import main; main()"]


def damaged(home: Path) -> Terminal:
    (home / "config.toml").write_text("threads = \n")
    return Terminal(VOLUNTEER, PYTHONPATH=str(ROOT), VOLUNTEER_HOME=str(home))


def test_damaged_settings_are_kept_aside_and_defaults_offered(tmp_path: Path) -> None:
    with damaged(tmp_path) as terminal:
        terminal.see("is not TOML", "continue with the defaults? [y/N]")
        terminal.press("y\r")
        terminal.see("it is kept as", "config.toml.damaged", "paste your join link")
        terminal.press("\x11")  # ctrl+q: letters are typed into the link
        assert terminal.ended() == 0
        assert terminal.left_as_found()
    assert (tmp_path / "config.toml.damaged").read_text() == "threads = \n"
    assert not (tmp_path / "config.toml").exists()


def test_who_wants_to_mend_the_settings_keeps_them_where_they_are(tmp_path: Path) -> None:
    with damaged(tmp_path) as terminal:
        terminal.see("continue with the defaults? [y/N]")
        terminal.press("\r")
        assert terminal.ended() == 78
        assert terminal.left_as_found()
    assert (tmp_path / "config.toml").read_text() == "threads = \n"


def test_where_no_key_can_come_in_there_is_a_sentence_instead_of_a_deaf_screen(
    tmp_path: Path,
) -> None:
    nobody = subprocess.DEVNULL
    place = {"PYTHONPATH": str(ROOT), "VOLUNTEER_HOME": str(tmp_path)}
    with Terminal(VOLUNTEER, nobody, **place) as terminal:
        terminal.see("the screen needs a terminal: use `volunteer --no-ui`")
        assert terminal.ended() == 2


def test_a_terminal_that_cannot_draw_gets_a_sentence(tmp_path: Path) -> None:
    place = {"PYTHONPATH": str(ROOT), "VOLUNTEER_HOME": str(tmp_path), "TERM": "dumb"}
    with Terminal(VOLUNTEER, **place) as terminal:
        terminal.see("(TERM=dumb) cannot draw: use `volunteer --no-ui`")
        assert terminal.ended() == 2
        assert terminal.left_as_found()


async def test_the_work_begins_once_the_screen_is_painted() -> None:
    done: list[str] = []

    class Screen:
        painted = asyncio.Event()
        attach = None

        def call_later(self, *_: object) -> None: ...

    def make() -> Any:
        done.append("engine")
        return SimpleNamespace(control=None)

    drawing: asyncio.Task[int | None] = asyncio.create_task(asyncio.Event().wait())
    screen: Any = Screen()
    behind = asyncio.create_task(start._engine_after_first_paint(screen, drawing, make, low=False))
    for _ in range(5):
        await asyncio.sleep(0)
    assert done == []
    screen.painted.set()
    await behind
    drawing.cancel()
    assert done == ["engine"]


def test_a_second_start_shows_the_first_and_leaves_it_alone(tmp_path: Path) -> None:
    place = {"PYTHONPATH": str(ROOT), "VOLUNTEER_HOME": str(tmp_path)}
    with Terminal(VOLUNTEER, **place) as first:
        first.see("paste your join link")
        with Terminal(VOLUNTEER, **place) as second:
            second.see("Loss of the model")
            second.press("q")
            second.see("keeps running in the background", "`volunteer stop` ends it")
            assert second.ended() == 0
            assert second.left_as_found()
        options = ["--ascii", "--run", "a-run", "--threads", "1", "--paused"]
        with Terminal([*VOLUNTEER, *options], **place) as third:
            third.see("threads", "runs, paused has no effect")
            third.press("q")
            assert third.ended() == 0
        assert first.child.poll() is None
        first.press("\x11")
        assert first.ended() == 0


def test_stop_ends_the_screen_and_frees_the_profile(tmp_path: Path) -> None:
    place = {"PYTHONPATH": str(ROOT), "VOLUNTEER_HOME": str(tmp_path)}
    with Terminal(VOLUNTEER, **place) as terminal:
        terminal.see("paste your join link")
        while subprocess.call([*VOLUNTEER, "stop"], env={**os.environ, **place}) == 75:
            assert terminal.child.poll() is None  # the volunteer begins after its screen
        assert terminal.ended() == 0
        assert terminal.left_as_found()


def test_a_start_while_another_one_ends_waits_for_its_end_and_begins(tmp_path: Path) -> None:
    place = {"PYTHONPATH": str(ROOT), "VOLUNTEER_HOME": str(tmp_path)}
    profile = Profile(directories({"VOLUNTEER_HOME": str(tmp_path)}).profile)
    for left in (
        b"",
        b'{"path": "/nowhere.sock", "pid": 1}',
    ):  # its socket is gone; so is who listened
        if left:
            profile.endpoint.write_bytes(left)
        with instance_lock(profile.path):
            terminal = Terminal(VOLUNTEER, **place)
            terminal.see("another one is starting or exiting on this profile")
        with terminal:
            terminal.see("paste your join link")
            terminal.press("\x11")
            assert terminal.ended() == 0


def test_a_start_without_a_screen_begins_when_the_one_before_has_ended(tmp_path: Path) -> None:
    place = {"VOLUNTEER_HOME": str(tmp_path)}
    profile = Profile(directories({"VOLUNTEER_HOME": str(tmp_path)}).profile)
    with instance_lock(profile.path):
        terminal = Terminal([*VOLUNTEER, "--no-ui"], PYTHONPATH=str(ROOT), **place)
        terminal.see("another one is starting or exiting on this profile")
    with terminal:
        terminal.see("has joined no coordinator yet")
        assert terminal.ended() == 78
