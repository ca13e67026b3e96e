"""Real training in virtual time: what merging does to the loss, in seconds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from shared.workloads.training import lr_schedule
from tests.experiments.exp_learning import quick_setup
from tests.experiments.learning import Run, Setup, learn
from tests.experiments.learning_cells import ALONE


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    folder: Path = tmp_path_factory.mktemp("corpus")
    return quick_setup(folder)


@pytest.mark.slow
def test_four_who_average_learn_more_than_one_alone_and_less_than_one_large_batch(
    setup: Setup,
) -> None:
    """Batches are small and steps long, since averaging removes the noise of both."""
    noisy = replace(setup, lr=4e-2, batch=2, steps=160)
    alone = learn(noisy, Run(plan=ALONE, workers=1, local_steps=20))
    together = learn(noisy, Run(plan={"preset": "fedavg"}, local_steps=20))
    whole = learn(noisy, Run(plan=ALONE, workers=1, batch=4 * noisy.batch, local_steps=20))
    assert whole.loss < together.loss < alone.loss - 0.02
    assert set(together.row()["refused"]) <= {"gone"}  # tasks that the run's end came before
    assert together.up == pytest.approx(noisy.steps / 20 * 1.02, rel=0.15)  # int8


@pytest.mark.slow
def test_merged_gradients_make_the_steps_of_adamw_on_the_union_of_the_batches(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warm-up, cosine, decay and clipping on; one worker alone steps by torch's own AdamW, all in
    one task, since its optimiser is fresh in each.
    """
    monkeypatch.setattr(lr_schedule, "REWARM_STEPS", 1)  # the rate of a task would rise once more
    train = {"warmup_steps": 5, "weight_decay": 0.1, "clip_norm": 0.3, "decay_steps": 35}
    exact = {"codec": "float32", "downlink": "float32"}
    merged = {"preset": "gradient-average", "overlap": False}
    plans = {"merged": merged | exact, "alone": ALONE | exact}
    ends: dict[str, dict[str, Any]] = {}
    for name, plan in plans.items():
        keep = {1: tmp_path / f"{name}-1", 40: tmp_path / name}
        run = Run(plan=plan, steps=40, workers=2, batch=8, local_steps=1, train=train, save=keep)
        if name == "alone":
            adamw = train | {"optimizer": "adamw"}
            run = replace(run, workers=1, batch=16, local_steps=40, train=adamw)
        learn(replace(setup, lr=1e-3), run)
        ends[name] = load_file(tmp_path / name / "model.safetensors")
    start = load_file(tmp_path / "merged-1" / "model.safetensors")
    apart, moved = (
        np.sqrt(sum(np.square(ends["merged"][name] - of[name], dtype=float).sum() for name in of))
        for of in (ends["alone"], start)
    )
    assert apart <= 1e-5 * moved


def test_nobody_is_refused_for_what_he_trained_while_the_learning_rate_rose(setup: Setup) -> None:
    """Judged by steps alone, whatever came after the first eight contributions was refused for
    ever.
    """
    slow_start = replace(setup, warmup=60)
    plan = {"preset": "fedasync", "quorum": 1, "deadline_seconds": 0.0}
    run = Run(plan=plan, workers=6, local_steps=10, tokens_share=0.4, stretch=6.0, hours=0.5)
    found = learn(slow_start, run)
    assert found.row()["refused"] == {}
    assert len(found.outcome.merged_at) > 15
