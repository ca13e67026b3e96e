"""Real `coordinator serve` processes for tests."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from tests.support.forkserver import ForkServer, Piped

COORDINATOR = [
    sys.executable,
    "-c",
    "import sys; from coordinator.cli.main import main; sys.exit(main())",
]
START_S = 60.0


class Process:
    """A running server: its lines as they come, and its end. It has `start_s` to begin; a fork
    server, which has imported everything, starts it in a tenth of the time.
    """

    start_s = START_S

    def __init__(
        self,
        data_dir: Path,
        *options: str,
        command: Sequence[str] | ForkServer = COORDINATOR,
        **environment: str,
    ) -> None:
        self.data_dir = data_dir
        words = ["serve", "--data-dir", str(data_dir), *options]
        self.child: subprocess.Popen[str] | Piped
        if isinstance(command, ForkServer):
            self.child = command.piped(["coordinator", *words], os.environ | environment)
        else:
            self.child = subprocess.Popen(
                [*command, *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | environment,
            )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self.errors: list[str] = []
        assert self.child.stdout
        assert self.child.stderr
        self._readers = [
            threading.Thread(target=self._read, args=(self.child.stdout,), daemon=True),
            threading.Thread(target=self._keep, args=(self.child.stderr,), daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        self.url = self.link = ""

    def __enter__(self) -> Process:
        return self.started()

    def __exit__(self, *_: object) -> None:
        """However the test went, nothing is left running."""
        if self.child.poll() is None:
            self.child.kill()
        self.ended()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def _keep(self, stream: IO[str]) -> None:
        self.errors += stream

    def started(self) -> Process:
        """Wait for the lines that say where it listens."""
        while not self.link:
            line = self._lines.get(timeout=self.start_s)
            assert line is not None, "".join(self.errors)
            if " listens at " in line:
                self.url = line.rpartition(" ")[2]
            if "volunteer join" in line:
                self.link = line.split("'")[1]
        return self

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def token_file(self) -> Path:
        return self.data_dir / "admin.token"

    def signal(self, number: int) -> None:
        self.child.send_signal(number)

    def ended(self, timeout_s: float = START_S) -> int:
        """Wait for its end; the exit code."""
        try:
            code = self.child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()
            raise
        finally:
            for reader in self._readers:
                reader.join()
            for stream in (self.child.stdout, self.child.stderr):
                if stream:
                    stream.close()
        return code

    def stop(self) -> int:
        if self.child.poll() is None:
            self.child.terminate()
        return self.ended()


def forked_command(
    fork_server: ForkServer, /, *words: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run an organiser's command in a process of the fork server."""
    with fork_server.piped(["coordinator", *words], os.environ | environment) as process:
        out, errors = process.communicate()
        return subprocess.CompletedProcess(words, process.wait(120), out, errors)


def command(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run an organiser's command as people do."""
    return subprocess.run(
        [*COORDINATOR, *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=os.environ | environment,
        timeout=120,
    )
