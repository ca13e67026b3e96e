"""The record: every command that changes something writes a line, and what was changed in the
log itself is found.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.http.routes.operations import COMMANDS
from tests.support.command_line import Run
from tests.support.forkserver import ForkServer
from tests.support.local_coordinator import RUN
from tests.support.server_process import Process

READING = {
    "run.list", "run.show", "run.report", "run.export", "dataset.list", "task.list", "invite.list",
    "volunteer.list", "volunteer.show", "record.list", "record.verify", "trust", "check", "backup",
    "run.diff", "run.rollouts", "announce.list", "alerts.list", "alerts.test", "top",
}  # fmt: skip
# What an auditor says of a task that it took: what that proves has its own lines.
READING |= {"checker.renew", "checker.report"}
WHY = ("--reason", "a test")
# Words of the command line for each command that changes something, in an order that works, and the
# action that the log names.
CHANGING: dict[str, tuple[tuple[str, ...], str]] = {
    "dataset.add": (("dataset", "add", "more", "--text", "TEXT", "--vocab-size", "300"), ""),
    "run.create": (("run", "create", "RUN"), ""),
    "run.start": (("run", "start", "second"), ""),
    "run.pause": (("run", "pause", "second"), ""),
    "run.resume": (("run", "resume", "second"), ""),
    "run.rollback": (("run", "rollback", "tiny", "--to", "0"), ""),
    "task.requeue": (("task", "requeue", "--all"), ""),
    "invite.create": (("invite", "create"), ""),
    "invite.revoke": (("invite", "revoke", "1"), ""),
    "contribution.reverse": (("contribution", "reverse", "1", *WHY), ""),
    "volunteer.reverse": (("volunteer", "reverse", "Bob", "--since", "2001-01-01", *WHY), ""),
    "volunteer.vouch": (("volunteer", "vouch", "Ann"), ""),
    "volunteer.key": (("volunteer", "key", "Ann"), "key.create"),
    "announce": (("announce", "down tonight"), ""),
    "announce.withdraw": (("announce", "--withdraw", "1"), ""),
    "grant": (("grant", "Ann", "5", *WHY), ""),
    "volunteer.suspend": (("volunteer", "suspend", "Ann", *WHY), ""),
    "volunteer.unsuspend": (("volunteer", "unsuspend", "Ann", *WHY), ""),
    "volunteer.ban": (("volunteer", "ban", "Ann"), "volunteer.banned"),
    "volunteer.unban": (("volunteer", "unban", "Ann"), "volunteer.active"),
    "volunteer.rename": (("volunteer", "rename", "Ann", "Anna"), ""),
    "volunteer.reissue": (("volunteer", "reissue", "Anna"), ""),
    "volunteer.forget": (("volunteer", "forget", "Anna", "--yes"), ""),
    "run.extend": (("run", "extend", "second", "--versions", "900", "--yes"), ""),
    "run.fork": (("run", "fork", "third", "--from", "tiny@0", "--yes"), ""),
    "run.stop": (("run", "stop", "second", "--yes"), ""),
    "run.delete": (("run", "delete", "third", "--yes"), ""),
    "dataset.delete": (("dataset", "delete", "more", "--yes"), ""),
    "checker.take": (("checker", "work", "--once", "--device", "cpu"), "checker.work"),
}  # fmt: skip


@pytest.fixture
def failed(busy: Path) -> Path:
    """A data directory in which a task has failed for good."""
    connection = sqlite3.connect(busy / "coordinator.sqlite3")
    with connection:
        columns = [row[1] for row in connection.execute("PRAGMA table_info(tasks)")]
        copied = ", ".join(name for name in columns if name not in ("id", "state", "start", "stop"))
        connection.execute(
            f"INSERT INTO tasks (state, start, stop, {copied}) "
            f"SELECT 'discarded', start + 7, stop + 7, {copied} FROM tasks LIMIT 1"
        )
    connection.close()
    return busy


def lines(here: Run) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(here("record", "list", "--limit", "500", "--json").out)
    return found


def test_every_command_that_changes_something_writes_a_line(
    here: Run, failed: Path, run: Run, tmp_path: Path
) -> None:
    assert set(COMMANDS) == READING | set(CHANGING)
    (tmp_path / "second.toml").write_text(RUN.replace('"tiny"', '"second"'))
    places = {"TEXT": str(tmp_path / "text"), "RUN": str(tmp_path / "second.toml")}
    for name, (words, action) in CHANGING.items():
        before = lines(here)
        said = run(*(places.get(word, word) for word in words), "--data-dir", failed)
        assert said.code == 0, (name, said.err)
        new = lines(here)[: len(lines(here)) - len(before)]
        assert (action or name) in {line["action"] for line in new}, (name, new)
        assert all(line["actor"] == "organiser" for line in new), new
    before = lines(here)
    for reading in (["run", "list"], ["volunteer", "list"], ["task", "list", "--failed"]):
        here(*reading)
    assert lines(here) == before
    assert "run.delete" in here("record", "list", "--limit", "3").out
    assert here("record", "verify").out.startswith("all is well: ")


def test_settings_that_changed_between_two_starts_are_in_the_log(
    busy: Path, here: Run, fork_server: ForkServer
) -> None:
    for options in (("--port", "0"), ("--port", "0"), ("--port", "0", "--name", "other")):
        with Process(busy, *options, command=fork_server) as server:
            assert server.stop() == 0
    changed = [line for line in lines(here) if line["action"] == "settings.change"]
    assert [(line["subject"], json.loads(line["detail"])) for line in changed] == [
        ("name", {"from": "coordinator", "to": "other"})
    ]


def test_a_changed_line_is_found_here_and_afar(
    busy: Path, run: Run, fork_server: ForkServer
) -> None:
    with Process(busy, "--port", "0", command=fork_server) as server:
        place = ("--server", server.link, "--token-file", server.token_file)
        found: dict[str, Any] = {"waiting": 1}
        until = time.monotonic() + 120
        while found["waiting"] and time.monotonic() < until:
            found = json.loads(run("record", "verify", *place, "--json").out)
        assert (found["breaches"], found["waiting"]) == ([], 0)
        assert found["size"] == found["events"] + found["lines"]
        assert "run.start" in run("record", "list", *place).out
    connection = sqlite3.connect(busy / "coordinator.sqlite3")
    with connection:
        connection.execute("DROP TRIGGER record_no_update")
        connection.execute("UPDATE record SET actor = 'nobody' WHERE action = 'run.start'")
    connection.close()
    said = run("record", "verify", "--data-dir", busy)
    assert said.code == 1
    assert "this row is not what the tree says it was" in said.out
    assert json.loads(run("record", "verify", "--data-dir", busy, "--json").out)["breaches"]
    assert run("check", "--data-dir", busy).code == 1


@pytest.mark.parametrize(
    "words",
    [("--limit", "0"), ("--limit", "501"), ("--before", "-1"), ("--before", "x"), ("--limit", "")],
)
def test_wrong_words_get_a_sentence(busy: Path, run: Run, words: tuple[str, ...]) -> None:
    said = run("record", "list", *words, "--data-dir", busy)
    assert said.code in (1, 2)
    assert said.out == ""


def test_pages_follow_each_other(busy: Path, here: Run) -> None:
    def pages() -> Iterator[int]:
        before: tuple[str, ...] = ()
        while rows := json.loads(here("record", "list", "--limit", "2", "--json", *before).out):
            yield from (row["id"] for row in rows)
            before = ("--before", str(rows[-1]["id"]))

    every = [line["id"] for line in lines(here)]
    assert [*pages()] == every
    assert every == sorted(every, reverse=True)
