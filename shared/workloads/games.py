"""Interface of a workload that learns from self-play as well as from training.

This module loads without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import msgspec

from shared.workloads.base import Config, Weights

if TYPE_CHECKING:
    from shared.workloads.base import Job


@runtime_checkable
class Actor(Protocol):
    """Work that may continue on a newer version (self-play)."""

    def swap(self, weights: Weights, version: int, sha256: str) -> None:
        """Switch to a newer version for games that start from now on."""


class SelfPlay(msgspec.Struct, frozen=True, kw_only=True):
    """Pacing of actors, learners and matches in a run of games; counts are games."""

    games: int  # of one self-play task
    game_flops: float  # about what one game costs to play
    position_flops: float  # what one evaluation by the network costs
    chunk: int  # sealed together
    window: int  # newest that learners draw from
    window_min: int  # before the first learn task
    reuse: float  # how often a position is learnt from
    queue: int  # that may wait for a learner; above it no more are handed out
    lag: int  # versions that a game may be behind when it begins
    learners: int  # learn tasks at once
    match_games: int  # of one match
    match_every: int  # versions from one match to the next; 0 = none


class KnownVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A version that may have played."""

    number: int
    sha256: str  # of its published weights
    since_s: (
        float  # when it was published, in seconds from the beginning of the task; negative = before
    )


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """Findings about a file of games; `data` holds its valid games."""

    data: bytes = b""
    games: int = 0
    positions: int = 0
    evaluations: int = 0  # by the network, that playing them took: what they are priced by
    refused: int = 0  # games that are not what they claim
    stale: int = 0  # games that began with a version too old
    complaint: str = ""  # about the first that was refused
    wins: int = 0  # of a match, for the version that is measured
    draws: int = 0
    losses: int = 0


class Sealed(msgspec.Struct, frozen=True, kw_only=True):
    """Many files of games as one chunk."""

    data: bytes
    games: int
    positions: int


class Encounter(msgspec.Struct, frozen=True, kw_only=True):
    """Match played here for people to watch; no credits are paid for it."""

    wins: int  # of the first of the two
    draws: int
    losses: int
    game: str  # the first game as text; the first version has the first stones


class MoveReply(msgspec.Struct, frozen=True, kw_only=True):
    """Version's evaluation of a position, and its move."""

    move: int
    value: float  # for whoever is to move, -1 ... 1
    heat: tuple[float, ...]  # the policy, a number for each cell


class BoardAnalysis(msgspec.Struct, frozen=True, kw_only=True):
    """Board after some moves."""

    board: tuple[
        int, ...
    ]  # row by row from above: 1 the first player's stones, -1 the second's, 0 nothing
    over: bool
    winner: int = 0  # 1, -1, or 0 for nobody
    row: tuple[int, ...] = ()  # the cells that won


LEVELS = ("easy", "middle", "hard")


class Opponent(Protocol):
    """Version that people play against."""

    def look(self, moves: Sequence[int]) -> BoardAnalysis:
        """Return the position after `moves`; costs nothing. Raises BadRequest for an illegal
        move.
        """

    def reply(self, moves: Sequence[int], level: int) -> MoveReply:
        """Compute the reply to `moves`; level 0, 1 or 2, see LEVELS.

        Raises BadRequest for an illegal move.
        """


COLUMNS = "abcdefghijklmnopqrstuvwxyz"


def cell_name(cell: int, size: int) -> str:
    """Return a cell of a square board by column letter and row number from below: h8."""
    row, column = divmod(cell, size)
    return f"{COLUMNS[column]}{size - row}"


class Games(Protocol):
    """Interface of a workload that learns from games against itself."""

    def plan(self, config: Config, options: Mapping[str, Any]) -> SelfPlay: ...

    def inspect(
        self,
        job: Job,
        data: bytes,
        versions: Sequence[KnownVersion],
        weights: Callable[[int], Path],
        secret: int,
        *,
        whole: bool = False,
    ) -> Inspection:
        """Check a file of games submitted for `job` (self-play or a match): rules, chance, and
        searches repeated at places that `secret` chooses. `weights` gives the file of a version's
        published weights. With `whole` every search is repeated.

        Never raises for what a volunteer may have sent. Runs torch.
        """

    def seal(self, files: Sequence[bytes]) -> Sealed:
        """Return one chunk for learners from the good games of several files."""

    def opponent(self, config: Config, weights: Weights) -> Opponent: ...

    def meet(
        self,
        config: Config,
        options: Mapping[str, Any],
        weights: tuple[Weights, Weights],
        games: int,
    ) -> Encounter:
        """Play a match of two versions, under the rules of the run's matches. Runs torch."""

    def rules(self, config: Config) -> tuple[int, int]:
        """Return the side of the board, and how many in a row win."""
