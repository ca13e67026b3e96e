"""The objective: what a group says, what age takes away, and micro-batches that change nothing."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import Tensor

from shared.workloads.rollouts.objective import advantages, policy_loss
from tests.support.examples import examples

TOKENS, WORDS = 5, 7  # of the longest answer, of the vocabulary


def test_an_advantage_is_a_reward_beside_its_group() -> None:
    assert advantages([1.0, 0.0, 0.0, 0.0]) == [0.75, -0.25, -0.25, -0.25]
    assert advantages([0.1] * 3) == [0.0] * 3


@pytest.mark.parametrize(
    ("ratios", "gain", "weight"),
    [
        ((1.0, 1.0), 0.5, 1.0),
        ((3.0, 2.0), 0.5, 1.0),
        ((0.1, 0.1), 0.5, 1.0),  # a right answer is learnt, however unlikely it has become
        ((1.0, 1.0), -0.5, 1.0),
        ((3.0, 2.0), -0.5, 1.0),  # an answer moves nothing far
        ((0.5, 0.5), -0.5, 0.25),
        ((0.5, 4.0), -0.5, 1.0),  # as a whole it is likelier than it was
        ((1e-30, 1e-30), -0.5, 0.0),
    ],
)
def test_a_worse_answer_weighs_what_is_left_of_it(
    ratios: tuple[float, float], gain: float, weight: float
) -> None:
    old = torch.tensor([[-0.7, -1.1]])
    new = (old + torch.tensor([ratios]).log()).requires_grad_()
    ones = torch.ones(1, 2)
    loss, (importance, tapered, length) = policy_loss(
        new, old, torch.tensor([gain]), ones, longest=4
    )
    (slope,) = torch.autograd.grad(loss, new)
    assert slope.flatten().tolist() == pytest.approx([-gain * weight / 4] * 2)
    assert loss.item() == pytest.approx(-gain * weight * 2 / 4)
    assert importance.item() == pytest.approx(sum(ratios) / 2)
    assert (tapered.item(), length.item()) == (pytest.approx(1 - weight, abs=1e-6), 2)


def drawn(seed: int, answers: int) -> tuple[Tensor, Tensor, list[int], list[float]]:
    """Return logits (B, T, V), sampled tokens (B, T), lengths and advantages of a group."""
    draws = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(answers, TOKENS, WORDS, generator=draws, dtype=torch.float64)
    tokens = torch.randint(WORDS, (answers, TOKENS), generator=draws)
    lengths = torch.randint(1, TOKENS + 1, (answers,), generator=draws).tolist()
    rewards = torch.randint(2, (answers,), generator=draws).tolist()
    return logits, tokens, lengths, advantages(rewards)


def slopes(
    logits: Tensor, old: Tensor, tokens: Tensor, lengths: list[int], gains: list[float]
) -> Tensor:
    """Return the gradient of the loss by the logits."""
    logits = logits.clone().requires_grad_()
    new = logits.log_softmax(-1).gather(2, tokens[..., None])[..., 0]
    mask = (torch.arange(TOKENS) < torch.tensor(lengths)[:, None]).double()
    gain = torch.tensor(gains, dtype=torch.float64)
    loss, _ = policy_loss(new, old, gain, mask, longest=TOKENS)
    return torch.autograd.grad(loss, logits)[0]


def by_hand(
    logits: Tensor, old: Tensor, tokens: Tensor, lengths: list[int], gains: list[float]
) -> Tensor:
    """Return the same, token by token: by a logit, a log-probability rises by what the word is
    beside its probability.
    """
    found = torch.zeros_like(logits)
    for row, (length, gain) in enumerate(zip(lengths, gains, strict=True)):
        shares = [logits[row, place].softmax(-1).tolist() for place in range(length)]
        words = tokens[row].tolist()
        ratio = math.prod(
            shares[place][words[place]] / math.exp(old[row, place]) for place in range(length)
        )
        weight = min(1.0, ratio) if gain < 0 else 1.0
        for place in range(length):
            for word in range(WORDS):
                rise = (word == words[place]) - shares[place][word]
                found[row, place, word] = -gain * weight * rise / TOKENS / len(gains)
    return found


@settings(max_examples=examples(60), deadline=None)
@given(seed=some.integers(0, 2**32), answers=some.integers(1, 8), age=some.floats(0, 3))
def test_the_gradient_is_that_of_a_formula_by_hand(seed: int, answers: int, age: float) -> None:
    logits, tokens, lengths, gains = drawn(seed, answers)
    before = logits + age * drawn(seed + 1, answers)[0]
    old = before.log_softmax(-1).gather(2, tokens[..., None])[..., 0]
    parts = (logits, old, tokens, lengths, gains)
    torch.testing.assert_close(slopes(*parts), by_hand(*parts))


@settings(max_examples=examples(60), deadline=None)
@given(seed=some.integers(0, 2**32), answers=some.integers(1, 8))
def test_fresh_answers_have_the_plain_policy_gradient(seed: int, answers: int) -> None:
    logits, tokens, lengths, gains = drawn(seed, answers)
    plain = logits.clone().requires_grad_()
    new = plain.log_softmax(-1).gather(2, tokens[..., None])[..., 0]
    mask = torch.arange(TOKENS) < torch.tensor(lengths)[:, None]
    reward = (new * mask).sum(1) @ torch.tensor(gains, dtype=torch.float64)
    (wanted,) = torch.autograd.grad(-reward / TOKENS / answers, plain)
    torch.testing.assert_close(slopes(logits, new.detach(), tokens, lengths, gains), wanted)


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
