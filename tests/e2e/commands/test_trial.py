"""`coordinator try`: one command from a folder of texts to a run that waits for volunteers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shared.network.links import parse_link
from tests.support.command_line import Run


def folder_of_texts(folder: Path) -> Path:
    folder.mkdir()
    for number in range(12):
        lines = [f"{n} and {number} make {n + number}, says the book\n" for n in range(400)]
        (folder / f"{number}.txt").write_text("".join(lines))
    return folder


def test_a_folder_becomes_a_run_with_a_join_link_and_says_by_which_commands(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = folder_of_texts(tmp_path / "My books")
    monkeypatch.chdir(tmp_path)
    place = ("--data-dir", "data")
    said = run("try", texts, *place)
    assert said.code == 0, said.err
    commands = [line for line in said.out.splitlines() if line.startswith("$ coordinator ")]
    assert [command.split()[2:4] for command in commands] == [
        ["dataset", "add"],
        ["run", "create"],
        ["run", "create"],
        ["run", "start"],
        ["invite", "create"],
    ]
    assert all(command.endswith("--data-dir data") for command in commands)
    assert "volunteer join 'http" in said.out
    shown = json.loads(run("run", "show", "my-books", "--json", *place).out)
    assert shown["run"]["state"] == "running"
    assert (tmp_path / "my-books.toml").exists()
    again = run("try", texts, *place)
    assert again.code == 2
    assert "--name" in again.err


@pytest.mark.slow
def test_as_json_it_prints_one_document(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = folder_of_texts(tmp_path / "texts")
    monkeypatch.chdir(tmp_path)
    licence = 'CC\\1 "as is"'
    said = run("try", texts, "--name", "mine", "--licence", licence, "--json", "--data-dir", "data")
    reply = json.loads(said.out)
    assert reply["run"] == "mine"
    shown = json.loads(run("run", "show", "mine", "--json", "--data-dir", "data").out)
    assert shown["run"]["licence"] == licence
    assert parse_link(reply["link"]).code


def test_a_folder_that_is_not_there_is_named(run: Run, tmp_path: Path) -> None:
    said = run("try", tmp_path / "nowhere", "--data-dir", tmp_path / "data")
    assert said.code == 2
    assert "there is no file or folder" in said.err
