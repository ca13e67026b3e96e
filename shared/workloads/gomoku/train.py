"""Training on games: one task on one device.

A task draws positions from a window of sealed chunks, each rotated or mirrored at random. Drawing
does not remove them, so any number of learners may work at once. Shapes: B positions, A cells.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from shared.errors import InvalidRunFile
from shared.workloads.base import Data, Job, Weights
from shared.workloads.gomoku.config import GomokuConfig, forward_flops
from shared.workloads.gomoku.network import GomokuNet, build
from shared.workloads.gomoku.randomness import words
from shared.workloads.gomoku.records import Positions, decode, positions
from shared.workloads.gomoku.rules import symmetries
from shared.workloads.training.device_differences import to_device
from shared.workloads.training.step_loop import StepLoss, StepWork

# logit of an illegal move, in place of minus infinity, whose product with a zero would be NaN
_ILLEGAL = -1e9


def window(data: Data, config: GomokuConfig) -> Positions:
    """Return all positions of a task's chunks. Raises InvalidRunFile, InvalidGame."""
    records = []
    for index, chunk in enumerate(data.manifest.chunks):
        games = decode(data.chunk(index).read_bytes())
        if len(games) != chunk.items:
            raise InvalidRunFile(
                f"chunk {index} of the replay window has {len(games)} games, but its manifest says"
                f" {chunk.items}"
            )
        records += games
    return positions(records, config.rules)


class Batches:
    """Positions drawn by a task: the same for the same seed, for any micro-batches."""

    def __init__(self, window_positions: Positions, size: int, job: Job) -> None:
        if len(window_positions) < job.batch_size:
            raise InvalidRunFile(
                f"the replay window holds {len(window_positions)} positions, fewer than a batch of"
                f" {job.batch_size}: play more games first, or make [task] batch_size smaller"
            )
        self._found = window_positions
        self._turns = symmetries(size)
        self._job = job

    def read(self, step: int, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows [start, stop) of a step's batch: boards (B, A), policies (B, A), results
        (B,).
        """
        raw = words(self._job.seed, step, self._job.batch_size)[start:stop]
        rows = ((raw >> np.uint64(16)) % np.uint64(len(self._found))).astype(np.intp)
        turns = self._turns[(raw & np.uint64(7)).astype(np.intp)]  # (B, A)
        boards = np.take_along_axis(self._found.boards[rows], turns, axis=1)
        visits = np.take_along_axis(self._found.visits[rows], turns, axis=1).astype(np.float32)
        visits /= visits.sum(axis=1, keepdims=True)
        results = self._found.results[rows].astype(np.float32)
        return torch.from_numpy(boards), torch.from_numpy(visits), torch.from_numpy(results)


def losses(
    model: GomokuNet, boards: Tensor, policies: Tensor, results: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the loss to minimise, and (detached) its terms in order of `LearnWork.FIGURES`."""
    logits, values = model(boards)
    logits = logits.float().masked_fill(boards != 0, _ILLEGAL)
    policy = F.cross_entropy(logits, policies)
    value = F.mse_loss(values.float(), results)
    with torch.no_grad():
        right = (logits.argmax(1) == policies.argmax(1)).float().mean()
        error = (values.float() - results).abs().mean()
    return policy + value, torch.stack([policy.detach(), value.detach(), right, error])


class LearnWork(StepWork):
    """Learning from positions; see `StepWork`. A sample is a position."""

    FIGURES = ("policy_loss", "value_loss", "policy_accuracy", "value_error")

    def __init__(self, job: Job, weights: Weights, data: Data, device: str) -> None:
        config = GomokuConfig.from_dict(job.config)
        self._batches = Batches(window(data, config), config.size, job)
        self._net = build(config, weights, device)
        super().__init__(
            job,
            self._net,
            device=device,
            samples=job.steps * job.batch_size,
            flops=3 * forward_flops(config),
        )

    @override
    def measure(self, start: int, stop: int) -> StepLoss:
        step, first = divmod(start, self.job.batch_size)
        drawn = self._batches.read(step, first, first + stop - start)
        boards, policies, results = (to_device(value, self.device) for value in drawn)
        return StepLoss(*losses(self._net, boards, policies, results))
