"""A program on the screen of a real terminal, tmux: keys go in, and the cells can be read at any
moment as a person sees them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Sequence

WAIT_S = 60.0


class TmuxScreen:
    """A command in a tmux server of its own, without anybody's settings."""

    def __init__(
        self, command: Sequence[str], columns: int, rows: int, /, **environment: str
    ) -> None:
        if shutil.which("tmux") is None:
            raise SystemExit("this needs tmux")
        self._socket = f"screen-{os.getpid()}-{id(self):x}"
        told = [word for name, value in environment.items() for word in ("-e", f"{name}={value}")]
        size = ["-x", str(columns), "-y", str(rows)]
        stay = ["start-server", ";", "set-option", "-gw", "remain-on-exit", "on", ";"]
        began = ["new-session", "-d", "-s", "one", *size, *told]
        self._tmux(*stay, *began, "--", *command)  # one that ends shows its last words and status

    def __enter__(self) -> TmuxScreen:
        return self

    def __exit__(self, *_: object) -> None:
        """However it went, nothing is left running."""
        subprocess.run(
            ["tmux", "-L", self._socket, "kill-server"], capture_output=True, check=False
        )

    def press(self, *keys: str) -> None:
        """Type keys by tmux's names: `Enter`, `Space`, `q`."""
        self._tmux("send-keys", "-t", "one", *keys)

    def rows(self) -> list[str]:
        """Return the rows of the screen."""
        return self._tmux("capture-pane", "-p", "-t", "one").split("\n")

    def see(self, pattern: str, timeout_s: float = WAIT_S) -> str:
        """Wait until the screen matches; return the match."""
        until = time.monotonic() + timeout_s
        while True:
            text = "\n".join(self.rows())
            if found := re.search(pattern, text):
                return found[0]
            if time.monotonic() > until:
                raise SystemExit(f"{pattern!r} never stood on the screen:\n{text}")
            time.sleep(0.05)

    def _tmux(self, *words: str) -> str:
        done = subprocess.run(
            ["tmux", "-L", self._socket, "-f", os.devnull, *words],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"LC_ALL": "C.UTF-8"},
        )
        return done.stdout
