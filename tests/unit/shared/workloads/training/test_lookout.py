"""Work looks up within its micro-batches: what happens there changes nothing of what it learns."""

from __future__ import annotations

import gc
import itertools
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.workloads.training import step_loop
from shared.workloads.training.step_loop import Lookout, StepWork
from tests.support.workloads import tiny_gpt


class Enough(Exception):
    pass


@pytest.fixture
def data(tmp_path: Path) -> tiny_gpt.Folder:
    return tiny_gpt.sums(tmp_path)


def begun(data: tiny_gpt.Folder, micro: int = 8, **changes: Any) -> StepWork:
    """Work in micro-batches of a fixed size."""
    config = tiny_gpt.config(data, dropout=0.1)
    weights = tiny_gpt.WORKLOAD.init(config, 3)
    job = tiny_gpt.job(config, **changes)
    work = tiny_gpt.WORKLOAD.begin(job, weights, data, "cpu")
    assert isinstance(work, StepWork)
    work.begin_with(micro, most=True, room=0)
    return work


@pytest.mark.parametrize("update", ["delta", "gradient"])
@pytest.mark.parametrize("micro", [8, 2])
def test_work_that_is_interrupted_anywhere_learns_the_same_bit_for_bit(
    data: tiny_gpt.Folder, micro: int, update: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_loop, "_EVERY_S", 0.0)
    whole = tiny_gpt.finish(begun(data, micro, update=update))
    work, looks = begun(data, micro, update=update), itertools.count()
    fresh, ends = work.snapshot(), [30, 90, 180, 300, 450]  # forward and backward alike

    def look() -> None:
        if next(looks) in ends:
            raise Enough

    work.listen(look)
    interrupted = 0
    while not work.done:
        try:
            work.advance()
        except Enough:
            interrupted += 1
            assert work.snapshot().keys() == fresh.keys()  # none is possible within a step
    assert interrupted == len(ends)
    assert tiny_gpt.same(work.result()[1], whole)


def test_finished_work_leaves_its_memory_without_a_garbage_collection(
    data: tiny_gpt.Folder,
) -> None:
    gc.collect()
    gc.disable()
    try:
        work = begun(data)
        work.listen(lambda: None)
        tiny_gpt.finish(work)
        model, own = weakref.ref(work.model), weakref.ref(work)
        del work
        assert (own(), model()) == (None, None)
    finally:
        gc.enable()


def test_a_look_may_compute(data: tiny_gpt.Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_loop, "_EVERY_S", 0.0)
    whole = tiny_gpt.finish(begun(data))
    work = begun(data)
    other = torch.nn.Linear(8, 8)

    @torch.inference_mode()
    def look() -> None:
        other(torch.ones(2, 8)).sum().item()

    work.listen(look)
    assert tiny_gpt.same(tiny_gpt.finish(work), whole)


def test_bytes_that_a_micro_batch_keeps_are_counted_once_and_without_weights() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    watched = Lookout(lambda: None, model.parameters(), "cpu")
    given = torch.ones(3, 4)
    with watched:
        torch.autograd.backward(model(given).sum())
    assert watched.kept_bytes == 4 * (3 * 4 + 3 * 16)  # the input, and what tanh gave
    assert watched.longest_s > 0
