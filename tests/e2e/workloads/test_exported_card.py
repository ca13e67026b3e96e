"""The card of an exported model: its own measure, and code that makes something of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shared.errors import BadRequest
from tests.e2e.workloads.test_dcgan import PRESETS, copied
from tests.e2e.workloads.test_dcgan import RUN as PICTURES
from tests.support.local_coordinator import RUN as TEXT
from tests.support.local_coordinator import LocalCoordinator, local_coordinator
from tests.support.selfplay_run import RUN as GAMES

ADAPTERS = """
name = "tiny"
workload = "causal-lm"
dataset = "sums"
[model]
train = "lora"
context = 64
config = { model_type = "gpt2", n_embd = 16, n_layer = 1, n_head = 2, n_positions = 64 }
"""
RUNS = {
    "gpt": (TEXT, "held-out loss"),
    "dcgan": (PICTURES + PRESETS["fedavg"], "Fréchet distance"),
    "gomoku": (GAMES, "tactical loss"),
    "causal-lm": (ADAPTERS, "held-out loss"),
}
FORMATS = (
    ("causal-lm", "safetensors"),
    ("causal-lm", "transformers"),
    ("gpt", "safetensors"),
    ("gpt", "transformers"),
    ("dcgan", "safetensors"),
    ("dcgan", "onnx"),
    ("gomoku", "safetensors"),
    ("gomoku", "onnx"),
)


async def _exported(home: LocalCoordinator, run: str, to: Path, format: str) -> str:
    if 'workload = "dcgan"' in run:
        await home.coordinator.datasets.add(copied)
    name = await home.start_run(run)
    while await home.coordinator.evaluation.evaluate_next():
        pass
    await home.coordinator.export.export(name, to, format=format)
    return (to / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("workload", "format"),
    [  # programs of people, each with a library that takes seconds to load
        pytest.param(*each, id="-".join(each), marks=() if each == FORMATS[2] else pytest.mark.slow)
        for each in FORMATS
    ],
)
async def test_the_code_of_a_card_runs(tmp_path: Path, workload: str, format: str) -> None:
    text, measure = RUNS[workload]
    to = tmp_path / "model"
    async with local_coordinator(tmp_path / "house") as home:
        card = await _exported(home, text, to, format)
    assert re.search(rf"^- {measure}: [0-9.]+( nats a token)? \(measured by", card, re.MULTILINE)
    assert ("nats" in card) == (workload in ("gpt", "causal-lm"))
    assert ", )" not in card  # a dataset without a source
    if workload == "dcgan":
        assert "![sample](version.png)" in card
        assert (to / "version.png").read_bytes().startswith(b"\x89PNG")
    else:
        assert re.search(r"A sample of this version:\n\n(`{3,})text\n(?s:.+)\n\1\n", card)
    named = "library_name: " in card.partition("\n---\n")[0]
    assert named == (format != "safetensors") == ("`pip install " in card)
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    # Only our own format needs the package.
    path = {"PYTHONPATH": str(Path(__file__).parents[3])} if format == "safetensors" else {}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=to,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | path | {"HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() or (to / "sample.png").read_bytes().startswith(b"\x89PNG")


async def test_a_format_that_does_not_fit_is_named(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path / "house") as home:
        with pytest.raises(BadRequest, match='no format "peft": choose safetensors or transform'):
            await _exported(home, TEXT, tmp_path / "model", "peft")
    assert not (tmp_path / "model").exists()
