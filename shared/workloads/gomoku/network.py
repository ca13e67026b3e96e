"""Network of a Gomoku player: a residual trunk, a policy over the cells and the value of the
position.

There are no normalisation layers, so that a position gets the same result alone and in a batch, and
there are no running statistics to merge; residual branches begin as zero, which keeps deep networks
stable. A network that learns computes in float32, a network that plays has its trunk in fixed point
(`fixed_point`). Shapes: B positions, S side, A = S * S, C channels.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from shared.errors import InvalidFrame, InvalidRunFile
from shared.workloads.base import Weights
from shared.workloads.gomoku.config import (
    PLANES,
    POLICY_CHANNELS,
    VALUE_HIDDEN,
    GomokuConfig,
    schema,
)
from shared.workloads.gomoku.fixed_point import FixedTrunk
from shared.workloads.gomoku.randomness import words
from shared.workloads.gomoku.rules import Boards
from shared.workloads.gomoku.search import Floats
from shared.workloads.training.device_differences import has_bfloat16, to_host

# Measured on a CPU: while a layer has fewer activations than this, they stay in the cache, and the
# heap is not returned to the system between layers; twice as many cost up to half the speed.
_CACHE_ELEMENTS = 480_000
_GPU_BATCH = 4096
_MEASURED = 16  # positions that the units of fixed-point numbers are measured on
_STONES = 0.6  # largest share of cells with a stone in the measured positions


class ResidualBlock(nn.Module):
    """Residual block relu(x + two(relu(one(x))))."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(channels, channels, 3, padding=1)
        self.two = nn.Conv2d(channels, channels, 3, padding=1)

    @override
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.two(self.one(x).relu_())
        return out.add_(x).relu_()


class Head(nn.Module):
    """Head of two layers of any kind."""

    def __init__(self, hidden: nn.Module, out: nn.Module) -> None:
        super().__init__()
        self.hidden = hidden
        self.out = out

    @override
    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.out(self.hidden(x).relu_())
        return output


