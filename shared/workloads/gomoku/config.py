"""Shape of a Gomoku player: board, network, schema, cost, and the `[task]` options of its tasks.
This module does not import torch.

Names of tensors never change, so that old checkpoints stay readable: stem, blocks.{i}.one,
blocks.{i}.two, policy, value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from msgspec import Meta
from typing_extensions import override

from shared.errors import InvalidRunFile
from shared.settings import Table
from shared.tensors.spec import Schema, TensorSpec
from shared.workloads.experience import ReplayOptions
from shared.workloads.gomoku.records import Manner
from shared.workloads.gomoku.rules import SIZE_MAX, BoardRules

PLANES = 3  # own stones, the opponent's stones, ones (which show the border)
POLICY_CHANNELS = 16
VALUE_HIDDEN = 64
PRESETS = {"small": (2, 32), "medium": (6, 64), "large": (12, 128)}  # blocks, channels


class GomokuConfig(Table, frozen=True, kw_only=True):
    """Table `[model]`. `blocks` and `channels` of 0 mean the values of the preset."""

    size: Annotated[int, Meta(ge=3, le=SIZE_MAX)] = 15
    win: Annotated[int, Meta(ge=3)] = 5  # stones in a row that win; more win too
    preset: Literal["small", "medium", "large"] = "small"
    blocks: Annotated[int, Meta(ge=0, le=64)] = 0
    channels: Annotated[int, Meta(ge=0, le=1024)] = 0

    def __post_init__(self) -> None:
        if self.win > self.size:
            raise InvalidRunFile(f"[model] win must lie between 3 and {self.size}")
        if self.size > self.board_max:
            raise InvalidRunFile(
                f"a board of {self.size} is too large for the preset {self.preset}: its "
                f"{self.depth}"
                f" blocks see {self.reach} cells far, enough for a board of {self.board_max}; take"
                f" more blocks or a larger preset"
            )

    @property
    def rules(self) -> BoardRules:
        return BoardRules(size=self.size, win=self.win)

    @property
    def cells(self) -> int:
        return self.size * self.size

    @property
    def depth(self) -> int:
        return self.blocks or PRESETS[self.preset][0]

    @property
    def width(self) -> int:
        return self.channels or PRESETS[self.preset][1]

    @property
    def reach(self) -> int:
        """Return the distance within which a stone influences a cell: one cell a convolution."""
        return 1 + 2 * self.depth

    @property
    def board_max(self) -> int:
        """Return the side of the largest board: three times the reach, since the value head pools
        the whole board.
        """
        return 3 * self.reach

    @override
    def to_dict(self) -> dict[str, object]:
        """Return the table with blocks and channels written out."""
        return super().to_dict() | {"blocks": self.depth, "channels": self.width}


class GomokuOptions(ReplayOptions, frozen=True, kw_only=True):
    """The workload's own keys of `[task.options]`."""

    games: Annotated[int, Meta(ge=1, le=4096)] = 32  # games of one self-play task
    simulations: Annotated[int, Meta(ge=2, le=10_000)] = 100  # simulations of each move
    slots: Annotated[int, Meta(ge=1, le=1024)] = 32  # games that advance together on one device
    # first moves of a game that are drawn in proportion to their visits; later moves are the most
    # visited
    temperature_plies: Annotated[int, Meta(ge=0, le=1024)] = 12
    # most random moves at the beginning of a game
    opening_plies: Annotated[int, Meta(ge=0, le=16)] = 2
    # share of Dirichlet noise in the priors of the root
    noise: Annotated[float, Meta(ge=0, le=1)] = 0.25
    window: Annotated[int, Meta(ge=1, le=1 << 20)] = 4096
    reuse: Annotated[float, Meta(ge=0.01, le=1000)] = 4.0
    queue: Annotated[int, Meta(ge=1, le=1 << 20)] = 2048
    # games of one evaluate task; each opening is played with both colours
    match_games: Annotated[int, Meta(ge=2, le=1024)] = 16
    match_simulations: Annotated[int, Meta(ge=2, le=10_000)] = 64
    # versions from one match to the next; 0 = no matches
    match_every: Annotated[int, Meta(ge=0, le=1 << 20)] = 1
    # share of a match's positions that the coordinator searches again
    match_replay: Annotated[float, Meta(ge=0, le=1)] = 0.25

    def manner(self) -> Manner:
        """Return the rules of self-play games."""
        return Manner(
            simulations=self.simulations,
            temperature_plies=self.temperature_plies,
            noise=self.noise,
            opening_plies=self.opening_plies,
        )

    def match_manner(self) -> Manner:
        """Return the rules of matches: always the most visited move, without randomness."""
        return Manner(
            simulations=self.match_simulations, temperature_plies=0, noise=0.0, match=True
        )


def schema(config: GomokuConfig) -> Schema:
    """Return every tensor of a version, in the order of the model's own parameters."""
    return tuple(TensorSpec(name, shape) for name, shape in _shapes(config))


def _shapes(config: GomokuConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    C = config.width

    def layer(name: str, *shape: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", shape
        yield f"{name}.bias", shape[:1]

    yield from layer("stem", C, PLANES, 3, 3)
    for index in range(config.depth):
        yield from layer(f"blocks.{index}.one", C, C, 3, 3)
        yield from layer(f"blocks.{index}.two", C, C, 3, 3)
    yield from layer("policy.hidden", POLICY_CHANNELS, C, 1, 1)
    yield "policy.out.weight", (1, POLICY_CHANNELS, 1, 1)  # a bias would change no policy
    yield from layer("value.hidden", VALUE_HIDDEN, 2 * C)
    yield from layer("value.out", 1, VALUE_HIDDEN)


def forward_flops(config: GomokuConfig) -> float:
    """Return the FLOPs of evaluating one position."""
    C = config.width
    cell = 9 * PLANES * C + 18 * C * C * config.depth + POLICY_CHANNELS * (C + 1)
    return 2.0 * (config.cells * cell + VALUE_HIDDEN * (2 * C + 1))
