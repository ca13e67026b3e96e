"""Base of self-play and matches: plays a task's games, a quarter of a second at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from time import perf_counter

from torch import Tensor

from shared.errors import BadRequest
from shared.workloads.base import Job, Progress, Result, Weights
from shared.workloads.gomoku.arena import Arena, FinishedGame, GamePlan
from shared.workloads.gomoku.config import GomokuConfig, GomokuOptions
from shared.workloads.gomoku.network import NetEvaluator
from shared.workloads.gomoku.records import GameRecord, Manner, encode
from shared.workloads.gomoku.rules import drawing
from shared.workloads.training.memory_release import release_memory

ADVANCE_S = 0.25


class PlayWork(ABC):
    """Play of a task's games on one device; see `Work`.

    A step is a game, and so is a sample. Subclasses choose the players and record the games.
    """

    advance_s = ADVANCE_S

    def __init__(self, job: Job, manner: Manner, device: str) -> None:
        if job.steps != job.stop - job.start:
            raise BadRequest(f"a task of {job.stop - job.start} games does not make {job.steps}")
        self._job = job
        self._config = GomokuConfig.from_dict(job.config)
        self._device = device
        self._players: dict[str, NetEvaluator] = {}
        self._following = job.start
        self._records: list[GameRecord] = []
        self._elapsed_s = 0.0
        slots = GomokuOptions.from_dict(job.options).slots
        self._arena = Arena(
            self._config.rules, manner, min(slots, job.steps), self._players, self._next_plan
        )

    @property
    def done(self) -> bool:
        return len(self._records) == self._job.steps

    def advance(self) -> Progress:
        """Play for a quarter of a second."""
        if self.done:
            raise RuntimeError("this task is done")
        began = perf_counter()
        self._records += [self._record(played) for played in self._arena.advance(self.advance_s)]
        self._elapsed_s += perf_counter() - began
        return Progress(
            step=len(self._records),
            steps=self._job.steps,
            samples=len(self._records),
            metrics=self._metrics(),
            preview=self._preview(),
            counted="games",
        )

    def result(self) -> tuple[Result, dict[str, Tensor]]:
        records = sorted(self._records, key=lambda record: record.game)
        report = Result(
            steps=len(records),
            samples=len(records),
            metrics=self._metrics(),
            experience=encode(records),
        )
        return report, {}

    def suspend(self) -> None:
        for player in self._players.values():
            player.move("cpu")
        release_memory(self._device)

    def resume(self) -> None:
        for player in self._players.values():
            player.move(self._device)

    def halve(self) -> int:
        """Evaluate in smaller batches, and return their new size; the running search starts
        over.
        """
        self._arena.again()
        release_memory(self._device)
        return min(player.halve() for player in self._players.values())

    def snapshot(self) -> dict[str, Tensor]:
        """Return no snapshot: a match is replayed after a restart with the same result."""
        return {}

    def restore(self, snapshot: Weights) -> None:  # noqa: B027 # a match restores nothing
        """Do nothing; see `snapshot`."""

    def _next_plan(self) -> GamePlan | None:
        """Return the plan of the next game of the task; None after the last game."""
        if self._following >= self._job.stop:
            return None
        self._following += 1
        return self._plan(self._following - 1)

    @abstractmethod
    def _plan(self, game: int) -> GamePlan:
        """Return the players of a game, and its opening."""

    @abstractmethod
    def _record(self, played: FinishedGame) -> GameRecord:
        """Return the record of a finished game, to be submitted."""

    @abstractmethod
    def _metrics(self) -> dict[str, float]:
        """Return the figures of the task for display."""

    @property
    def _kind(self) -> str:
        """Return the kind of the device, such as "cuda" for "cuda:0"."""
        return self._device.partition(":")[0]

    def _preview(self) -> str:
        """Return a picture of the game with the most moves; "" without a game in progress."""
        if not self._arena.seats:
            return ""
        position = max((seat.position for seat in self._arena.seats), key=lambda p: len(p.moves))
        last = position.moves[-1] if position.moves else -1
        return drawing(self._config.rules, position.board[0], last)
