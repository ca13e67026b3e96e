"""Objective of the learner: group-relative policy optimisation.

The answers to one problem are a group, and an answer's advantage is its reward minus the group's
mean (Shao et al. 2024, arXiv 2402.03300). Neither the deviation of a group nor the length of an
answer divides it (Dr. GRPO, Liu et al. 2025, arXiv 2503.20783): the loss of an answer is the sum
over its tokens divided by a fixed length, so that any micro-batches give the same mean. The
clip is wider upwards (DAPO, Yu et al. 2025, arXiv 2503.14476), and also bounds the importance
weights in answers worse than their group (INTELLECT-2, 2025, arXiv 2505.07291). No KL term is used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CLIP = (0.2, 0.28)  # below and above an importance weight of one
WEIGHT_MAX = 4.0  # largest importance weight in an answer worse than its group
_LOG_MAX = 20.0  # largest logarithm of an importance weight


def advantages(rewards: Sequence[float]) -> list[float]:
    """Return the advantages of a group's answers; all zero if nothing can be learnt from it."""
    mean = sum(rewards) / len(rewards)
    same = max(rewards) == min(rewards)
    return [0.0 if same else each - mean for each in rewards]


def policy_loss(
    new: Tensor, old: Tensor, advantage: Tensor, mask: Tensor, *, longest: int
) -> tuple[Tensor, Tensor]:
    """Return the mean loss of answers, and figures: the mean importance weight, the share of
    clipped tokens, and the mean length.

    `new` and `old` (B, T) are log-probabilities of the sampled tokens at the sampling temperature,
    under the learning and the sampling weights; `mask` (B, T) is one for the tokens of an
    answer, its end included; `advantage` is (B,); `longest` is the most tokens of an answer.
    """
    weight = (new - old).clamp(max=_LOG_MAX).exp()
    gain = advantage[:, None]
    low, high = 1 - CLIP[0], 1 + CLIP[1]
    held = (weight * gain).minimum(weight.clamp(low, high) * gain)
    held = held.where(gain >= 0, held.maximum(WEIGHT_MAX * gain))
    outside = ((gain > 0) & (weight > high)) | (
        (gain < 0) & ((weight < low) | (weight > WEIGHT_MAX))
    )
    tokens = mask.sum().clamp(min=1.0)
    figures = ((weight * mask).sum() / tokens, (outside * mask).sum() / tokens, mask.sum(1).mean())
    loss = -((held * mask).sum(1) / longest).mean()
    return loss, torch.stack(figures).detach()
