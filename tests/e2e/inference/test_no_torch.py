"""The serving process computes nothing: PyTorch stays in the processes beside it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from tests.support.local_coordinator import RUN
from tests.support.workloads import tiny_causal

SERVER = """
import asyncio, json, sys
from pathlib import Path
from coordinator.config import Settings
from coordinator.inference.builtin_engine import BuiltinEngine, ProcessLimits
from coordinator.inference.inference_engine import Generation, ModelVersion
from coordinator.services import Coordinator
from shared.clock import SystemClock
from shared.errors import BadRequest
from shared.workloads.generation import batch
from tests.support.local_coordinator import LocalCoordinator

MODEL = ModelVersion(run_id=1, run="tiny", version=0)

async def main(path):
    settings = Settings(data_dir=Path(path), space_floor_bytes=0)
    clock = SystemClock()
    inside = await Coordinator.build(settings, clock, separate=True)
    engine = BuiltinEngine(inside.db, clock, inside.blobs, ProcessLimits(threads=1))
    done = []
    try:
        await LocalCoordinator(inside, clock).start_run(Path(path, "..", "run.toml").read_text())
        done.append("start")
        while await inside.evaluation.evaluate_next():
            done.append("evaluate")
        prompt = await engine.prepare(MODEL, "1 plus")
        sequence = batch.Sequence(id="a", prompt=prompt.tokens, max_tokens=3, seed=1)
        wanted = Generation(model=MODEL, sequence=sequence)
        if [piece async for piece in engine.generate(wanted)][-1].finish:
            done.append("generate")
        try:
            await engine.images(MODEL, 1, 0)
        except BadRequest:
            done.append("draw")
    finally:
        await engine.close()
        await inside.close()
    print(json.dumps([done, sorted({"torch", "transformers", "peft"} & sys.modules.keys())]))

if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
"""


ADAPTERS = """
name = "tiny"
workload = "causal-lm"
dataset = "sums"
[model]
train = "lora"
context = 16
[model.config]
model_type = "gpt2"
n_embd = 16
n_layer = 1
n_head = 2
n_positions = 16
"""


FROM = """
name = "tiny"
workload = "causal-lm"
dataset = "sums"
[model]
from = "FOLDER"
train = "lora"
context = 16
"""


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(RUN, id="gpt", marks=pytest.mark.slow),
        pytest.param(ADAPTERS, id="adapters", marks=pytest.mark.slow),
        pytest.param(FROM, id="from a folder", marks=pytest.mark.slow),  # which loads most
    ],
)
def test_a_server_that_evaluated_and_answered_has_no_torch(tmp_path: Path, run: str) -> None:
    settings = transformers.LlamaConfig(**{**tiny_causal.LLAMA, "vocab_size": 300})
    transformers.LlamaForCausalLM(settings).save_pretrained(tmp_path / "model")
    (tmp_path / "run.toml").write_text(run.replace("FOLDER", str(tmp_path / "model")))
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    said = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "data")],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": str(Path(__file__).parents[3]), "PATH": ""},
        check=False,
    )
    assert said.returncode == 0, said.stderr
    done, heavy = json.loads(said.stdout.splitlines()[-1])
    assert set(done) == {"start", "evaluate", "generate", "draw"}
    assert heavy == []
