"""The objective: what a group says, what the clip holds, and micro-batches that change nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shared.workloads.rollouts.objective import (
    CLIP,
    WEIGHT_MAX,
    advantages,
    policy_loss,
)


def test_an_advantage_is_a_reward_beside_its_group() -> None:
    assert advantages([1.0, 0.0, 0.0, 0.0]) == [0.75, -0.25, -0.25, -0.25]
    assert advantages([0.1] * 3) == [0.0] * 3


@pytest.mark.parametrize(
    ("weight", "gain", "kept", "moves"),
    [
        (1.0, 1.0, 1.0, True),
        (1.0, -1.0, -1.0, True),
        (2.0, 1.0, 1 + CLIP[1], False),  # already likelier than the clip lets it become
        (0.5, 1.0, 0.5, True),
        (0.5, -1.0, -(1 - CLIP[0]), False),
        (2.0, -1.0, -2.0, True),
        (100.0, -1.0, -WEIGHT_MAX, False),  # one token moves nothing far
    ],
)
def test_the_clip_has_two_sides(weight: float, gain: float, kept: float, moves: bool) -> None:
    now = torch.tensor([[np.log(weight)]], requires_grad=True)
    ones = torch.ones(1, 1)
    loss, (mean, held, length) = policy_loss(now, 0 * ones, torch.tensor([gain]), ones, longest=1)
    torch.autograd.backward(loss)
    assert loss.item() == pytest.approx(-kept)
    assert (now.grad is not None and bool(now.grad.abs().sum() > 0)) is moves
    assert (mean.item(), held.item(), length.item()) == (pytest.approx(weight), not moves, 1)


def test_micro_batches_and_padding_change_nothing() -> None:
    draws = torch.Generator().manual_seed(1)
    now, sampled = (-torch.rand(6, 5, generator=draws, dtype=torch.float64) for _ in range(2))
    gains = torch.randn(6, generator=draws, dtype=torch.float64)
    counted = (torch.arange(5) < torch.tensor([1, 2, 3, 4, 5, 5])[:, None]).double()

    def loss(rows: slice) -> float:
        parts = (now[rows], sampled[rows], gains[rows], counted[rows])
        return float(policy_loss(*parts, longest=5)[0])

    whole = loss(slice(6))
    assert sum(loss(slice(n, n + 2)) for n in (0, 2, 4)) / 3 == pytest.approx(whole)
    now[0, 1:] = 99.0  # after the end
    assert loss(slice(6)) == whole


def test_steps_make_better_answers_likelier() -> None:
    logits = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.SGD([logits], 0.5)
    for _ in range(50):
        now = logits.log_softmax(0)[:, None]
        gains = torch.tensor(advantages([1.0, 0.0, 0.0]))
        loss, _ = policy_loss(now, now.detach(), gains, torch.ones(3, 1), longest=1)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    assert float(logits.softmax(0)[0].detach()) > 0.8
