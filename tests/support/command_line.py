"""The organiser's command line, run as words in this process, on a data directory of its own."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import structlog

from coordinator.cli.main import main
from tests.support.local_coordinator import RUN, local_coordinator


@dataclass(frozen=True)
class Said:
    """Output and exit code of a command."""

    code: int
    out: str
    err: str


Run = Callable[..., Said]


@pytest.fixture
def process_as_it_was() -> Iterator[None]:
    root, priority = logging.getLogger(), os.getpriority(os.PRIO_PROCESS, 0)
    handlers, level = list(root.handlers), root.level
    yield
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, priority)
    root.handlers[:], root.level = handlers, level
    structlog.reset_defaults()


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], process_as_it_was: None
) -> Run:
    """Run a command line."""

    def words(*words: str | Path) -> Said:
        monkeypatch.setattr("sys.argv", ["coordinator", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        written = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Said(ended.value.code, written.out, written.err)

    return words


@pytest.fixture
def here(run: Run, tmp_path: Path) -> Run:
    """Run a command on the data directory of this test; it must succeed."""

    def words(*words: str | Path) -> Said:
        said = run(*words, "--data-dir", tmp_path / "data")
        assert said.code == 0, said.err
        # a message to send beside the links
        assert said.err == "" or words[:2] == ("invite", "create"), said.err
        return said

    return words


def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(30):
        text = "".join(f"{a} plus {number} is {a + number};\n" for a in range(60))
        (folder / f"{number}.txt").write_text(text)
    return folder


async def worked(data_dir: Path, *names: str) -> None:
    """A merged version by two volunteers, as if a server had run."""
    async with local_coordinator(data_dir) as home:
        for name in names:
            worker = await home.join(name)
            assert (await worker.work(seed=zlib.crc32(name.encode()))).state == "accepted"
        assert await home.coordinator.merger.merge_if_due(1)
        await home.coordinator.renewals.flush()


@pytest.fixture(scope="session")
def busy_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory in which the first test that takes `busy` leaves its data for the others."""
    return tmp_path_factory.mktemp("busy") / "data"


@pytest.fixture
def busy(here: Run, tmp_path: Path, busy_once: Path) -> Path:
    """A data directory in which a run has made a version."""
    if busy_once.exists():
        corpus(tmp_path)
        return Path(shutil.copytree(busy_once, tmp_path / "data"))
    here(
        "dataset",
        "add",
        "sums",
        "--text",
        corpus(tmp_path),
        "--vocab-size",
        "300",
        "--licence",
        "CC0-1.0",
    )
    (tmp_path / "run.toml").write_text(RUN)
    here("run", "create", tmp_path / "run.toml")
    here("run", "start", "tiny")
    asyncio.run(worked(tmp_path / "data", "Ann", "Bob"))
    shutil.copytree(tmp_path / "data", busy_once)
    return tmp_path / "data"


def the_next(said: str) -> list[str]:
    """The words, behind the program, of the command that a sentence names."""
    return shlex.split(said.split("`")[1])[1:]


def json_lines(tmp_path: Path) -> Path:
    """A file with two lines that are no documents."""
    path = tmp_path / "notes.jsonl"
    lines = [json.dumps({"text": f"{n} plus 1 is {n + 1}; " * 20}) for n in range(80)]
    lines[4], lines[40] = "{broken", '{"title": "no text"}'
    path.write_text("\n".join(lines))
    return path
