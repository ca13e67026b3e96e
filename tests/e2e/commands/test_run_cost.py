"""Cost of a run, said when it is made: its size fits the data, and its memory follows from it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from shared.text import size
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
    assert f"{made['parameters']:,} parameters" in said.out
    memory = size(made["memory_bytes"])
    assert re.search(rf"A machine needs about .+ of memory, or {memory} of a GPU's\.", said.out)
    streamed = f"A GPU with {size(made['streamed_bytes'])} streams the blocks of the model"
    assert f"{streamed} from the machine's memory." in said.out
