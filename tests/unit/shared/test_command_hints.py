"""Commands in sentences carry the options that the reader asked with."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from coordinator.cli.target import Where
from shared.programs.command_hints import complete_commands, options
from volunteer.cli.main import run_command


def test_a_command_in_backticks_is_completed_and_nothing_else() -> None:
    more = options({"data_dir": Path("/srv/my data"), "database": None, "server": ""})
    assert more == " --data-dir '/srv/my data'"
    text = (
        "`coordinator run list` shows the coordinator's runs; `coordinators` and `volunteer` do not"
    )
    assert complete_commands(text, "coordinator", more) == text.replace(
        "run list", "run list" + more
    )
    assert complete_commands(text, "coordinator", "") == text
    again = complete_commands(complete_commands(text, "coordinator", more), "coordinator", more)
    assert again == complete_commands(text, "coordinator", more)


def test_a_password_is_not_printed_again() -> None:
    where = Where(data_dir="a", database="postgresql+asyncpg://ann:secret@db/x")
    said = where.hint("Next: `coordinator run start tiny`")
    assert shlex.split(said.strip("`").partition("`")[2]) == [
        *("coordinator", "run", "start", "tiny", "--data-dir", "a"),
        *("--database", "postgresql+asyncpg://ann:***@db/x"),
    ]


@pytest.mark.parametrize("words", [["status"], ["link"], ["--no-ui"]])
def test_what_a_profile_is_told_to_do_is_about_this_profile(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("VOLUNTEER_HOME", str(tmp_path))
    monkeypatch.setenv("VOLUNTEER_SANDBOX", "false")  # it would confine the tests behind it
    monkeypatch.setenv("VOLUNTEER_PRIORITY", "normal")  # they would give way to all others
    assert run_command([*words, "--profile", "lab"]) != 0
    said = capsys.readouterr().err
    assert "`volunteer" in said
    assert "--profile lab`" in said
