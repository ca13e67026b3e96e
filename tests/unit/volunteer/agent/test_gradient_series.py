"""Leases in parts, as numbers: where parts and stretches begin and end, what they earn, and what
they add up to.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from coordinator.rules.sizing import first_part, parts_of
from shared.workloads.base import Result
from tests.support.workloads.tiny_gpt import WORKLOAD, Folder, close, config, job, sums
from volunteer.agent.stretch import stretch_of
from volunteer.training.gradient_sum import Summed
from volunteer.training.job import Spent


@given(st.integers(1, 400), st.integers(1, 10**9), st.integers(0, 50))
@example(1, 1, 1)
@example(6, 7, 3)
@example(7, 10**9, 3)
@example(7, 5, 8)
def test_what_a_lease_earns_is_what_its_parts_earn(steps: int, price: int, every: int) -> None:
    left, money, parts = steps, price, []
    while left:
        part, pay = first_part(left, money, every)
        assert 0 < part <= left
        assert abs(pay - price * part / steps) < 8  # by steps, to a few micro-credits
        parts.append((part, pay))
        left, money = left - part, money - pay
    assert len(parts) == parts_of(steps, every)
    assert sum(part for part, _ in parts) == steps
    assert sum(pay for _, pay in parts) == price


@given(st.integers(1, 60), st.integers(1, 9), st.lists(st.integers(1, 59), max_size=6))
@example(1, 1, [])
@example(3, 9, [1, 2])
@example(3, 1, [2])
def test_stretches_cover_a_job_once(steps: int, short: int, cuts: list[int]) -> None:
    whole = job({}, steps=steps, batch=9, start=90, stop=90 + (steps - 1) * 9 + short)
    points = sorted({0, steps, *(cut for cut in cuts if cut < steps)})
    found = [stretch_of(whole, *pair) for pair in itertools.pairwise(points)]
    assert [found[0].start, *(each.stop for each in found)] == [
        *(each.start for each in found),
        whole.stop,
    ]
    assert sum(each.steps for each in found) == steps
    assert len({each.seed for each in found}) == len(found)  # no snapshot fits another stretch
    assert found[0].seed == whole.seed


def result(steps: int, samples: int, loss: float) -> Result:
    return Result(steps=steps, samples=samples, loss_first=loss, loss_last=loss)


def test_stretches_add_up_to_the_mean_over_their_samples_on_their_oldest_version() -> None:
    summed, spent = Summed(), Spent(train_s=1.0, paused_s=0.5)
    with pytest.raises(RuntimeError):
        _ = summed.whole
    for value, count, samples, version in ((1.0, 7, 6, 4), (4.0, 9, 3, 6), (0.0, 2, 9, 5)):
        tensors = {"w": torch.full((3,), value), "seen": torch.tensor(count)}
        summed.add(result(samples // 3, samples, value), tensors, spent, version)
    whole = summed.whole
    assert torch.allclose(whole.tensors["w"], torch.tensor(1.0))  # (6 + 12 + 0) / 18
    assert int(whole.tensors["seen"]) == 9
    assert (whole.base_version, whole.result.steps, whole.result.samples) == (4, 6, 18)
    assert (whole.result.loss_first, whole.spent) == (1.0, Spent(train_s=3.0, paused_s=1.5))
    assert whole.result.loss_last == pytest.approx(1.0)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    path: Path = tmp_path_factory.mktemp("blobs")
    return sums(path)


def test_on_one_version_the_stretches_of_a_part_give_the_gradient_of_the_whole(
    data: Folder,
) -> None:
    model = config(data)
    weights = WORKLOAD.init(model, 0)
    whole = job(model, steps=4, update="gradient", stop=30)  # the last batch is short

    def gradient(asked: object) -> tuple[Result, dict[str, torch.Tensor]]:
        work = WORKLOAD.begin(asked, weights, data, "cpu", None)  # type: ignore[arg-type]
        while not work.done:
            work.advance()
        return work.result()

    summed = Summed()
    for first, end in ((0, 1), (1, 3), (3, 4)):
        summed.add(*gradient(stretch_of(whole, first, end)), Spent(train_s=1.0, paused_s=0.0), 0)
    found = {name: value.clone() for name, value in summed.whole.tensors.items()}
    assert close(found, gradient(whole)[1], atol=1e-6)
