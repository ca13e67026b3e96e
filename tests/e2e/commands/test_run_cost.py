"""Cost of a run, said when it is made: the size fits the data, the rest is measured."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.command_line import Run

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "the",
    "lazy",
    "dog",
    "and",
    "the",
    "dog",
    "is",
    "not",
    "amused",
    "at",
    "all",
    ".",
]
FILE = 'name = "mine"\nworkload = "gpt"\ndataset = "corpus"\n'


def test_a_small_text_gets_a_small_model_and_its_cost(run: Run, tmp_path: Path) -> None:
    text = " ".join(WORDS[n * n % 17] + str(n % 97) for n in range(30_000))
    (tmp_path / "a.txt").write_text(text[:200_000])
    (tmp_path / "run.toml").write_text(FILE)
    place = ("--data-dir", tmp_path / "data")
    run("dataset", "add", "corpus", "--text", tmp_path / "a.txt", "--licence", "CC0-1.0", *place)
    said = run("run", "create", tmp_path / "run.toml", *place)
    assert said.code == 0
    made = json.loads(run("run", "show", "mine", "--json", *place).out)["run"]
    assert made["parameters"] < 2_000_000
    for words in (
        f"{made['parameters']:,} parameters",
        "a process holds",
        "an update is",
        "a task",
    ):
        assert words in said.out
