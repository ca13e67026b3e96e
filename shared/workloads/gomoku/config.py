"""The shape of a Gomoku player: board, network, schema, cost, and the `[task]` options of its
tasks. No torch here.

Names of tensors never change (old checkpoints stay readable): stem, blocks.{i}.one, blocks.{i}.two,
policy, value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from shared.errors import InvalidRunFile
from shared.tensors.spec import Schema, TensorSpec
from shared.workloads.base import read_table
from shared.workloads.gomoku.records import Manner
from shared.workloads.gomoku.rules import SIZE_MAX, BoardRules

PLANES = 3  # own stones, the other's stones, ones (so that the border is seen)
POLICY_CHANNELS = 16
VALUE_HIDDEN = 64
PRESETS = {"small": (2, 32), "medium": (6, 64), "large": (12, 128)}  # blocks, channels


class GomokuConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The `[model]` table. `blocks` and `channels` of 0 are those of the preset."""

    size: int = 15
    win: int = 5  # stones in a row, or more
    preset: str = "small"
    blocks: int = 0
    channels: int = 0

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise InvalidRunFile(f"[model] preset must be one of {', '.join(PRESETS)}")
        for key, low, high in (
            ("size", 3, SIZE_MAX),
            ("win", 3, self.size),
            ("blocks", 0, 64),
            ("channels", 0, 1024),
        ):
            if not low <= getattr(self, key) <= high:
                raise InvalidRunFile(f"[model] {key} must lie between {low} and {high}")
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
        """Return how many cells away a stone may lie and still be seen: one for each 3 x 3
        convolution.
        """
        return 1 + 2 * self.depth

    @property
    def board_max(self) -> int:
        """Three times the reach: a value head that pools over the board joins what lies further
        apart.
        """
        return 3 * self.reach

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> GomokuConfig:
        """Check a table. Raises InvalidRunFile with the nearest known key for an unknown one."""
        return read_table(raw, cls, "model")

    def to_dict(self) -> dict[str, Any]:
        """With blocks and channels written out."""
        return msgspec.structs.asdict(self) | {"blocks": self.depth, "channels": self.width}


class GomokuOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The workload's own keys of `[task.options]`."""

    games: int = 32  # of one self-play task
    simulations: int = 100  # a move
    slots: int = 32  # games that advance together on one device
    temperature_plies: int = 12  # moves drawn in proportion to their visits; then the most visited
    opening_plies: int = 2  # at most so many random moves at the beginning of a game
    noise: float = 0.25  # share of Dirichlet noise in the priors of the root
    window: int = 4096  # newest games that learners draw from
    window_min: int = 64  # games before the first learn task
    chunk: int = 64  # games sealed into one immutable chunk
    reuse: float = 4.0  # how often a position is learnt from, about: paces learners by new games
    queue: int = 2048  # games accepted and not yet learnt from; above it no self-play is handed out
    learners: int = 1  # learn tasks at once
    lag: int = 2  # a game may have begun at most this many published versions ago
    match_games: int = 16  # of one evaluate task, both colours of each opening
    match_simulations: int = 64
    match_every: int = 1  # versions from one match to the next; 0 = no matches
    # share of the positions of a match that the coordinator searches again
    match_replay: float = 0.25

    def __post_init__(self) -> None:
        for key, low, high in (
            ("games", 1, 4096),
            ("simulations", 2, 10_000),
            ("slots", 1, 1024),
            ("temperature_plies", 0, 1024),
            ("opening_plies", 0, 16),
            ("noise", 0, 1),
            ("window", 1, 1 << 20),
            ("window_min", 1, 1 << 20),
            ("chunk", 1, 4096),
            ("reuse", 0.01, 1000),
            ("queue", 1, 1 << 20),
            ("learners", 1, 1000),
            ("lag", 0, 1000),
            ("match_games", 2, 1024),
            ("match_simulations", 2, 10_000),
            ("match_every", 0, 1 << 20),
            ("match_replay", 0, 1),
        ):
            if not low <= getattr(self, key) <= high:
                raise InvalidRunFile(f"[task.options] {key} must lie between {low} and {high}")
        if self.window > 4096 * self.chunk:
            raise InvalidRunFile("[task.options] window must not be above 4096 chunks")
        if self.window_min > self.window:
            raise InvalidRunFile("[task.options] window_min must not be above window")

    def manner(self) -> Manner:
        """Of self-play."""
        return Manner(
            simulations=self.simulations,
            temperature_plies=self.temperature_plies,
            noise=self.noise,
            opening_plies=self.opening_plies,
        )

    def match_manner(self) -> Manner:
        """Of matches: always the most visited move, nothing by chance."""
        return Manner(
            simulations=self.match_simulations, temperature_plies=0, noise=0.0, match=True
        )

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> GomokuOptions:
        """Check a table. Raises InvalidRunFile with the nearest known key for an unknown one."""
        return read_table(raw, cls, "task.options")


def schema(config: GomokuConfig) -> Schema:
    """Every tensor of a version, in the order of the model's own parameters."""
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
    """One evaluation of one position by the network."""
    C = config.width
    cell = 9 * PLANES * C + 18 * C * C * config.depth + POLICY_CHANNELS * (C + 1)
    return 2.0 * (config.cells * cell + VALUE_HIDDEN * (2 * C + 1))
