"""Windows of several dialogues: learnt apart, and answers alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from shared.workloads.base import TrainSettings, load
from shared.workloads.causal_lm.config import CausalConfig
from shared.workloads.causal_lm.model import CausalModel, build
from shared.workloads.data.tokenizer import FIRST, LEARNT, TOKEN_BITS
from tests.support.workloads import tiny_causal, tiny_gpt

SHARE = 0.5


def model(shape: str) -> CausalModel:
    table = tiny_causal.table({**tiny_causal.SHAPES[shape], "vocab_size": 300})
    found = CausalConfig.from_dict(table)
    made = build(found, load("causal-lm").init(found.to_dict(), 5), None, "cpu")
    made.module.train(False)
    return made


def window(*dialogues: tuple[list[int], list[int]]) -> torch.Tensor:
    tokens: list[int] = []
    for asked, answer in dialogues:
        tokens += [asked[0] | FIRST, *asked[1:], *(token | LEARNT for token in answer)]
    return torch.tensor([tokens])


ONE, TWO = ([5, 6, 7], [8, 9]), ([10, 11], [12, 13, 14])


@pytest.mark.parametrize("shape", tiny_causal.SHAPES)
@torch.inference_mode()
def test_a_dialogue_does_not_see_the_one_before_it(shape: str) -> None:
    made = model(shape)

    def total(*dialogues: tuple[list[int], list[int]]) -> float:
        windows = window(*dialogues)
        return float(made.loss(windows, SHARE).loss) * (windows.shape[1] - 1) * SHARE

    assert total(ONE, TWO) == pytest.approx(total(ONE) + total(TWO), abs=1e-3)
    assert total(([1, 2, 3], ONE[1]), TWO) != pytest.approx(total(ONE, TWO), abs=1e-3)


@pytest.mark.parametrize("shape", tiny_causal.SHAPES)
@torch.inference_mode()
def test_a_dialogue_longer_than_a_sliding_window_has_the_losses_of_the_library(shape: str) -> None:
    made = model(shape)
    dialogue = ([5, 6, 7], [(7 * number) % 300 for number in range(30)])
    marked = window(ONE, dialogue)
    # without marks the library writes the masks
    alone = made.losses(window(dialogue) & TOKEN_BITS, marked=False)
    losses = made.losses(marked, marked=True)
    assert losses[0, -30:].tolist() == pytest.approx(alone[0, -30:].tolist(), abs=1e-4)


@torch.inference_mode()
def test_only_answers_count() -> None:
    made = model("llama")
    windows = window(([5, 6, 7], []), ([10, 11], []))
    assert float(made.loss(windows, SHARE).loss) == 0.0


def test_the_loss_of_a_batch_is_the_mean_of_its_windows() -> None:
    made = model("llama")
    rows = [window(ONE, TWO), window(TWO, ONE)]
    with torch.inference_mode():
        whole = float(made.loss(torch.cat(rows), SHARE).loss)
        assert whole == pytest.approx(np.mean([float(made.loss(row, SHARE).loss) for row in rows]))


@pytest.mark.parametrize("shape", ["llama", "gemma2"])
def test_a_pass_has_the_gradient_of_a_plain_loop_over_whole_dialogues(
    tmp_path: Path, shape: str
) -> None:
    data = tiny_causal.dialogues(tmp_path, 24)
    base = load("causal-lm")
    config = base.config(tiny_causal.table(tiny_causal.SHAPES[shape], context=63), data.manifest)
    weights = base.init(config, 5)
    windows = sum(base.samples(config, data.manifest))
    train = TrainSettings(lr=1e-3, clip_norm=0.0)
    job = tiny_gpt.job(
        config, steps=1, batch=windows, workload="causal-lm", update="gradient", train=train
    )
    gradient = tiny_gpt.finish(base.begin(job, weights, data, "cpu"))
    module = build(CausalConfig.from_dict(config), weights, None, "cpu").module
    (chunk,) = data.manifest.chunks
    stream = np.fromfile(data.chunk(0), "<u4").astype(np.int64)
    dialogues = np.split(stream, np.flatnonzero(stream & FIRST)[1:])
    assert windows < len(dialogues)
    assert sum(map(len, dialogues)) == chunk.items
    count = 0
    for dialogue in dialogues:
        ids = torch.from_numpy(dialogue & TOKEN_BITS)
        learnt = torch.from_numpy(dialogue[1:] & LEARNT != 0)
        logits = module(input_ids=ids[None, :-1]).logits[0]
        torch.autograd.backward(F.cross_entropy(logits[learnt], ids[1:][learnt], reduction="sum"))
        count += int(learnt.sum())
    for name, parameter in module.named_parameters():
        assert torch.allclose(gradient[name], parameter.grad / count, atol=1e-6), name
