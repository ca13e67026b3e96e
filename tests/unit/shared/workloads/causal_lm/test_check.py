"""Forward checks of adapters: honest work lowers the loss on its samples, copied work does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.workloads.base import TrainSettings, load
from tests.support.workloads import tiny_causal, tiny_gpt

WORKLOAD = load("causal-lm")


@pytest.mark.parametrize("kind", ["text", "dialogues"])
def test_an_honest_update_is_told_from_none(tmp_path: Path, kind: str) -> None:
    data = tiny_gpt.sums(tmp_path) if kind == "text" else tiny_causal.dialogues(tmp_path)
    table = tiny_causal.table(tiny_causal.LLAMA, train="lora", lora={"rank": 8})
    config = WORKLOAD.config(table, data.manifest)
    settings = TrainSettings(lr=1e-2, warmup_steps=2)
    job = tiny_gpt.job(config, 20, 8, workload="causal-lm", train=settings)
    base = WORKLOAD.init(config, 3)
    learnt = tiny_gpt.finish(WORKLOAD.begin(job, base, data, "cpu", None))
    both = (data, data.heldout())
    honest = WORKLOAD.check(job, base, learnt, both, 7)
    lazy = WORKLOAD.check(job, base, base, both, 7)
    assert honest is not None
    assert lazy is not None
    assert honest.drop > 0.01
    assert lazy.drop == 0.0
