"""Judge of generated images: a small classifier, trained on a dataset's own classes when the
dataset is built.

Generated and real images are compared by the Fréchet distance (Heusel et al. 2017) of its last
hidden layer's activations, so no model has to be downloaded. Distances by different judges cannot
be compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from typing_extensions import override

from shared.errors import InvalidFrame, InvalidRunFile
from shared.tensors.frame import frame_bytes, open_frame, schema_of_file
from shared.workloads.data.image_chunks import unit_range
from shared.workloads.data.image_files import Pixels
from shared.workloads.data.pass_order import permutation
from shared.workloads.training.seeded_random import normal

SIDE = 32  # larger images are scaled down to this size
FEATURES = 32
_WIDTHS = (16, 32, 64)
_CLUSTERS = 10  # classes of a dataset without labels
_STEPS = 400
_PASSES = 60  # passes over a small set of images, in place of _STEPS
_BATCH = 64
_LR = 3e-3
_VARIANCE = 100.0  # total variance of real images' features
_SPREAD_MIN = 64  # least images for a mean and a covariance
_AT_ONCE = 256  # images
_FILE_BYTES_MAX = 16 << 20


class TrainedJudge(msgspec.Struct, frozen=True, kw_only=True):
    """Trained judge as a file, and its accuracy."""

    data: bytes
    classes: int
    accuracy: float  # accuracy on held-out images


class Spread(msgspec.Struct, frozen=True):
    """Mean and covariance of a set of images in feature space."""

    mean: NDArray[np.float64]  # (D,)
    covariance: NDArray[np.float64]  # (D, D)


class _Network(nn.Module):
    """Three convolutions that halve the side, a mean to 2 x 2, features, classes."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        widths = (channels, *_WIDTHS)
        self.convs = nn.ModuleList(
            nn.Conv2d(before, after, 3, stride=2, padding=1) for before, after in pairwise(widths)
        )
        self.embed = nn.Linear(_WIDTHS[-1] * 4, FEATURES)
        self.classes = nn.Linear(FEATURES, classes)

    def features(self, x: Tensor) -> Tensor:
        """Return the features (B, D) of images (B, C, H, W)."""
        for conv in self.convs:
            x = F.relu(conv(x))
        out: Tensor = self.embed(F.adaptive_avg_pool2d(x, 2).flatten(1))
        return out

    @override
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classes(F.relu(self.features(x)))
        return out


@dataclass(frozen=True, slots=True)
class Judge:
    """Classifier that measures generated images."""

    network: _Network
    real: Spread
    shares: NDArray[np.float64]  # share of each class among real images, (K,)
    floor: float  # distance of real images not used for training; 0 = too few to measure

    def look(self, images: Tensor) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return features (N, D) and class probabilities (N, K) of images (N, C, H, W) in -1..1."""
        return _look(self.network, images)


def shrink(images: Iterable[Pixels]) -> Tensor:
    """Return images (C, H, W) as one float tensor (N, C, h, w), shrunk to the judge's size."""
    small = [_small(torch.from_numpy(unit_range(image[None]))) for image in images]
    return torch.cat(small)


def _small(images: Tensor) -> Tensor:
    return F.adaptive_avg_pool2d(images, SIDE) if images.shape[-1] > SIDE else images


def spread(features: NDArray[np.float64]) -> Spread:
    """Return mean and covariance of features (N, D)."""
    return Spread(features.mean(0), np.atleast_2d(np.cov(features, rowvar=False)))


def frechet(one: Spread, other: Spread) -> float:
    """Return the Fréchet distance of two normal distributions; infinite for NaN."""
    parts = (one.mean, other.mean, one.covariance, other.covariance)
    if not all(np.isfinite(part).all() for part in parts):
        return math.inf
    # (C1 C2)^1/2 has the trace of (R C2 R)^1/2 with R = C1^1/2, which is symmetric.
    values, vectors = np.linalg.eigh(one.covariance)
    root = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
    inner = np.linalg.eigvalsh(root @ other.covariance @ root)
    trace = np.trace(one.covariance) + np.trace(other.covariance)
    apart = float(np.square(one.mean - other.mean).sum())
    return max(0.0, apart + float(trace) - 2 * float(np.sqrt(np.maximum(inner, 0)).sum()))


