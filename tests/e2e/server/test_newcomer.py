"""The page of /join followed by its letter in an empty environment, with figures."""

from __future__ import annotations

import html
import re
import shlex
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests.e2e.server.test_install import machine
from tests.support.balancer import balanced
from tests.support.server_process import Process

__all__ = ("machine",)  # a fixture
pytestmark = pytest.mark.slow

SITE = Path(pytest.__file__).parent.parent
RUN = """name = "mine"
workload = "gpt"
dataset = "corpus"
[task]
local_steps = 4
batch_size = 4
"""


class Machine:
    """Empty machine: the installer finds every package, and the libraries are those of here."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.programs = Path(environment["HOME"], "bin")
        self.environment = environment | {
            "VOLUNTEER_HOME": str(folder / "state"),
            "COORDINATOR_DATA_DIR": str(folder / "data"),
            "PATH": f"{self.programs}:{environment['PATH']}",
        }

    def __call__(self, *words: str) -> str:
        done = subprocess.run(
            words, cwd=self.folder, env=self.environment, capture_output=True, text=True,
            timeout=300, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr
        return done.stdout

    def install(self, url: str) -> None:
        """Follow the first line of the page for macOS, which needs no other index, by pipx."""
        asked = urllib.request.Request(f"{url}/join", headers={"user-agent": "Macintosh"})
        page = urllib.request.urlopen(asked).read().decode()
        line = html.unescape(re.findall(r"data-install[^>]*>([^<]+)<", page)[0])
        line = line.replace("uvx ", "").replace("pipx install", "pipx install --force")
        self("sh", "-c", line)
        (packages,) = self.programs.parent.glob("pipx/venvs/*/lib/*/site-packages")
        (packages / "zz.pth").write_text(f"{SITE}\n")


@pytest.fixture
def newcomer(tmp_path: Path, machine: dict[str, str]) -> Machine:
    (tmp_path / "machine").mkdir()
    return Machine(tmp_path / "machine", machine)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    lines = [
        f"{a} plus {b} is {a + b}, says the book of sums\n" for a in range(90) for b in range(60)
    ]
    file = tmp_path / "my text.txt"
    file.write_text("".join(lines))
    return file


async def test_from_the_page_behind_a_balancer_to_an_accepted_task(
    newcomer: Machine, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    with Process(tmp_path / "data", "--port", "0") as first:
        port = first.port
    with Process(
        tmp_path / "data", "--port", str(port), "--url", "http://127.0.0.1:28471"
    ) as server:
        async with balanced(port, port=28471) as url:
            where = ("--data-dir", str(tmp_path / "data"))
            organiser = str(Path(sys.executable).with_name("coordinator"))
            words = ("--text", str(corpus), "--licence", "CC0-1.0")
            newcomer(organiser, "dataset", "add", "corpus", *words, *where)
            newcomer(organiser, "run", "create", str(tmp_path / "run.toml"), *where)
            newcomer(organiser, "run", "start", "mine", *where)
            began = time.monotonic()
            newcomer.install(url)
            installed = time.monotonic()
            assert (newcomer.programs / "volunteer").exists()
            newcomer(
                "volunteer", "join", server.link.replace(f"127.0.0.1:{port}", "127.0.0.1:28471")
            )
            said = newcomer("volunteer", "--no-ui", "--max-tasks", "1")
            ended = time.monotonic()
    assert "accepted" in said, said
    with capsys.disabled():
        print(
            f"\ninstall, join, work: 3 commands, 0 keys; installed in {installed - began:.0f} s"
            f" without dependencies, from join to an accepted task {ended - installed:.0f} s"
        )
    assert ended - installed < 120


def test_from_a_text_file_to_a_run_at_work(
    newcomer: Machine, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Process(newcomer.folder / "data", "--port", "0") as server:
        newcomer.install(server.url)
        said = newcomer("coordinator", "run", "create", "--recipe", "gpt", "mine.toml")
        first, second = (shlex.split(line) for line in said.splitlines() if "coordinator" in line)
        first = [str(corpus) if word == "FOLDER" else word for word in first]
        second = [word.replace("THIS_FILE", "mine.toml") for word in second]
        text = [said, newcomer(*first), newcomer(*second)]
        found = re.search(r"Next: `(coordinator run start [^`]+)`", text[-1])
        assert found is not None
        text.append(newcomer(*shlex.split(found[1])))
    words = sum(len(each.split()) for each in text)
    with capsys.disabled():
        print(f"\nown text to a run at work: 4 commands, {words} words on the way")
    assert words <= 300
