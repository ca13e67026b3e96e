"""Learning rate of a global step, for workers and the coordinator. This module loads without
torch.
"""

from __future__ import annotations

import math
from functools import lru_cache

from shared.workloads.base import TrainSettings

# Steps over which the rate rises in each task, at most a quarter of the task's: the optimiser is
# fresh, so its first steps follow single batches.
REWARM_STEPS = 5
LOOKS = 32  # most points at which `full_steps` samples the schedule

# Small batches of an untrained model give random directions, and Adam follows each at its full
# rate: with 40 of 1,200 steps of warm-up, two of six seeds stayed behind for the whole run, with a
# tenth no seed did (docs/experiments.md).
WARMUP_SHARE = 0.1
WARMUP_LEAST, WARMUP_MOST = 20, 500
WARMUP_UNKNOWN = 100  # warm-up of a run without an end


def warmup(train: TrainSettings, total: int) -> int:
    """Return the global steps of warm-up in a run of `total` steps (0 = unknown)."""
    if train.warmup_steps is not None:
        return train.warmup_steps
    if total <= 0:
        return WARMUP_UNKNOWN
    return min(WARMUP_MOST, max(WARMUP_LEAST, round(WARMUP_SHARE * total)))


def learning_rate(train: TrainSettings, step: int, total: int) -> float:
    """Return the rate of global step `step` (from 0): linear warm-up, then a cosine down to
    `min_lr_ratio`, then constant.

    The cosine spans `decay_steps`, or `total` if that is 0; if both are unknown the rate stays
    constant.
    """
    whole = train.decay_steps or total
    rising = warmup(train, whole)
    if step < rising:
        return train.lr * (step + 1) / rising
    span = whole - rising
    if span <= 0:
        return train.lr
    done = min(1.0, (step - rising) / span)
    floor = train.min_lr_ratio
    return train.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))


def rewarm_factor(step: int, steps: int) -> float:
    """Return the factor, up to 1, of the learning rate in step `step` (from 0) of a task of `steps`
    steps.
    """
    return min(1.0, (step + 1) / max(1, min(REWARM_STEPS, steps // 4)))


@lru_cache(maxsize=4096)
def full_steps(train: TrainSettings, first: int, steps: int, total: int) -> float:
    """Return the number of steps at the full rate that equal `steps` steps from `first` on."""
    looks = min(LOOKS, max(1, steps))
    rates = (
        learning_rate(train, first + (2 * look + 1) * steps // (2 * looks), total)
        for look in range(looks)
    )
    return max(1e-6, math.fsum(rates) / looks / train.lr * steps)