def train_judge(
    images: Tensor,
    labels: NDArray[np.int64],
    heldout: Tensor,
    expected: NDArray[np.int64],
    seed: int,
    on_step: Callable[[int, int], None] = lambda done, total: None,
) -> TrainedJudge:
    """Train a judge on the classes `labels` of `images`; the held-out images measure its
    accuracy. `on_step` receives the numbers of finished and of all steps.
    """
    classes = int(labels.max()) + 1
    network = _network(images.shape[1], classes, seed)
    optimizer = torch.optim.AdamW(network.parameters(), _LR, weight_decay=0.01)
    steps = min(_STEPS, _PASSES * math.ceil(len(images) / _BATCH))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    targets = torch.from_numpy(labels)
    batch, order = min(_BATCH, len(images)), np.empty(0, np.int64)
    for step in range(steps):
        if len(order) < batch:
            order = permutation(len(images), seed, step + 2)
        rows, order = torch.from_numpy(order[:batch]), order[batch:]
        loss = F.cross_entropy(network(images[rows]), targets[rows])
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        optimizer.step()
        schedule.step()
        on_step(step + 1, steps)
    network.requires_grad_(False)
    _scale(network, images)
    real, _ = _look(network, images)
    other, odds = _look(network, heldout)
    labelled = expected >= 0
    right = odds.argmax(1)[labelled] == expected[labelled]
    shares = np.bincount(labels, minlength=classes) / len(labels)
    floor = frechet(spread(real), spread(other)) if len(other) >= _SPREAD_MIN else 0.0
    data = _write(network, spread(real), shares, floor)
    return TrainedJudge(
        data=data, classes=classes, accuracy=float(right.mean()) if len(right) else 0.0
    )


@torch.no_grad()
def _scale(network: _Network, images: Tensor) -> None:
    """Scale the features so that real images have a total variance of 100: one repeated average
    image then has distance 100.
    """
    features, _ = _look(network, images)
    factor = math.sqrt(_VARIANCE / max(1e-12, float(features.var(0).sum())))
    network.embed.weight.mul_(factor)
    network.embed.bias.mul_(factor)
    network.classes.weight.div_(factor)  # keeps the classes unchanged


@torch.inference_mode()
def _look(network: _Network, images: Tensor) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    features = torch.cat([network.features(_small(part)) for part in _parts(images)])
    odds = torch.softmax(network.classes(F.relu(features)), 1)
    return features.double().numpy(), odds.double().numpy()


def _parts(images: Tensor) -> Iterable[Tensor]:
    return (images[start : start + _AT_ONCE] for start in range(0, len(images), _AT_ONCE))


def _network(channels: int, classes: int, seed: int) -> _Network:
    network = _Network(channels, classes)
    with torch.no_grad():
        for name, value in network.named_parameters():
            fan_in = value[0].numel() if value.ndim > 1 else 0
            draw = torch.from_numpy(normal(f"judge/{name}", seed, tuple(value.shape)))
            value.copy_(draw * math.sqrt(2 / fan_in) if fan_in else torch.zeros_like(value))
    return network


def cluster(images: Tensor, more: Tensor, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the classes of unlabelled `images`, and those of `more`: clusters of thumbnails of the
    `images` (k-means, ten clusters at most).
    """
    flat, rest = (
        F.adaptive_avg_pool2d(part, 8).flatten(1).double().numpy() for part in (images, more)
    )
    centres = flat[permutation(len(flat), seed, 2)[:1]]
    draws = np.random.Generator(np.random.Philox(seed))
    while len(centres) < min(_CLUSTERS, len(flat)):  # k-means++ (Arthur and Vassilvitskii 2007)
        away = _squares(flat, centres).min(1)
        total = away.sum()
        if total <= 0:
            break
        centres = np.vstack([centres, flat[draws.choice(len(flat), p=away / total)]])
    for _ in range(25):
        nearest = _squares(flat, centres).argmin(1)
        for index in range(len(centres)):
            if (nearest == index).any():
                centres[index] = flat[nearest == index].mean(0)
    return _squares(flat, centres).argmin(1), _squares(rest, centres).argmin(1)


def _squares(points: NDArray[np.float64], centres: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the squared distances (N, K) of points (N, D) from centres (K, D)."""
    distances: NDArray[np.float64] = (
        np.square(points).sum(1)[:, None] - 2 * points @ centres.T + np.square(centres).sum(1)
    )
    return np.maximum(distances, 0)


def _write(network: _Network, real: Spread, shares: NDArray[np.float64], floor: float) -> bytes:
    arrays = {name: value.numpy() for name, value in network.state_dict().items()}
    arrays |= {"real.mean": real.mean, "real.covariance": real.covariance, "shares": shares}
    return frame_bytes(arrays | {"floor": np.array([floor])})


def load_judge(path: Path, channels: int) -> Judge:
    """Return the judge in a file. Raises InvalidRunFile if the file holds no judge, or a judge for
    other channels.
    """
    try:
        if path.stat().st_size > _FILE_BYTES_MAX:
            raise InvalidFrame("it is too large")
        frame = open_frame(path, schema_of_file(path), copy_on_write=True)
        arrays = {name: np.array(frame[name]) for name in frame}
        frame.close()
        shares = arrays.pop("shares")
        real = Spread(arrays.pop("real.mean"), arrays.pop("real.covariance"))
        floor = float(arrays.pop("floor")[0])
        network = _Network(channels, len(shares))
        network.load_state_dict({name: torch.from_numpy(value) for name, value in arrays.items()})
    except (InvalidFrame, KeyError, RuntimeError, IndexError) as error:
        raise InvalidRunFile(
            f"the judge of this dataset cannot be used ({str(error)[:200]}): add the dataset again"
        ) from error
    network.requires_grad_(False)
    return Judge(network, real, shares, floor)
