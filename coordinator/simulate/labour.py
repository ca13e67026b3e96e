"""Work of a simulated machine: updates of pseudo-random numbers, of the right shapes and sizes."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from coordinator.runs.definition import Definition
from shared.tensors.codec import codec
from shared.tensors.frame import open_frame
from shared.workloads.base import Job

SETTLED = ("accepted", "merged")  # states of an accepted contribution
STEP_SHARE = 0.3  # share of the learning rate by which an element moves in a step
MOMENTUM_SHARE = 1e-3  # norm of the momenta's change: far below any clip of gradients


class SimulatedUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """File of an update, or of episodes, to be submitted."""

    path: Path
    sha256: str
    size: int
    loss_first: float | None = 1.0
    loss_last: float | None = 1.0


class Labour(Protocol):
    """Makes the results of one machine's tasks."""

    def do(self, task: int, job: Job, weights: Path, codec_name: str) -> SimulatedUpdate:
        """Return the update of a task whose base lies in `weights`."""


class SimulatedWork:
    """Updates that look real by size and magnitude: one noise vector, rotated at random for each
    task.
    """

    def __init__(self, about: Definition, scratch: Path, seed: int) -> None:
        self._about = about
        self._scratch = scratch
        self._rng = np.random.default_rng(seed)
        self._noise = np.random.default_rng(1).standard_normal(1 << 16).astype(np.float32)

    def do(self, task: int, job: Job, weights: Path, codec_name: str) -> SimulatedUpdate:
        train = self._about.file.train
        scale = train.lr * STEP_SHARE * (job.steps**0.5 if job.update == "delta" else 1.0)
        scales = {"parameter": scale, "momentum": MOMENTUM_SHARE * self._about.parameters**-0.5}
        noise = np.roll(self._noise, int(self._rng.integers(len(self._noise))))
        with open_frame(weights, self._about.schema) as base:
            tensors = {
                spec.name: np.resize(noise * np.float32(scales[spec.role]), spec.shape)
                if spec.is_encoded
                else base.array(spec.name)
                for spec in self._about.schema
            }
            path = self._scratch / f"update-{secrets.token_hex(8)}"
            encoded = codec(codec_name).encode(tensors, self._about.schema, path, job.seed)
        return SimulatedUpdate(path=path, sha256=encoded.sha256, size=encoded.size)
