"""A small classifier of hand-written digits in numpy: enough to see what an attack does to a run,
in a second.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shared.tensors.spec import Schema, TensorSpec

F32 = NDArray[np.float32]
Weights = dict[str, F32]

HIDDEN = 32
CLASSES = 10
HELD_OUT = 360
SCHEMA: Schema = (
    TensorSpec("in.weight", (64, HIDDEN)),
    TensorSpec("in.bias", (HIDDEN,)),
    TensorSpec("out.weight", (HIDDEN, CLASSES)),
    TensorSpec("out.bias", (CLASSES,)),
)


@lru_cache(maxsize=1)
def digits() -> tuple[F32, NDArray[np.int64], F32, NDArray[np.int64]]:
    """(train images (N, 64) in 0..1, labels (N,), held-out images, labels), in a fixed random
    order.
    """
    from sklearn.datasets import load_digits

    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    images = (found.images.reshape(-1, 64) / 16).astype(np.float32)[order]
    labels = found.target[order]
    return images[HELD_OUT:], labels[HELD_OUT:], images[:HELD_OUT], labels[:HELD_OUT]


def initial(seed: int) -> Weights:
    rng = np.random.default_rng(seed)
    return {
        spec.name: (
            rng.standard_normal(spec.shape) / np.sqrt(spec.shape[0])
            if len(spec.shape) == 2
            else np.zeros(spec.shape)
        ).astype(np.float32)
        for spec in SCHEMA
    }


def _forward(weights: Weights, images: F32) -> tuple[F32, F32]:
    """Hidden (N, HIDDEN) and probabilities (N, 10)."""
    hidden = np.maximum(images @ weights["in.weight"] + weights["in.bias"], 0)
    scores = hidden @ weights["out.weight"] + weights["out.bias"]
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    return hidden, scores / scores.sum(axis=1, keepdims=True)


def loss_of(weights: Weights, images: F32, labels: NDArray[np.int64]) -> float:
    """Mean cross-entropy in nats; infinity for a model that is no longer one."""
    with np.errstate(all="ignore"):
        _, found = _forward(weights, images)
    right = found[np.arange(len(labels)), labels]
    loss = float(-np.log(np.maximum(right, 1e-12)).mean()) if np.isfinite(right).all() else np.inf
    return loss


def held_out_loss(weights: Weights) -> float:
    _, _, images, labels = digits()
    return loss_of(weights, images, labels)


def train(
    weights: Weights, rng: np.random.Generator, part: slice, steps: int, lr: float
) -> Weights:
    """Plain SGD on batches of 32 of one volunteer's part of the data; a new set of weights."""
    images, labels, _, _ = digits()
    return fit(weights, rng, (images[part], labels[part]), steps, lr)


def fit(
    weights: Weights,
    rng: np.random.Generator,
    examples: tuple[F32, NDArray[np.int64]],
    steps: int,
    lr: float,
) -> Weights:
    """Plain SGD on batches of 32 of images with labels; a new set of weights."""
    images, labels = examples
    found = {name: value.copy() for name, value in weights.items()}
    for _ in range(steps):
        rows = rng.integers(len(labels), size=32)
        hidden, error = _forward(found, images[rows])
        error[np.arange(32), labels[rows]] -= 1
        error /= 32
        back = (error @ found["out.weight"].T) * (hidden > 0)
        found["out.weight"] -= np.float32(lr) * (hidden.T @ error)
        found["out.bias"] -= np.float32(lr) * error.sum(axis=0)
        found["in.weight"] -= np.float32(lr) * (images[rows].T @ back)
        found["in.bias"] -= np.float32(lr) * back.sum(axis=0)
    return found
