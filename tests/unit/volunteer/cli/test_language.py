"""The language of the command line: that of the settings, the flag before all."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.errors import BadRequest
from volunteer.cli.exit_codes import confirm
from volunteer.cli.main import run_command
from volunteer.i18n.catalogue import LanguageChoice, choose, current, use


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("VOLUNTEER_HOME", str(tmp_path))
    monkeypatch.setenv("VOLUNTEER_SANDBOX", "false")
    monkeypatch.setenv("VOLUNTEER_PRIORITY", "normal")
    monkeypatch.delenv("VOLUNTEER_JOIN", raising=False)
    yield tmp_path
    use(LanguageChoice())


@pytest.mark.parametrize(
    ("language", "says"),
    [
        ("en", '"soon" is not a time: write it like 45m, 2h, 1h30m or 1d'),
        ("de", "„soon“ ist keine Dauer: schreib sie wie 45m, 2h, 1h30m oder 1d"),
        ("es", "«soon» no es una duración: escríbela como 45m, 2h, 1h30m o 1d"),
    ],
)
def test_a_command_speaks_the_language_of_the_settings(
    language: str, says: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "config.toml").write_text(f'language = "{language}"\n')
    assert run_command(["pause", "--for", "soon"]) == 2
    assert says in capsys.readouterr().err


def test_the_flag_wins_and_a_language_that_is_missing_gets_a_sentence(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "config.toml").write_text('language = "de"\n')
    assert run_command(["--no-ui", "--language", "es"]) == 78  # nothing was joined
    assert current().language == "es"
    assert run_command(["--no-ui", "--language", "xx"]) == 78
    assert current().language == "en"
    assert 'volunteer: there is no language "xx": English is used' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("language", "answers"),
    [("en", ("y", "YES ")), ("de", ("j", "Ja", "y")), ("es", ("s", "sí", "si", "yes"))],
)
def test_a_yes_is_a_yes_in_the_language_of_the_question(
    language: str, answers: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(choose(language))
    for typed in (*answers, "", "n", "nein", "yellow", "s or so"):
        monkeypatch.setattr("builtins.input", lambda question, typed=typed: typed)
        assert confirm("Remove it?") == (typed in answers)


def test_a_question_that_nobody_can_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(BadRequest, match="no terminal to confirm in: add --yes"):
        confirm("Remove it?")


def test_what_machines_read_is_the_same_in_every_language(home: Path) -> None:
    (home / "config.toml").write_text('language = "de"\n')
    assert run_command(["--no-ui", "--json"]) == 78
    assert current().language == "en"


def test_damaged_settings_are_told_once_and_in_english(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "config.toml").write_text("language = [\n")
    assert run_command(["--no-ui"]) == 78
    assert capsys.readouterr().err.count("is not TOML") == 1
