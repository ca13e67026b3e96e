"""Cost of a run, said when it is made: the size fits the data, the rest is measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.command_line import Run
from tests.support.workloads import tiny_causal

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


GOMOKU = """
name = "board"
workload = "gomoku"
[model]
size = 5
win = 3
[task.options]
games = 2
simulations = 2
"""
LORA = """
name = "adapted"
workload = "causal-lm"
dataset = "corpus"
[model]
from = "FOLDER"
train = "lora"
context = 32
"""


def test_a_run_of_games_and_one_of_given_weights_are_measured_too(run: Run, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    settings = transformers.Qwen3Config(**{**tiny_causal.QWEN3, "vocab_size": 300})
    transformers.Qwen3ForCausalLM(settings).save_pretrained(tmp_path / "model")
    (tmp_path / "a.txt").write_text(" ".join(WORDS[n * n % 17] + str(n % 97) for n in range(9000)))
    (tmp_path / "board.toml").write_text(GOMOKU)
    (tmp_path / "lora.toml").write_text(LORA.replace("FOLDER", str(tmp_path / "model")))
    place = ("--data-dir", tmp_path / "data")
    text = (tmp_path / "a.txt", "--vocab-size", "300", "--licence", "CC0-1.0")
    assert run("dataset", "add", "corpus", "--text", *text, *place).code == 0
    board = run("run", "create", tmp_path / "board.toml", *place)
    assert "a process holds" in board.out, board
    assert "a game takes" in board.out
    lora = run("run", "create", tmp_path / "lora.toml", *place)
    assert "a process holds" in lora.out, lora
    assert "an update is" in lora.out