class GomokuNet(nn.Module):
    """Logits of the policy (B, A) and the value in [-1, 1] (B,), both for the player to move."""

    def __init__(self, config: GomokuConfig) -> None:
        super().__init__()
        C = config.width
        self.side = config.size
        self.stem = nn.Conv2d(PLANES, C, 3, padding=1)
        self.blocks = nn.ModuleList([ResidualBlock(C) for _ in range(config.depth)])
        self.policy = Head(
            nn.Conv2d(C, POLICY_CHANNELS, 1), nn.Conv2d(POLICY_CHANNELS, 1, 1, bias=False)
        )
        self.value = Head(nn.Linear(2 * C, VALUE_HIDDEN), nn.Linear(VALUE_HIDDEN, 1))

    @override
    def forward(self, boards: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and values of `boards` (B, A): +1 for stones of the player to move, -1 for
        stones of the other player.
        """
        x = self.stem(self.planes(boards)).relu_()  # (B, C, S, S), channels last in memory
        for block in self.blocks:
            x = block(x)
        return self.heads(x)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and values of the trunk's output (B, C, S, S)."""
        logits = self.policy(x).flatten(1)  # (B, A)
        pooled = torch.cat([x.mean((2, 3)), x.amax((2, 3))], dim=1)  # (B, 2 C)
        return logits, torch.tanh(self.value(pooled)).squeeze(1)

    def examples(self) -> Tensor:
        """Return a batch (2, A) to trace the network with."""
        return torch.zeros((2, self.side * self.side), dtype=torch.int8)

    def pairs(self) -> list[tuple[nn.Conv2d, nn.Conv2d]]:
        """Return the convolutions of the blocks."""
        return [(block.one, block.two) for block in self.blocks if isinstance(block, ResidualBlock)]

    def planes(self, boards: Tensor) -> Tensor:
        """Return the trunk's input (B, PLANES, S, S), zeros and ones."""
        own_stones, other = boards == 1, boards == -1
        planes = torch.stack(
            [own_stones, other, torch.ones_like(own_stones)], dim=2
        )  # (B, A, PLANES)
        shape = (boards.shape[0], self.side, self.side, PLANES)
        # Channels last: 1.1 to 2.4 times faster on a CPU than the other layout.
        return planes.to(self.stem.weight.dtype).view(shape).permute(0, 3, 1, 2)


def build(config: GomokuConfig, weights: Weights, device: str) -> GomokuNet:
    """Return the model with a copy of `weights` on `device`. Raises InvalidFrame for weights of
    another network.
    """
    with torch.device("meta"):
        model = GomokuNet(config)
    expected = {spec.name: spec.shape for spec in schema(config)}
    shapes = {name: tuple(value.shape) for name, value in weights.items()}
    if shapes != expected:
        wrong = next(n for n in {**expected, **shapes} if shapes.get(n) != expected.get(n))
        raise InvalidFrame(
            f"these weights are of another network: {wrong} has the shape {shapes.get(wrong)},"
            f" but a player of {config.depth} blocks and {config.width} channels has "
            f"{expected.get(wrong)}"
        )
    tensors = {name: weights[name].to(device, torch.float32, copy=True) for name in expected}
    model.load_state_dict(tensors, assign=True)
    return model.requires_grad_(True)


class NetEvaluator:
    """Network as the search uses it: from boards of the player to move to logits and values.

    `native` chooses a CPU's bfloat16 arithmetic, by default if the CPU has it.
    """

    def __init__(
        self, config: GomokuConfig, weights: Weights, device: str, *, native: bool | None = None
    ) -> None:
        self.positions = 0  # positions evaluated so far
        self._device = device
        self._model = build(config, weights, "cpu").requires_grad_(False).train(False)
        with torch.inference_mode():
            self._trunk = FixedTrunk(
                self._model.stem,
                self._model.pairs(),
                self._model.planes(torch.from_numpy(_scattered(config.cells))),
                native=device == "cpu" and (has_bfloat16("cpu") if native is None else native),
            )
        self.move(device)
        self._batch = _GPU_BATCH
        if device == "cpu":
            cached = _CACHE_ELEMENTS * torch.get_num_threads()
            self._batch = max(1, cached // (config.width * config.cells))

    @torch.inference_mode()
    def __call__(self, boards: Boards) -> tuple[Floats, Floats]:
        """Return logits (B, A) and values (B,) of `boards` (B, A). Raises InvalidRunFile for weights
        that overflow, or are no numbers.
        """
        self.positions += len(boards)
        tensor = torch.from_numpy(boards)
        parts = [
            self._model.heads(self._trunk(self._model.planes(part.to(self._device))))
            for part in tensor.chunk(-(-len(boards) // self._batch))
        ]
        logits = torch.cat([part[0] for part in parts]).cpu().numpy()
        values = torch.cat([part[1] for part in parts]).cpu().numpy()
        if not (np.isfinite(logits).all() and np.isfinite(values).all()):
            raise InvalidRunFile(
                "the weights of this version are too large for a player, or no numbers: roll the"
                " run back to a version before, and lower [train] lr"
            )
        return logits, values

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of the weights on the CPU."""
        return {name: to_host(value) for name, value in self._model.named_parameters()}

    def move(self, device: str) -> None:
        """Move the weights to another device, or back."""
        self._model.to(device)
        self._trunk.to(device)
        self._device = device

    def halve(self) -> int:
        """Halve the batches after a lack of memory and return their new size. Raises MemoryError if
        a batch has one position.
        """
        if self._batch <= 1:
            raise MemoryError("one position alone does not fit into the memory of this device")
        self._batch = min(self._batch, 2 * _GPU_BATCH) // 2
        return self._batch


def _scattered(cells: int) -> Boards:
    """Return boards (_MEASURED, A) with more and more stones anywhere, the same for everybody."""
    boards = np.zeros((_MEASURED, cells), np.int8)
    for number, board in enumerate(boards):
        order = np.argsort(words(number, 0, cells), kind="stable")
        order = order[: round(_STONES * cells * number / _MEASURED)]
        board[order[0::2]], board[order[1::2]] = 1, -1
    return boards
