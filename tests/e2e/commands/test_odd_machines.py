"""Commands on ordinary machines: a sentence and an exit code, never a traceback."""

from __future__ import annotations

import errno
import os
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from coordinator.database.engine.sqlite import CLOCK_KEY
from shared.errors import system_error
from tests.e2e.conftest import Commanded
from tests.support.command_line import Run
from tests.support.local_coordinator import RUN

VOLUNTEER = [sys.executable, "-c", "from volunteer.__main__ import main; main()"]
COORDINATOR = [sys.executable, "-c", "from coordinator.cli.main import main; main()"]


def said(command: list[str | bytes], home: Path, **more: str) -> tuple[int, str]:
    done = subprocess.run(
        command,
        env=os.environ | {"HOME": str(home), "VOLUNTEER_HOME": str(home), **more},
        capture_output=True,
        timeout=60,
        check=False,
    )
    text = done.stderr.decode(errors="replace")
    assert "Traceback" not in text, text
    return done.returncode, text


@pytest.mark.parametrize(
    "words",
    [
        (*VOLUNTEER, "team", "create", b"Zo\xeb"),
        (*VOLUNTEER, "join", "https://127.0.0.1:9/join#key=a", "--name", b"Zo\xeb"),
        (*COORDINATOR, "dataset", "add", "a", "--text", "a.txt", "--licence", b"Zo\xeb"),
    ],
)
def test_a_name_in_another_encoding_is_a_sentence(words: list[str | bytes], tmp_path: Path) -> None:
    code, text = said(list(words), tmp_path, COORDINATOR_DATA_DIR=str(tmp_path / "data"))
    assert code in (2, 75, 78)
    assert text.count("\n") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file that root cannot write")
