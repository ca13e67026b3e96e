"""Signals that end a command: Ctrl-C during imports shows no traceback, and SIGTERM leaves no file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.sources import ROOT

# Sends SIGINT to its own process when the module of a given place in the order is imported, counted
# from the first one after the program took over Ctrl-C, which a shell ignores for what it starts in
# the background.
INTERRUPTER = """
import os, signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)

class Interrupter:
    left = int(os.environ["INTERRUPT_AT"])

    def find_spec(self, name, path=None, target=None):
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler or self.begun:
            self.begun = True
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGINT)

    begun = False

sys.meta_path.insert(0, Interrupter())
"""
SLOW = pytest.mark.slow
PROGRAMS = {
    "coordinator": ["-c", "from coordinator.entry_point import main; main()", "run", "list"],
    "volunteer": ["-m", "volunteer", "runs"],
    "volunteer's screen": ["-m", "volunteer"],
}


@pytest.mark.parametrize("at", [1, 150, *(pytest.param(n, marks=SLOW) for n in (30, 400))])
@pytest.mark.parametrize("program", PROGRAMS)
def test_an_import_is_interrupted_without_a_traceback(
    program: str, at: int, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTER)
    done = subprocess.run(
        [sys.executable, *PROGRAMS[program]],
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT))),
            "INTERRUPT_AT": str(at),
            "VOLUNTEER_HOME": str(tmp_path / "state"),
            "COORDINATOR_DATA_DIR": str(tmp_path / "coordinator"),
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stderr
    assert "KeyboardInterrupt" not in done.stderr
    if done.returncode not in (-signal.SIGINT, 130):  # it ended before that many imports
        assert at == 400, done.stderr


# Simulates in the temporary folder of the test, not on the RAM disk that other tests use. A command
# rightly lives on after a hang-up that its parents ignore, as below `nohup`.
SIMULATOR = """
import signal
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from pathlib import Path
from coordinator.simulate import simulation
simulation.RAM_DISK = Path("/nowhere")
from coordinator.cli.main import main
main()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_command_that_is_ended_deletes_its_scratch_files(name: str, tmp_path: Path) -> None:
    example = [sys.executable, "-c", SIMULATOR, "simulate", "--example"]
    (tmp_path / "scenario.toml").write_text(subprocess.check_output(example, cwd=ROOT, text=True))
    (scratch := tmp_path / "scratch").mkdir()
    child = subprocess.Popen(
        [*example[:-1], str(tmp_path / "scenario.toml"), "--hours", "100000"],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(scratch)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while child.poll() is None and not any(scratch.glob("simulate-*/machines")):
        time.sleep(0.02)
    child.send_signal(getattr(signal, name))
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 130, errors
    assert "Traceback" not in errors
    assert not any(scratch.iterdir())
