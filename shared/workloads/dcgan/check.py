"""Forward check of a DCGAN: did both networks get better at what they were given to do?

The discriminator is measured on real images of the task and on fakes of the base; the generator by
what the updated discriminator makes of its images before and after. Batches are normalised as in
training. The drop is that of the network which gained less, so that neither may be made up. Foreign
images are no measure: they gain as much as those of the task (measured).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from shared.workloads.base import Data, ForwardFigures, Job
from shared.workloads.data.image_chunks import Images, images_of, unit_range
from shared.workloads.data.pass_order import PassOrder
from shared.workloads.data.windows import of_pass
from shared.workloads.dcgan.config import DcganConfig, flops
from shared.workloads.dcgan.model import Dcgan, build, statistics_kept
from shared.workloads.training.seeded_random import normal

SLICE_MIN = 16  # images: of fewer, the statistics of a batch say little
_CHECKED = 64  # images of the task
_CHECK_FLOPS = 5e11  # of all forward passes: a quarter of a minute on a slow core


def drop_of_update(
    job: Job, base: Mapping[str, Tensor], updated: Mapping[str, Tensor], own: Data, seed: int
) -> ForwardFigures | None:
    """Figures of a forward check; None where there are too few images."""
    config = DcganConfig.from_dict(job.config)
    order = PassOrder(images_of(own.manifest, config.shape), job.order_seed)
    mine = of_pass(order, job.start, job.stop, job.steps, job.batch_size)
    cost = 5 * flops(config.discriminator()) + 2 * flops(config.generator())
    count = min(max(SLICE_MIN, min(_CHECKED, int(_CHECK_FLOPS / cost))), len(mine))
    if count < 2:
        return None
    chosen = np.random.default_rng(seed).permutation(len(mine))[:count]
    pixels = Images(own, config.shape, mine[np.sort(chosen)]).read(0, count)
    noise = torch.from_numpy(normal("checked", seed, (count, config.latent)))
    drops = _drops(config, (base, updated), torch.from_numpy(unit_range(pixels)), noise)
    least = min(drops, key=lambda drop: float(drop.mean()))
    spread = math.sqrt(float(least.var(ddof=1)) / count)
    return ForwardFigures(drop=float(least.mean()), gap=0.0, noise=spread)


@torch.inference_mode()
def _drops(
    config: DcganConfig,
    weights: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
    real: Tensor,
    noise: Tensor,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return how far the loss fell of each pair that the discriminator told apart, and of each
    image that the generator drew, (N,) each.
    """
    before, after = (build(config, given, "cpu").train() for given in weights)
    with statistics_kept(before), statistics_kept(after):
        fakes, better = before.draw(noise), after.draw(noise)
        told = _told(before, real, fakes) - _told(after, real, fakes)
        drawn = _loss(after.judge(fakes), 1.0) - _loss(after.judge(better), 1.0)
    return told, drawn


def _told(model: Dcgan, real: Tensor, fakes: Tensor) -> NDArray[np.float64]:
    """Return the discriminator's loss, of pairs of a real image and a fake."""
    return _loss(model.judge(real), 1.0) + _loss(model.judge(fakes), 0.0)


def _loss(judged: Tensor, truth: float) -> NDArray[np.float64]:
    wanted = torch.full_like(judged, truth)
    loss = F.binary_cross_entropy_with_logits(judged, wanted, reduction="none")
    found: NDArray[np.float64] = loss.double().numpy()
    return found
