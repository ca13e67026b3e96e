"""Every command of both programs: --json, errors as JSON with it, exit codes, headers of lists."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from cyclopts import App

from coordinator.cli import main as organiser
from volunteer.cli import main as volunteer

LIVE = {"serve", "top", "play", "chat", "logs", "help"}  # they last, or are for people alone
Words = tuple[str, ...]


def leaves(app: App, words: Words = ()) -> Iterator[tuple[Words, App]]:
    """Yield every command with a function, and its words."""
    names = [name for name in app if not name.startswith("-")]
    if app.default_command is not None:
        yield words, app
    for name in names:
        yield from leaves(app[name], (*words, name))


ORGANISER = dict(leaves(organiser.app))
VOLUNTEER = dict(leaves(volunteer.app))
ALL = [*(("coordinator", words) for words in ORGANISER), *(("volunteer", w) for w in VOLUNTEER)]


def function(program: str, words: Words) -> inspect.Signature:
    """Return the signature of a command."""
    app = (ORGANISER if program == "coordinator" else VOLUNTEER)[words]
    assert app.default_command is not None
    return inspect.signature(app.default_command)


class Said:
    """Runs a command line; returns its exit code and output."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, program: str, *argv: str) -> tuple[int, str, str]:
        self._monkeypatch.setattr(sys, "argv", [program, *argv])
        if program == "volunteer":
            code = volunteer.run_command([*argv])
        else:
            with pytest.raises(SystemExit) as ended:
                organiser.main()
            code = int(ended.value.code or 0)
        out, err = self._capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err


@pytest.fixture
def said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Said:
    monkeypatch.setenv("VOLUNTEER_HOME", str(tmp_path / "volunteer"))
    monkeypatch.setenv("COORDINATOR_DATA_DIR", str(tmp_path / "coordinator"))
    return Said(monkeypatch, capsys)


@pytest.mark.parametrize("program", [organiser, volunteer])
def test_every_command_has_a_heading_in_the_help(program: ModuleType) -> None:
    names = {name for name in program.app if not name.startswith("-")} - {"help"}
    assert names == {name for names in program.GROUPS.values() for name in names}


@pytest.mark.parametrize("program", ["coordinator", "volunteer"])
def test_help_is_a_command_too(said: Said, program: str) -> None:
    code, out, _ = said(program, "help")
    assert code == 0
    assert "Begin" in out
    assert "Usage" in said(program, "help", "settings")[1]


def test_there_are_commands() -> None:
    assert len(ALL) > 80


def test_every_command_has_json() -> None:
    for program, words in ALL:
        if not LIVE & {*words}:
            names = {*function(program, words).parameters}
            assert "json" in names or "where" in names, words  # of a target, which brings --json


def test_a_mistake_is_one_sentence_or_one_document(said: Said) -> None:
    for program, words in ALL:
        code, out, err = said(program, *words, "--nonsense")
        assert (code, out) == (2, ""), words
        assert err.startswith(f"{program}: "), words
        assert err.count("\n") == 1, words
        if not LIVE & {*words}:
            code, out, err = said(program, *words, "--nonsense", "--json")
            assert (code, out) == (2, ""), words
            assert json.loads(err)["exit_code"] == 2, words


def test_a_run_has_one_name_in_all_arguments() -> None:
    for words, app in (ORGANISER | VOLUNTEER).items():
        names = [each.name for each in app.assemble_argument_collection()]
        if words[:1] == ("run",) and words[1:] not in (
            ("create",),
            ("list",),
            ("fork",),
            ("diff",),
        ):
            assert names[0] == "--run", words
        if words in (("generate",), ("chat",)):
            assert names[0] == "--run", words


LISTS = [words for words in ORGANISER if words[-1] == "list"] + [("settings",), ("status",)]


def test_every_list_is_one_document(said: Said) -> None:
    assert said("coordinator", "migrate", "--json")[0] == 0
    for words in LISTS:
        more = (".",) if words[0] == "backup" else ()
        _, out, err = said("coordinator", *words, *more, "--json")
        assert json.loads(out or err) is not None


def test_settings_of_both_have_a_header_and_hide_passwords(said: Said) -> None:
    code, out, _ = said("coordinator", "settings", "--database", "postgresql://me:secret@host/name")
    assert code == 0
    assert out.startswith("NAME ")
    assert " flag " in out
    assert "secret" not in out
    code, out, _ = said("volunteer", "settings")
    assert code == 0
    assert out.startswith("NAME ")


def test_what_nothing_undoes_asks_about_nothing_that_is_not_there(said: Said) -> None:
    said("coordinator", "migrate")
    for words in (("run", "stop", "a"), ("volunteer", "forget", "a")):
        for more in ((), ("--yes",)):
            code, out, err = said("coordinator", *words, *more)
            assert code != 0
            assert not out
            assert "there is no" in err


def test_both_programs_complete_words_in_a_shell() -> None:
    for app in (organiser.app, volunteer.app):
        assert "settings" in app.generate_completion(shell="bash")  # noqa: S604
        assert "--install-completion" in list(app)
