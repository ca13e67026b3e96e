"""The tour of the README by its letter, as a newcomer takes it: seconds and keys from the first
command after the install to the first accepted task on the screen.

    python -m tests.benchmarks.bench_first_task
    python -m tests.benchmarks.bench_first_task --turns 3 --json first.json

Every command is the README's; the newcomer waits for each to end, and presses enter on each page of
the wizard as soon as the page lets it through. It needs tmux.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tests.support.server_process import Process, command
from tests.support.tmux_screen import TmuxScreen

ROOT = str(Path(__file__).resolve().parents[2])
VOLUNTEER = [sys.executable, "-c", "from volunteer.__main__ import main; main()"]
SECONDS, KEYS = 60.0, 6  # goals
# Words by which a page of the wizard says that enter leads on.
PAGES = (
    "What may volunteer use\\?",
    "enter: next",
    "Which run do you want",
    "press  ENTER  to start",
)


def tour(directory: Path, told: list[tuple[str, float]]) -> int:
    """Take the tour; note when each step ended. Returns the number of keys."""
    began = time.monotonic()

    def note(step: str) -> None:
        told.append((step, time.monotonic() - began))

    data, home = directory / "coordinator", directory / "home"
    here = {"VOLUNTEER_HOME": str(home), "PYTHONPATH": ROOT}
    with Process(data, "--port", "0", PYTHONPATH=ROOT) as server:
        note("serve")
        for words in (("run", "create", "--example"), ("run", "start", "stdlib-gpt")):
            done = command(*words, "--data-dir", str(data), PYTHONPATH=ROOT)
            if done.returncode:
                raise SystemExit(done.stderr)
            note(" ".join(words))
        joining = [*VOLUNTEER, "join", server.link, "--name", "ada"]
        if os.spawnvpe(os.P_WAIT, sys.executable, joining, os.environ | here):
            raise SystemExit("join failed")
        note("join")
        with TmuxScreen(VOLUNTEER, 120, 36, **here) as screen:
            for page in PAGES:
                screen.see(page)
                screen.press("Enter")
            note("wizard")
            screen.see("✓ (accepted|merged) ", 120)
            note("first accepted task")
            screen.press("q")
    return len(PAGES)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    took, keys = [], 0
    for _ in range(options.turns):
        told: list[tuple[str, float]] = []
        with tempfile.TemporaryDirectory() as directory:
            keys = tour(Path(directory), told)
        print("  ".join(f"{step} {at:.1f} s" for step, at in told), flush=True)
        took.append(told[-1][1])
    middle = statistics.median(took)
    met = "met" if middle <= SECONDS and keys <= KEYS else "MISSED"
    print(
        f"first accepted task after {middle:.1f} s and {keys} keys; goal {SECONDS:g} s, {KEYS}", met
    )
    if options.json:
        options.json.write_text(json.dumps({"seconds": took, "keys": keys}, indent=1))


if __name__ == "__main__":
    main()
