"""Evaluation of a trained generator: its samples, and their distance to real images.

The generator draws with the running statistics of its batch norm, as it does after a download, not
with the statistics of a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.errors import InvalidRunFile, NotFound
from shared.workloads.base import Data, Sample, Weights
from shared.workloads.data.classifier import Judge, frechet, load_judge, spread
from shared.workloads.data.image_chunks import to_pixels
from shared.workloads.data.image_dataset import JUDGE
from shared.workloads.data.image_files import Pixels, write_png
from shared.workloads.data.resize import braille, tile
from shared.workloads.dcgan.config import DcganConfig, flops
from shared.workloads.dcgan.model import build
from shared.workloads.training.seeded_random import normal

_MEASURED = 1024  # images
_EVAL_FLOPS = 3e11  # ten seconds on a slow core
_AT_ONCE = 64
_ROW = 8  # images side by side, and as many rows
_TEXT_ROW, _TEXT_ROWS, _TEXT_SIGNS = 4, 2, 36  # images a row, rows, characters
_SURE = 0.5  # least probability at which an image's class counts as drawn
_SHARE_MIN = 0.25  # least share of a covered class, as a part of its share among real images


@torch.inference_mode()
def draw(config: DcganConfig, weights: Weights, noise: NDArray[np.float32]) -> Tensor:
    """Return images (N, C, S, S) in -1 ... 1 from noise (N, L), on the CPU."""
    model = build(config, weights, "cpu").eval()
    parts = [noise[start : start + _AT_ONCE] for start in range(0, len(noise), _AT_ONCE)]
    return torch.cat([model.draw(torch.from_numpy(part)) for part in parts])


def evaluate(
    config: DcganConfig,
    weights: Weights,
    heldout: Data | None,
    budget_s: float,
    stop: Callable[[], bool],
) -> dict[str, float]:
    """Measure the distance of images from fixed noise to real ones; `budget_s` and `stop` only end
    the measurement early.

    "loss" is the Fréchet distance in the judge's features; "frechet_real" is the same distance for
    real images that the judge never saw. "coverage" is the share of the classes that were drawn,
    "class_overlap" the agreement of the classes' shares with the shares among real images, "images"
    the number of measured images, "complete" 1, or 0 after an early end.
    """
    judge = _judge(config, heldout)
    image_count = int(_EVAL_FLOPS / flops(config.generator()))
    image_count = max(2 * _AT_ONCE, min(_MEASURED, image_count // _AT_ONCE * _AT_ONCE))
    noise = normal("measured", 0, (image_count, config.latent))
    ends = monotonic() + budget_s
    parts: list[tuple[NDArray[np.float64], NDArray[np.float64]]] = []
    for start in range(0, image_count, _AT_ONCE):
        if len(parts) > 1 and (stop() or monotonic() > ends):
            break
        parts.append(judge.look(draw(config, weights, noise[start : start + _AT_ONCE])))
    features = np.concatenate([part[0] for part in parts])
    odds = np.concatenate([part[1] for part in parts])
    coverage, overlap = class_figures(odds, judge.shares)
    return {
        "loss": frechet(spread(features), judge.real),
        "frechet_real": judge.floor,
        "coverage": coverage,
        "class_overlap": overlap,
        "images": float(len(features)),
        "complete": float(len(features) == image_count),
    }


def _judge(config: DcganConfig, heldout: Data | None) -> Judge:
    if heldout is None:
        raise InvalidRunFile("dcgan is measured against real images, so it needs a dataset")
    try:
        return load_judge(heldout.asset(JUDGE), config.channels)
    except NotFound as error:
        raise InvalidRunFile(
            f'the dataset "{heldout.manifest.name}" has no judge of images: make it with'
            " `coordinator dataset add NAME --images PATH`"
        ) from error


def class_figures(odds: NDArray[np.float64], real: NDArray[np.float64]) -> tuple[float, float]:
    """Return (coverage, overlap) from the class probabilities `odds` (N, K) of drawn images and the
    shares `real` (K,) of the classes among real images. Coverage is the share of the real classes
    that are drawn at least `_SHARE_MIN` as often as they should be; overlap is the sum over classes
    of the smaller share. An image of uncertain class counts for no class.
    """
    sure = np.nan_to_num(odds).max(axis=1) >= _SURE
    shares = np.bincount(odds[sure].argmax(axis=1), minlength=len(real)) / len(odds)
    there = real > 0
    covered = shares[there] >= _SHARE_MIN * real[there]
    return float(covered.mean()), float(np.minimum(shares, real).sum())


def sample(config: DcganConfig, weights: Weights, prompt: str, seed: int) -> Sample:
    """Return 64 images as PNG, from noise fixed by seed and prompt; the first images as text
    too.
    """
    noise = normal(f"sample/{prompt}", seed, (_ROW * _ROW, config.latent))
    images: Pixels = to_pixels(draw(config, weights, noise).numpy())
    title = f"{len(images)} images of fixed noise" + (f" “{prompt}”" if prompt else "")
    text = "\n".join(braille(tile(images[: _TEXT_ROW * _TEXT_ROWS], _TEXT_ROW), _TEXT_SIGNS))
    return Sample(kind="png", title=title, text=text, data=write_png(tile(images, _ROW)))
