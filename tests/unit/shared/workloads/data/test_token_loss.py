"""Held-out loss: the sum over counted targets by their number, however they are read."""

from __future__ import annotations

import hashlib
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from typing_extensions import override

from shared.errors import InvalidRunFile
from shared.workloads.base import ChunkRef, DatasetManifest
from shared.workloads.base import load as workload
from shared.workloads.causal_lm.config import CausalConfig
from shared.workloads.causal_lm.model import build
from shared.workloads.causal_lm.train import CausalWork
from shared.workloads.data.token_loss import Reading, heldout_loss
from shared.workloads.data.tokenizer import FIRST, LEARNT, MARKED, TOKEN_BITS
from shared.workloads.training.step_loop import StepLoss
from tests.support.workloads import tiny_causal, tiny_gpt

VOCAB = 50
OF_TOKEN = np.random.default_rng(0).gamma(2, size=VOCAB).astype(np.float32)


def held(path: Path, *chunks: NDArray[np.int64]) -> tiny_gpt.Folder:
    refs = []
    for tokens in chunks:
        blob = tokens.astype("<u4").tobytes()
        name = hashlib.sha256(blob).hexdigest()
        (path / name).write_bytes(blob)
        refs.append(ChunkRef(sha256=name, size=len(blob), items=len(tokens)))
    meta: dict[str, str | int | float] = {"dtype": MARKED, "answer_share": 0.3}
    return tiny_gpt.Folder(
        DatasetManifest(
            name="d",
            kind="chat-tokens",
            licence="CC0-1.0",
            source="",
            chunks=tuple(refs),
            meta=meta,
        ),
        path,
    )


def of_token(windows: NDArray[np.int64]) -> NDArray[np.float32]:
    """Losses of a model that looks at nothing but the target."""
    found: NDArray[np.float32] = OF_TOKEN[windows[:, 1:] & TOKEN_BITS]
    return found


def chunks_of(dialogues: list[NDArray[np.int64]], cuts: list[int]) -> list[NDArray[np.int64]]:
    """Return dialogues in chunks."""
    edges = sorted({0, *(cut % len(dialogues) for cut in cuts), len(dialogues)})
    return [np.concatenate(dialogues[a:b]) for a, b in itertools.pairwise(edges)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    masks=st.lists(st.lists(st.booleans(), min_size=2, max_size=90), min_size=1, max_size=6),
    cuts=st.lists(st.integers(0, 500), max_size=3),
    context=st.integers(2, 40),
    logits=st.integers(1, 1 << 20),
    seed=st.integers(0, 99),
)
def test_the_loss_is_the_mean_over_the_answers_of_whole_dialogues(
    tmp_path: Path, masks: list[list[bool]], cuts: list[int], context: int, logits: int, seed: int
) -> None:
    dialogues, wanted = [], []
    for number, mask in enumerate(masks):
        ids = np.random.default_rng(seed + number).integers(0, VOCAB, len(mask))
        marked = ids | (LEARNT * np.array(mask).astype(np.int64))
        marked[0] |= FIRST
        dialogues.append(marked)
        wanted.append(ids[1 : context + 1][np.array(mask)[1 : context + 1]])
    data = held(tmp_path, *chunks_of(dialogues, cuts))
    reading = Reading(context=context, vocab_size=max(VOCAB, logits), forward_flops=1.0)
    targets = np.concatenate(wanted)
    if not len(targets):
        with pytest.raises(InvalidRunFile, match="no token to measure"):
            heldout_loss(of_token, reading, data, 60, lambda: False)
        return
    found = heldout_loss(of_token, reading, data, 60, lambda: False)
    mean = OF_TOKEN[targets].mean(dtype=np.float64)
    assert found["loss"] == pytest.approx(mean, rel=1e-12)
    assert found["perplexity"] == pytest.approx(math.exp(mean), rel=1e-12)
    assert (found["tokens"], found["complete"]) == (len(targets), 1.0)
    learnt = [mask for mask in masks if any(mask[1:])]
    assert found["dialogues"] == len(learnt)
    assert found["cut"] == sum(len(mask) > context + 1 for mask in learnt)


@pytest.mark.parametrize("answers", [(1, 9), (9, 1), (3, 3), (20, 40)])
@pytest.mark.parametrize("context", [16, 48, 64])
@pytest.mark.parametrize("cuts", [[], [3, 8]])
def test_a_random_model_has_the_loss_of_a_plain_loop_over_dialogues(
    tmp_path: Path, answers: tuple[int, int], context: int, cuts: list[int]
) -> None:
    random, dialogues = np.random.default_rng(1), list[NDArray[np.int64]]()
    for number in range(12):
        sizes = zip((5, answers[0], 4 + number, answers[1]), (0, 1, 0, 1), strict=True)
        parts = [random.integers(0, VOCAB, size) | (LEARNT * learnt) for size, learnt in sizes]
        parts[0][0] |= FIRST
        dialogues.append(np.concatenate(parts))
    data = held(tmp_path, *chunks_of(dialogues, cuts))
    table = tiny_causal.table({**tiny_causal.LLAMA, "vocab_size": VOCAB}, context=context)
    config = CausalConfig.from_dict(table)
    weights = workload("causal-lm").init(config.to_dict(), 3)
    found = workload("causal-lm").evaluate(config.to_dict(), weights, data, 60, lambda: False)
    module = build(config, weights, None, "cpu").module.eval()
    total, count = 0.0, 0
    with torch.inference_mode():
        for dialogue in dialogues:
            ids = torch.from_numpy(dialogue[: context + 1] & TOKEN_BITS)
            rows = F.log_softmax(module(ids[None, :-1]).logits[0].double(), -1)
            for place, target in enumerate(ids[1:].tolist()):
                if dialogue[1 + place] & LEARNT:
                    total -= float(rows[place, target])
                    count += 1
    assert found["loss"] == pytest.approx(total / count, rel=1e-6)
    assert found["tokens"] == count


def test_a_volunteer_is_told_the_mean_over_the_answers_of_a_step(tmp_path: Path) -> None:
    data = tiny_causal.dialogues(tmp_path)
    base = workload("causal-lm")
    model = base.config(tiny_causal.table(tiny_causal.LLAMA), data.manifest)
    weights = base.init(model, 1)
    job = tiny_gpt.job(model, steps=2, batch=4, workload="causal-lm", update="gradient")
    work = base.begin(job, weights, data, "cpu")
    told = []
    while not work.done:
        progress = work.advance()
        told += [progress.loss] if progress.loss is not None else []
    assert told == pytest.approx([math.log(model["config"]["vocab_size"])] * 2, rel=0.02)
    assert work.result()[0].loss_last == pytest.approx(told[-1], rel=1e-6)


class NothingLearnt(CausalWork):
    """Work on windows without a token to learn."""

    @override
    def measure(self, start: int, stop: int) -> StepLoss:
        step = super().measure(start, stop)
        return step._replace(loss=0 * step.loss, weight=torch.zeros(()))


def test_a_task_without_a_learnt_token_has_no_loss(tmp_path: Path) -> None:
    data = tiny_causal.dialogues(tmp_path)
    base = workload("causal-lm")
    model = base.config(tiny_causal.table(tiny_causal.LLAMA), data.manifest)
    job = tiny_gpt.job(model, steps=2, batch=4, workload="causal-lm", update="gradient")
    work = NothingLearnt(job, base.init(model, 1), data, "cpu")
    while not work.done:
        assert work.advance().loss is None
    report, _ = work.result()
    assert (report.loss_first, report.loss_last) == (None, None)