@pytest.mark.parametrize("command", [(*VOLUNTEER, "--no-ui"), (*COORDINATOR, "serve")])
def test_a_home_that_cannot_be_written_is_a_sentence_and_78(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("no directory")
    places = {"VOLUNTEER_HOME": f"{file}/x", "COORDINATOR_DATA_DIR": f"{file}/x"}
    code, text = said(list(command), tmp_path, **places)
    assert (code, text.count("\n")) == (78, 1)


@pytest.mark.parametrize(
    ("number", "code"),
    [(errno.EROFS, 78), (errno.ENOLCK, 78), (errno.ENOSPC, 75), (errno.EDQUOT, 75), (errno.EIO, 1)],
)
def test_refusals_of_the_system_have_their_exit_code(number: int, code: int) -> None:
    text, found = system_error(OSError(number, os.strerror(number), "/srv/lock"))
    assert found == code
    assert text.startswith("/srv/lock: ")


def test_byte_order_marks_mean_nothing(run: Run, tmp_path: Path) -> None:
    place = ("--data-dir", tmp_path / "data")
    config, file = tmp_path / "coordinator.toml", tmp_path / "run.toml"
    config.write_text('name = "lab"\n', encoding="utf-8-sig")
    file.write_text(RUN, encoding="utf-8-sig")
    lines = tmp_path / "sums.jsonl"
    rows = "".join(
        f'{{"text": "{n} and {n} are {2 * n}; {n * n} is the product"}}\n' for n in range(99)
    )
    lines.write_text(rows, encoding="utf-8-sig")
    added = run("dataset", "add", "sums", "--text", lines, "--vocab-size", "280", *place)
    assert added.code == 0, added.err
    assert "99 documents" in added.out
    created = run("run", "create", file, "--config", config, *place)
    assert created.code == 0, created.err
    settings = tmp_path / "config.toml"
    settings.write_text("threads = 1\n", encoding="utf-8-sig")
    code, text = said([*VOLUNTEER, "settings"], tmp_path)
    assert code == 0, text


@pytest.mark.parametrize(
    ("words", "code", "words_said"),
    [
        (("run", "list", "--server", "nonsense", "--token-file", os.devnull), 2, "--server takes"),
        (("run", "rollback", "mine", "-3"), 2, "--to is missing"),
        (("run", "create", "PIPE"), 2, "empty"),
        (("run", "list", "--data-dir", "/tmp/" + 300 * "a"), 2, "name too long"),
        (("dataset", "add", "a", "--for", "nope", "--files", "TEXT"), 2, '"nope"'),
        (("dataset", "add", "a", "--text", "/tmp/" + 300 * "a"), 2, "name too long"),
        (("serve", "--tls-cert", "TEXT", "--tls-key", "TEXT"), 78, "give PEM files"),
    ],
)
def test_a_slip_of_the_organiser_is_a_sentence(
    words: tuple[str, ...], code: int, words_said: str, tmp_path: Path, commanded: Commanded
) -> None:
    pipe, text = tmp_path / "pipe", tmp_path / "a.txt"
    text.write_text("words\n")
    os.mkfifo(pipe)
    given = [{"PIPE": str(pipe), "TEXT": str(text)}.get(word, word) for word in words]
    ended = commanded(*given, HOME=str(tmp_path), COORDINATOR_DATA_DIR=str(tmp_path / "data"))
    assert (ended.returncode, ended.stderr.count("\n")) == (code, 1), ended.stderr
    assert words_said in ended.stderr
    assert "join link comes" not in ended.stderr


@pytest.mark.parametrize("command", [(*VOLUNTEER, "settings"), (*COORDINATOR, "settings")])
def test_a_closed_pipe_is_quiet(command: tuple[str, ...], tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)  # as `head` does
    try:
        done = subprocess.run(
            [*command],
            env=os.environ | {"HOME": str(tmp_path), "VOLUNTEER_HOME": str(tmp_path)},
            stdout=writer,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_server_says_that_it_lives_in_the_future(tmp_path: Path, run: Run) -> None:
    here = ("--data-dir", tmp_path / "data")
    assert run("migrate", *here).code == 0
    with closing(sqlite3.connect(tmp_path / "data" / "coordinator.sqlite3")) as rows, rows:
        stored = (CLOCK_KEY, str(time.time() + 400 * 86400))
        rows.execute("INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)", stored)
    later = run("run", "list", *here)
    assert "later than this machine" in later.err


@pytest.mark.parametrize("columns", ["0", "1"])
@pytest.mark.parametrize("command", [VOLUNTEER, COORDINATOR])
def test_help_on_a_terminal_without_width(command: list[str], columns: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [*command, "--help"], env=os.environ | {"HOME": str(tmp_path), "COLUMNS": columns},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "Train" in done.stdout or "volunteers train" in done.stdout


@pytest.mark.parametrize("command", [VOLUNTEER, COORDINATOR])
def test_settings_with_output_closed(command: list[str], tmp_path: Path) -> None:
    code, text = said(["sh", "-c", 'exec "$@" >&-', "sh", *command, "settings"], tmp_path)
    assert (code, text) == (0, "")


def test_files_that_are_something_else_are_named_for_what_they_are(
    run: Run, tmp_path: Path
) -> None:
    wide, text = tmp_path / "wide.toml", tmp_path / "text.txt"
    wide.write_text("port = 1", encoding="utf-16")
    text.write_text("no database, " * 99)
    said = run("run", "list", "--config", wide)
    assert (said.code, "it is UTF-16, not UTF-8 text" in said.err) == (78, True)
    said = run("run", "list", "--database", f"sqlite:///{text}")
    assert (said.code, "or no database at all" in said.err) == (78, True)
    here = ("--data-dir", tmp_path / "data")
    assert run("migrate", *here).code == 0
    said = run("record", "list", "--limit", "-3", *here)
    assert said.err == "coordinator: option limit: expected a whole number of at least 1\n"
    dated = tmp_path / "run.toml"
    dated.write_text(RUN + "[stop]\ndate = 2027-01-31\n")
    said = run("run", "create", dated, *here)
    assert "expected a text, not a date without quotation marks" in said.err
    said = run("dataset", "add", "a", "--text", text, "--tokenizer", wide, *here)
    assert said.err == "coordinator: this is not a tokenizer.json: it is not UTF-8 text\n"
