"""The tour of the README by its letter, as a newcomer takes it: seconds and keys from the first
command after the install to the first accepted task on the screen.

    python -m tests.benchmarks.bench_first_task
    python -m tests.benchmarks.bench_first_task --turns 3 --json first.json
    python -m tests.benchmarks.bench_first_task --workload causal-lm

Every command is the README's (with causal-lm: those of docs/language-models.md, adapters for a
small random Llama and eight hundred dialogues); the newcomer waits for each to end, and presses
enter on each page of the wizard as soon as the page lets it through. It needs tmux.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from shared.workloads.data.tokenizer import train_tokenizer
from tests.support.server_process import Process, command
from tests.support.tmux_screen import TmuxScreen
from tests.support.workloads.tiny_causal import LLAMA, TEMPLATE

ROOT = str(Path(__file__).resolve().parents[2])
VOLUNTEER = [sys.executable, "-c", "from volunteer.__main__ import main; main()"]
SECONDS, KEYS = 60.0, 6  # goals
ADAPTERS = """
name = "talk"
workload = "causal-lm"
dataset = "talk"
[model]
from = "{model}"
train = "lora"
context = 64
[plan]
quorum = 1
"""
# Words by which a page of the wizard says that enter leads on.
PAGES = (
    "What may volunteer use\\?",
    "enter: next",
    "Which run do you want",
    "press  ENTER  to start",
)


def example(folder: Path) -> list[tuple[str, ...]]:
    """Return the commands that make and start the README's run."""
    return [("run", "create", "--example"), ("run", "start", "stdlib-gpt")]


def adapters(folder: Path) -> list[tuple[str, ...]]:
    """Return the commands that make and start adapters for a model in a folder."""
    import torch
    import transformers

    lines = [{"prompt": f"{n} and {n}?", "completion": f"it is {2 * n}"} for n in range(800)]
    talk, model, run = folder / "talk.jsonl", folder / "model", folder / "talk.toml"
    talk.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    torch.manual_seed(1)
    shape = {**LLAMA, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4}
    arguments = {key: value for key, value in shape.items() if key != "model_type"}
    made = transformers.LlamaConfig(vocab_size=1024, **arguments)
    transformers.LlamaForCausalLM(made).save_pretrained(model)
    tokenizer = model / "tokenizer.json"
    tokenizer.write_bytes(train_tokenizer([str(line) for line in lines], 1024))
    (model / "chat_template.jinja").write_text(TEMPLATE.source)
    run.write_text(ADAPTERS.format(model=model))
    words = ("--chat", str(talk), "--tokenizer", str(tokenizer), "--licence", "CC0-1.0")
    return [
        ("dataset", "add", "talk", *words),
        ("run", "create", str(run)),
        ("run", "start", "talk"),
    ]


def tour(
    directory: Path,
    told: list[tuple[str, float]],
    prepared: Callable[[Path], list[tuple[str, ...]]] = example,
) -> int:
    """Take the tour; note when each step ended. Returns the number of keys."""
    commands = prepared(directory)
    began = time.monotonic()

    def note(step: str) -> None:
        told.append((step, time.monotonic() - began))

    data, home = directory / "coordinator", directory / "home"
    here = {"VOLUNTEER_HOME": str(home), "PYTHONPATH": ROOT}
    with Process(data, "--port", "0", PYTHONPATH=ROOT) as server:
        note("serve")
        for words in commands:
            done = command(*words, "--data-dir", str(data), PYTHONPATH=ROOT)
            if done.returncode:
                raise SystemExit(done.stderr)
            note(" ".join(words[:2]))
        joining = [*VOLUNTEER, "join", server.link, "--name", "ada"]
        if os.spawnvpe(os.P_WAIT, sys.executable, joining, os.environ | here):
            raise SystemExit("join failed")
        note("join")
        with TmuxScreen(VOLUNTEER, 120, 36, **here) as screen:
            for page in PAGES:
                screen.see(page)
                screen.press("Enter")
            note("wizard")
            screen.see("✓ (accepted|merged) ", 120)
            note("first accepted task")
            screen.press("q")
    return len(PAGES)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--workload", choices=("gpt", "causal-lm"), default="gpt")
    options = parser.parse_args()
    prepared = adapters if options.workload == "causal-lm" else example
    took, keys = [], 0
    for _ in range(options.turns):
        told: list[tuple[str, float]] = []
        with tempfile.TemporaryDirectory() as directory:
            keys = tour(Path(directory), told, prepared)
        print("  ".join(f"{step} {at:.1f} s" for step, at in told), flush=True)
        took.append(told[-1][1])
    middle = statistics.median(took)
    met = "met" if middle <= SECONDS and keys <= KEYS else "MISSED"
    print(
        f"first accepted task after {middle:.1f} s and {keys} keys; goal {SECONDS:g} s, {KEYS}", met
    )
    if options.json:
        options.json.write_text(json.dumps({"seconds": took, "keys": keys}, indent=1))


if __name__ == "__main__":
    main()
