"""The screen before a real coordinator and a real task: start, join, train, pause, go on, finish, quit, terminal as before."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.e2e.processes import Process, command
from tests.house import RUN
from tests.tui.terminal import Terminal

VOLUNTEER = [sys.executable, "-c", "from volunteer.cli import main; main()"]


def test_a_volunteer_at_the_screen(tmp_path: Path) -> None:
    place = ["--data-dir", str(tmp_path / "coordinator")]
    words = tmp_path / "sums.txt"
    words.write_text("".join(f"{n} plus {n} is {n + n};\n" for n in range(4000)))
    plan = RUN.replace("local_steps = 2", "local_steps = 3000").replace("quorum = 2", "quorum = 1")
    (tmp_path / "run.toml").write_text(plan)
    for line in (
        ["dataset", "add", "sums", "--text", str(words), "--vocab-size", "300"],
        ["run", "create", str(tmp_path / "run.toml")],
        ["run", "start", "tiny"],
    ):
        done = command(*line, *place)
        assert done.returncode == 0, done.stderr
    home = {
        "VOLUNTEER_HOME": str(tmp_path / "volunteer"),
        "VOLUNTEER_DEVICE": "cpu",
        "VOLUNTEER_THREADS": "1",
    }
    with (
        Process(tmp_path / "coordinator", "--port", "0") as server,
        Terminal(VOLUNTEER, VOLUNTEER_JOIN=server.link, **home) as screen,
    ):
        screen.see("Loss of the model", "● online")
        screen.see("● train", "step ")
        screen.press(" ")
        screen.see("‖ paused", "press space to go on")
        screen.press(" ")
        screen.see("● training")
        screen.press("f")
        screen.see("● finishing")
        screen.see("finished", "accepted")
        screen.press("q")
        assert screen.ended() == 0
        assert screen.left_as_found()
        assert server.stop() == 0
