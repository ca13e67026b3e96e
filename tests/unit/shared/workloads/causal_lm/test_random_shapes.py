"""Models of random small sizes: names and logits are the library's, and a task done with smaller
micro-batches, or gone on with after a restart, is the same task.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.workloads.base import Job, TrainSettings, Work, load
from shared.workloads.causal_lm.base_model import frozen_in
from shared.workloads.causal_lm.config import CausalConfig
from shared.workloads.causal_lm.model import build
from tests.support.workloads import tiny_gpt
from tests.unit.shared.workloads.causal_lm.test_library import library_model

WORKLOAD = load("causal-lm")
TOKENS = torch.arange(24).reshape(2, 12) * 7 % 300
STEPS, BATCH = 2, 4


@st.composite
def tables(draw: st.DrawFn, kind: str) -> dict[str, Any]:
    """Draw a `[model]` table of an architecture."""
    kv_heads, groups = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    heads, width = kv_heads * groups, 2 * draw(st.integers(1, 6))
    layers, positions = draw(st.integers(1, 3)), draw(st.integers(12, 64))
    tied = draw(st.booleans())
    if kind == "gpt2":
        shape = {"n_embd": heads * width, "n_head": heads, "n_layer": layers}
        shape |= {"n_positions": positions}
    else:
        shape = {"hidden_size": heads * width, "num_attention_heads": heads}
        shape |= {"num_key_value_heads": kv_heads, "num_hidden_layers": layers}
        shape |= {"intermediate_size": draw(st.integers(1, 40))}
        shape |= {"max_position_embeddings": positions, "tie_word_embeddings": tied}
    untied = kind != "gpt2" and not tied
    train = draw(st.sampled_from(["all", "lora", *(["head"] if untied else [])]))
    table: dict[str, Any] = {"config": {"model_type": kind, "vocab_size": 300, **shape}}
    table |= {"context": draw(st.integers(2, 12)), "train": train}
    if train == "lora":
        table["lora"] = {
            "rank": draw(st.integers(1, 5)),
            "dropout": draw(st.sampled_from([0, 0.2])),
        }
    return table


@lru_cache(maxsize=1)
def data() -> tiny_gpt.Folder:
    return tiny_gpt.sums(Path(tempfile.mkdtemp(prefix="sums-")))


def begun(config: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> Work:
    job = Job(
        run="r",
        workload="causal-lm",
        kind="train",
        update="delta",
        config=dict(config),
        train=TrainSettings(lr=1e-2),
        order_seed=5,
        start=0,
        stop=STEPS * BATCH,
        seed=11,
        steps=STEPS,
        batch_size=BATCH,
        global_step=0,
        total_steps=0,
    )
    return WORKLOAD.begin(job, weights, data(), "cpu")


def done(work: Work) -> dict[str, torch.Tensor]:
    while not work.done:
        work.advance()
    return dict(work.result()[1])


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt2"])
def test_every_small_model_is_the_librarys_and_a_task_of_it_is_one_task(kind: str) -> None:
    @settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(tables(kind))
    def holds(table: dict[str, Any]) -> None:
        raw = WORKLOAD.config(table, data().manifest)
        config = CausalConfig.from_dict(raw)
        weights = WORKLOAD.init(raw, 5)
        assert list(weights) == [spec.name for spec in WORKLOAD.schema(raw)]
        whole = CausalConfig.from_dict({**raw, "train": "all", "lora": None})
        with torch.inference_mode():
            ours = build(whole, WORKLOAD.init(whole.to_dict(), 5), None, "cpu")
            ours.module.train(False)
            theirs = library_model(whole)(input_ids=TOKENS).logits
            assert torch.allclose(ours.logits(TOKENS), theirs, atol=1e-4)
        if config.frozen:
            assert not set(frozen_in(config, {})) & set(weights) or config.head
        straight = done(begun(raw, weights))
        assert any(not torch.equal(straight[name], weights[name]) for name in weights)
        halved = begun(raw, weights)
        halved.halve()
        cut = done(halved)
        gone_on, first = begun(raw, weights), begun(raw, weights)
        while first.advance().step < 1:
            pass
        gone_on.restore(first.snapshot())
        again = done(gone_on)
        for name, value in straight.items():
            assert torch.allclose(cut[name], value, atol=2e-3), name
            assert torch.equal(again[name], value), name

    holds()
