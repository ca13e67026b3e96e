"""Own pictures and dialogues: learnt from where they are, and measured on those kept back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from coordinator.database.tables.versions import heldout_sums
from coordinator.runs.datasets import Build
from shared.workloads.base import DatasetManifest
from shared.workloads.data.tokenizer import Put
from tests.support.local_coordinator import local_coordinator
from tests.support.local_volunteer import LocalMachine
from tests.support.own_files import add
from tests.support.workloads import tiny_causal, tiny_dcgan
from volunteer.control import events

COMMON = """
[data]
at = "members"
[task]
batch_size = 4
local_steps = 2
min_steps = 1
[plan]
preset = "fedavg"
quorum = 1
codec = "float32"
"""
PICTURES = f"""
name = "tiny"
workload = "dcgan"
dataset = "stripes"
[model]
generator_width = 8
discriminator_width = 8
latent = 16
{COMMON}"""
QWEN = ", ".join(f"{key} = {value!r}" for key, value in tiny_causal.QWEN2.items())
DIALOGUES = f"""
name = "tiny"
workload = "causal-lm"
dataset = "talk"
[model]
context = 32
config = {{ {QWEN.replace("'", '"').replace("True", "true").replace("False", "false")} }}
{COMMON}"""


def pictures(path: Path) -> Path:
    rng = np.random.default_rng(3)
    for number in range(40):
        pixels = rng.integers(0, 256, (9, 9, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path / f"{number}.png")
    return path


def dialogues(path: Path) -> Path:
    lines = [{"prompt": f"{n} less 1?", "completion": f"it is {n - 1}"} for n in range(90)]
    (path / "talk.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def talk(path: Path) -> Build:
    """Return the build of an example of dialogues."""
    path.mkdir()
    data = tiny_causal.dialogues(path, 60)
    manifest = data.manifest
    refs = (*manifest.chunks, *manifest.heldout, *manifest.assets.values())

    def build(put: Put) -> DatasetManifest:
        for ref in refs:
            put((path / ref.sha256).read_bytes())
        return manifest

    return build


@pytest.mark.parametrize("kind", ["pictures", "dialogues"])
async def test_own_files_of_a_kind_are_learnt_and_measured(tmp_path: Path, kind: str) -> None:
    text = PICTURES if kind == "pictures" else DIALOGUES
    build = tiny_dcgan.stripes if kind == "pictures" else talk(tmp_path / "example")
    folder = tmp_path / kind
    folder.mkdir()
    async with local_coordinator(tmp_path / "coordinator") as home:
        await home.start_run(text, build)
        machine = LocalMachine(tmp_path / "machine", home)
        await machine.join()
        record = await add(machine, pictures(folder) if kind == "pictures" else dialogues(folder))
        async with machine.working(max_tasks=1) as process:
            verdict = (await process.until(events.Judged)).verdict
            assert verdict.state == "accepted", verdict
            assert await process.ended() == 0
        rows = await home.coordinator.db.read(
            lambda conn: conn.execute(heldout_sums.select()).all()
        )
    assert record.numbers.samples > 4
    assert [row.version for row in rows] == [0]  # measured before the training
    assert all(row.loss_sum > 0 for row in rows)
