"""Forward check of a learner: did it get better at the positions that its task drew?

Slices of the task's own draws are measured before and after the update. The window holds no foreign
games to compare them with, so there is no gap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from shared.workloads.base import Data, ForwardFigures, Job
from shared.workloads.gomoku.config import GomokuConfig
from shared.workloads.gomoku.network import build
from shared.workloads.gomoku.train import Batches, losses, window

_SLICES, _SLICE = 16, 16  # positions


@torch.inference_mode()
def drop_of_update(
    job: Job, base: Mapping[str, Tensor], updated: Mapping[str, Tensor], own: Data, seed: int
) -> ForwardFigures:
    """Figures of a forward check. Raises InvalidRunFile for games that cannot be used."""
    config = GomokuConfig.from_dict(job.config)
    batches = Batches(window(own, config), config.size, job)
    nets = [build(config, weights, "cpu") for weights in (base, updated)]
    random = np.random.default_rng(seed)
    each = min(_SLICE, job.batch_size)
    drops = []
    for step in random.integers(0, job.steps, _SLICES).tolist():
        first = int(random.integers(0, job.batch_size - each + 1))
        drawn = batches.read(step, first, first + each)
        before, after = (float(losses(net, *drawn)[0]) for net in nets)
        drops.append(before - after)
    noise = float(np.std(drops, ddof=1)) / math.sqrt(_SLICES)
    return ForwardFigures(drop=float(np.mean(drops)), gap=0.0, noise=noise)
