"""A GPT task: what a volunteer's device computes, however often it is interrupted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from shared.errors import BadRequest, InvalidRunFile
from shared.tensors.spec import MOMENTUM
from shared.workloads.base import TrainSettings
from shared.workloads.data.pass_order import PassOrder
from shared.workloads.gpt.config import GptConfig
from shared.workloads.gpt.model import build
from shared.workloads.training.learner import momenta
from tests.support.workloads.tiny_gpt import (
    WORKLOAD,
    Folder,
    chunk_tokens,
    close,
    config,
    finish,
    job,
    same,
    sums,
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return sums(tmp_path_factory.mktemp("blobs"))


def test_it_learns_real_text(data: Folder) -> None:
    model = config(data)
    weights = WORKLOAD.init(model, 0)
    before = WORKLOAD.evaluate(model, weights, data.heldout(), 60, lambda: False)
    train = TrainSettings(lr=1e-2, warmup_steps=5)
    work = WORKLOAD.begin(job(model, steps=60, train=train, total_steps=60), weights, data, "cpu")
    steps = []
    while not work.done:
        progress = work.advance()
        steps.append((progress.step, progress.samples, progress.loss is not None))
    report, learnt = work.result()
    after = WORKLOAD.evaluate(model, learnt, data.heldout(), 60, lambda: False)
    assert steps == [(n, 8 * n, True) for n in range(1, 61)]
    assert (report.steps, report.samples) == (60, 480)
    assert report.loss_first is not None
    assert report.loss_last is not None
    assert before["loss"] - 0.7 < report.loss_first < before["loss"] + 0.2  # of six steps
    assert report.loss_last < report.loss_first - 2
    assert after["loss"] < before["loss"] - 2
    assert after["bits_per_byte"] < before["bits_per_byte"]


def test_the_same_task_gives_the_same_update(data: Folder) -> None:
    model = config(data, dropout=0.1)
    weights = WORKLOAD.init(model, 0)
    first = finish(WORKLOAD.begin(job(model), weights, data, "cpu"))
    torch.manual_seed(99)
    assert same(first, finish(WORKLOAD.begin(job(model), weights, data, "cpu")))
    assert not same(first, finish(WORKLOAD.begin(job(model, seed=12), weights, data, "cpu")))
    assert same(weights, WORKLOAD.init(model, 0))  # the base was not written to


def test_a_task_goes_on_with_the_momentum_of_its_version(data: Folder) -> None:
    model, plain = config(data, shared_momentum=True), config(data)
    version = WORKLOAD.init(model, 0)
    train = TrainSettings(lr=3e-3, warmup_steps=0, optimizer="muon")
    task = job(model, steps=1, train=train)
    first = momenta(finish(WORKLOAD.begin(task, version, data, "cpu")))
    # the same samples at the same weights, so the same gradient
    again = version | {MOMENTUM + name: value for name, value in first.items()}
    second = momenta(finish(WORKLOAD.begin(task, again, data, "cpu")))
    for name, decay in (("blocks.0.mlp.up.weight", 0.95), ("tok_emb.weight", 0.9)):
        torch.testing.assert_close(second[name], (1 + decay) * first[name])
    # what a version does not hold, a task neither begins with nor hands in
    fresh = finish(WORKLOAD.begin(job(plain, steps=1, train=train), version, data, "cpu"))
    assert list(fresh) == [spec.name for spec in WORKLOAD.schema(plain)]
    longer = job(model, steps=8, train=train)
    from_zero, from_first = (
        finish(WORKLOAD.begin(longer, base, data, "cpu")) for base in (version, again)
    )
    assert not same(from_zero, from_first)


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd", "shared muon"])
@pytest.mark.parametrize("update", ["delta", "gradient"])
def test_a_restarted_task_ends_bit_for_bit_like_one_that_ran_through(
    data: Folder, optimizer: str, update: str
) -> None:
    optimizer, is_shared = optimizer.removeprefix("shared "), optimizer.startswith("shared ")
    model = config(data, dropout=0.1, shared_momentum=is_shared)
    weights = WORKLOAD.init(model, 0)
    train = TrainSettings(lr=3e-3, warmup_steps=2, optimizer=optimizer, prox_mu=0.1)  # type: ignore[arg-type]
    task = job(model, steps=6, train=train, update=update)
    whole = WORKLOAD.begin(task, weights, data, "cpu")
    expected = finish(whole)
    broken = WORKLOAD.begin(task, weights, data, "cpu")
    for _ in range(3):
        broken.advance()
    snapshot = broken.snapshot()
    broken.advance()
    again = WORKLOAD.begin(task, weights, data, "cpu")
    again.restore(snapshot)
    assert same(finish(again), expected)
    assert again.result()[0] == whole.result()[0]


def test_a_window_that_does_not_fit_is_tried_with_less_memory(data: Folder) -> None:
    model = config(data, dropout=0.1)
    weights = WORKLOAD.init(model, 0)
    expected = finish(WORKLOAD.begin(job(model, batch=2), weights, data, "cpu"))
    short = WORKLOAD.begin(job(model, batch=2), weights, data, "cpu")
    while short.halve() > 1:
        pass
    assert short.halve() == 1  # blocks are computed anew from now on, with the same dropout
    with pytest.raises(MemoryError):
        short.halve()
    assert close(finish(short), expected, atol=1e-5)


def test_a_snapshot_of_another_task_is_refused(data: Folder) -> None:
    model, deeper = config(data), config(data, n_layer=3)
    work = WORKLOAD.begin(job(model), WORKLOAD.init(model, 0), data, "cpu")
    other = WORKLOAD.begin(job(deeper), WORKLOAD.init(deeper, 0), data, "cpu")
    with pytest.raises(InvalidRunFile, match="another task"):
        other.restore(work.snapshot())
    with pytest.raises(InvalidRunFile, match="another task"):
        work.restore({})


def test_a_gradient_is_the_mean_over_all_samples_at_the_base_weights(data: Folder) -> None:
    model = config(data)
    weights = WORKLOAD.init(model, 0)
    task = job(model, steps=3, batch=4, stop=11, update="gradient")  # the last batch is smaller
    work = WORKLOAD.begin(task, weights, data, "cpu")
    found = finish(work)
    reference = build(GptConfig.from_dict(model), weights, "cpu")
    order = PassOrder(WORKLOAD.samples(model, data.manifest), seed=5)
    rows = [
        chunk_tokens(data, chunk)[32 * s : 32 * s + 33] for chunk, s in order.at(0, 11).tolist()
    ]
    tokens = torch.from_numpy(np.stack(rows))
    reference(tokens[:, :-1], tokens[:, 1:]).backward()
    expected = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    assert close(found, expected, 1e-7)
    assert work.result()[0].samples == 11


@pytest.mark.parametrize("update", ["delta", "gradient"])
def test_out_of_memory_changes_the_micro_batch_and_nothing_else(data: Folder, update: str) -> None:
    model = config(data)
    weights = WORKLOAD.init(model, 0)
    task = job(model, steps=3, batch=7, stop=20, update=update)
    expected = finish(WORKLOAD.begin(task, weights, data, "cpu"))
    work = WORKLOAD.begin(task, weights, data, "cpu")
    work.advance()
    assert work.halve() == 3
    progress = work.advance()
    assert (progress.step, progress.samples, progress.loss) == (1, 10, None)
    with pytest.raises(RuntimeError, match="between steps"):
        work.snapshot()
    assert work.halve() == 1  # the step in progress starts over
    assert work.advance().samples == 8
    assert work.halve() == 1  # with less memory for a sample
    with pytest.raises(MemoryError, match="one sample alone"):
        work.halve()
    assert close(finish(work), expected, 1e-4 if update == "delta" else 1e-7)
    assert work.result()[0].samples == 20


def test_a_pause_in_the_middle_of_a_step_changes_nothing(data: Folder) -> None:
    model = config(data)
    weights = WORKLOAD.init(model, 0)
    results = []
    for pause in (False, True):
        work = WORKLOAD.begin(job(model), weights, data, "cpu")
        work.halve()
        work.advance()
        if pause:
            work.suspend()
            work.resume()
        results.append(finish(work))
    assert same(*results)


def test_fedprox_stays_nearer_to_the_base(data: Folder) -> None:
    model = config(data)
    weights = WORKLOAD.init(model, 0)

    def moved(mu: float) -> float:
        train = TrainSettings(
            optimizer="sgd", lr=0.05, warmup_steps=0, prox_mu=mu, weight_decay=0.0
        )
        learnt = finish(WORKLOAD.begin(job(model, steps=12, train=train), weights, data, "cpu"))
        return sum(float((learnt[name] - weights[name]).square().sum()) for name in weights)

    assert moved(2.0) < 0.8 * moved(0.0)


def test_bfloat16_keeps_float32_weights(data: Folder) -> None:
    model = config(data)
    train = TrainSettings(precision="bfloat16")
    learnt = finish(WORKLOAD.begin(job(model, train=train), WORKLOAD.init(model, 0), data, "cpu"))
    assert {value.dtype for value in learnt.values()} == {torch.float32}


def test_a_loss_that_is_no_number_ends_the_task_with_advice(data: Folder) -> None:
    model = config(data)
    train = TrainSettings(lr=1e30, warmup_steps=0, clip_norm=0.0)
    work = WORKLOAD.begin(job(model, train=train), WORKLOAD.init(model, 0), data, "cpu")
    with pytest.raises(InvalidRunFile, match=r"no longer a number.*lower"):
        finish(work)


def test_a_task_that_does_not_add_up_is_refused(data: Folder) -> None:
    model = config(data)
    weights = WORKLOAD.init(model, 0)
    total = sum(WORKLOAD.samples(model, data.manifest))
    for changes in (
        {"stop": 24},
        {"stop": 33},
        {"start": total, "stop": total + 32},
        {"kind": "learn"},
    ):
        with pytest.raises(BadRequest):
            WORKLOAD.begin(job(model, **changes), weights, data, "cpu")


def test_a_damaged_chunk_is_refused_before_training(data: Folder, tmp_path: Path) -> None:
    for name in [chunk.sha256 for chunk in data.manifest.chunks]:
        blob = (data.path / name).read_bytes()
        (tmp_path / name).write_bytes(blob[:10] + b"\xff\xff" + blob[12:])
    model = config(data)
    work = WORKLOAD.begin(
        job(model), WORKLOAD.init(model, 0), Folder(data.manifest, tmp_path), "cpu"
    )
    with pytest.raises(
        InvalidRunFile, match="token 65535 at position 5 is not below vocab_size 300"
    ):
        work.advance()
    for name in [chunk.sha256 for chunk in data.manifest.chunks]:
        (tmp_path / name).write_bytes(b"\x01\x00" * 50)
    with pytest.raises(InvalidRunFile, match="has 50 tokens, but its manifest says"):
        work.advance()


def test_the_losses_of_a_report_are_means_at_both_ends(data: Folder) -> None:
    """A single batch at one end would make work that helped look as if it had not."""
    model = config(data)
    work = WORKLOAD.begin(
        job(model, steps=40, train=TrainSettings(lr=0.0), total_steps=40),
        WORKLOAD.init(model, 0),
        data,
        "cpu",
    )
    losses: dict[int, float] = {}
    while not work.done:
        progress = work.advance()
        if progress.loss is not None:
            losses[progress.step] = progress.loss
    report, _ = work.result()
    first = [losses[step] for step in (1, 2, 3, 4)]
    assert report.loss_first == pytest.approx(sum(first) / 4, abs=1e-4)
    assert report.loss_first != pytest.approx(losses[1], abs=1e-6)
