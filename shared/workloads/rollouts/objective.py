"""Objective of the learner: group-relative policy optimisation, tapered for old answers.

The answers to one problem are a group, and an answer's advantage is its reward minus the group's
mean (Shao et al. 2024, arXiv 2402.03300). Neither the deviation of a group nor the length of an
answer divides it (Dr. GRPO, Liu et al. 2025, arXiv 2503.20783): the loss of an answer is the sum
over its tokens divided by a fixed length, so that any micro-batches give the same mean.

An answer better than its group's mean has the weight one, however old it is. A worse one has the
ratio of its present probability to that when it was sampled, at most one (TOPR, Le Roux et al.
2025, arXiv 2503.14286), so that an answer that the model has unlearnt is not pushed further away.
No KL term is used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_LOG_MAX = 20.0  # largest logarithm of an importance weight in figures


def advantages(rewards: Sequence[float]) -> list[float]:
    """Return the advantages of a group's answers; all zero if the rewards are equal, so that
    nothing can be learnt.
    """
    mean = sum(rewards) / len(rewards)
    same = max(rewards) == min(rewards)
    return [0.0 if same else reward - mean for reward in rewards]


def policy_loss(
    new: Tensor, old: Tensor, advantage: Tensor, mask: Tensor, *, longest: int
) -> tuple[Tensor, Tensor]:
    """Return the mean loss of answers, and figures: the mean importance weight of a token, the
    mean weight that answers lose by their age, and the mean length.

    `new` and `old` (B, T) are log-probabilities of the sampled tokens at the sampling temperature,
    under the learning and the sampling weights; `mask` (B, T) is one for the tokens of an
    answer, its end included; `advantage` is (B,); `longest` is the most tokens of an answer.
    """
    moved = (new.detach() - old) * mask
    weight = moved.sum(1).clamp(max=0).exp().where(advantage < 0, 1.0)
    surrogate = (weight * advantage)[:, None] * (new - new.detach()).exp()  # 1, with a gradient
    tokens = mask.sum().clamp(min=1.0)
    importance = (moved.clamp(max=_LOG_MAX).exp() * mask).sum() / tokens
    figures = torch.stack([importance, 1 - weight.mean(), mask.sum(1).mean()])
    return -((surrogate * mask).sum(1) / longest).mean(), figures
