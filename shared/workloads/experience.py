"""Interface of a workload that makes its own data: actors produce episodes, learners train on their
samples, and the coordinator judges the episodes.

An episode is one unit that an actor begins and ends with one version (a game, the answers to a
problem); a sample is one unit that a learner draws (a position, an answer). This module loads
without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol, runtime_checkable

import msgspec
from msgspec import Meta

from shared.errors import InvalidRunFile
from shared.settings import Table
from shared.workloads.base import Config, Weights

if TYPE_CHECKING:
    from shared.workloads.base import Job, TrainSettings


@runtime_checkable
class Actor(Protocol):
    """Work that may continue on a newer version."""

    def swap(self, weights: Weights, version: int, sha256: str) -> None:
        """Switch to a newer version for episodes that start from now on."""


CHUNKS_MAX = 4096  # most chunks of a window: no lease can list more


class ReplayOptions(Table, frozen=True, kw_only=True):
    """Keys of `[task.options]` that pace learners by the episodes of actors."""

    PLACE = "[task.options]"

    chunk: Annotated[int, Meta(ge=1, le=4096)] = 64  # episodes sealed into one immutable chunk
    window: Annotated[int, Meta(ge=1, le=1 << 20)]  # newest episodes from which learners draw
    window_min: Annotated[int, Meta(ge=1, le=1 << 20)] = 64  # episodes before the first learn task
    # approximate number of times that a sample is learnt; paces learners by new episodes
    reuse: Annotated[float, Meta(ge=0.01, le=1000)]
    # most accepted episodes that are not learnt from yet; above this number no actor gets a task
    queue: Annotated[int, Meta(ge=1, le=1 << 20)]
    learners: Annotated[int, Meta(ge=1, le=1000)] = 1  # learn tasks that may run at once

    def __post_init__(self) -> None:
        if self.window > CHUNKS_MAX * self.chunk:
            raise InvalidRunFile(
                f"[task.options] window must not be above {CHUNKS_MAX} chunks of {self.chunk}"
            )
        if self.window_min > self.window:
            raise InvalidRunFile("[task.options] window_min must not be above window")


class Pacing(msgspec.Struct, frozen=True, kw_only=True):
    """Pacing of actors, learners and matches; counts are episodes unless another unit is named."""

    replay: ReplayOptions
    episodes: int  # episodes of one actor's task
    episode_flops: float  # estimated FLOPs of making an episode
    evaluation_flops: float  # FLOPs of one evaluation by the network
    fresh: int = 0  # learners draw from chunks sealed in this many newest versions; 0 = any
    unit: str = "game"  # word for an episode
    samples: int = 0  # samples of an episode; 0 = any number, and all episodes teach
    warm_steps: int = 0  # global steps that learners make from examples, before any episode
    warm_lr: float = 0.0  # learning rate of the warm steps
    match_games: int = 0  # games of one match
    match_every: int = 0  # versions from one match to the next; 0 = no matches


def warm_start(train: TrainSettings, steps: int) -> int:
    """Return the steps of the warm start; 0 if the model begins with trained weights (a fork)."""
    return 0 if train.init_from else steps


class KnownVersion(msgspec.Struct, frozen=True, kw_only=True):
    """Version that an episode may come from."""

    number: int
    sha256: str  # SHA-256 of its published weights


class RolloutSums(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over the judged answers of one version."""

    version: int  # version that wrote the answers
    answers: int
    reward: float
    tokens: int
    surprise: float  # minus the log-probabilities of the tokens, in nats
    cut: int  # answers that reached the limit of length without an end


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """Findings about a file of episodes."""

    data: bytes = b""  # file of the valid episodes alone
    episodes: int = 0
    samples: int = 0
    # evaluations by the network that the valid episodes took, which set their price
    evaluations: int = 0
    refused: int = 0  # invalid episodes
    complaint: str = ""  # sentence about the first refused episode
    read: int = 0  # parts of valid episodes that were recomputed, if some may differ
    faults: int = 0  # recomputed parts that differed
    wins: int = 0  # wins of the measured version in a match
    draws: int = 0
    losses: int = 0
    rollouts: tuple[RolloutSums, ...] = ()  # sums over valid answers; () for games


class EpisodeChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Many files of episodes, joined to one chunk."""

    data: bytes
    samples: int


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """One judged answer, as text."""

    version: int  # version that wrote the answer
    problem: int
    prompt: str
    answer: str
    reward: float
    tokens: int  # length of the answer, its end included
    logprob: float  # mean log-probability of a token under that version
    cut: bool  # the answer reached the limit of length without an end


class Experience(Protocol):
    """Interface of a workload that learns from the episodes of its own versions."""

    def plan(self, config: Config, options: Mapping[str, object]) -> Pacing: ...

    def inspect(
        self,
        job: Job,
        data: bytes,
        versions: Sequence[KnownVersion],
        file: Callable[[int | str], Path],
        secret: int,
        *,
        whole: bool = False,
    ) -> Inspection:
        """Check a file of episodes submitted for `job` (an actor's, or a match) by the workload's
        rules, and recompute the parts that `secret` chooses, or all parts if `whole`. `file` gives
        a version's published weights by its number, and the run's files by name.

        Never raises for what a volunteer may have sent. Runs torch.
        """

    def refuted(self, faults: int, read: int) -> bool:
        """Return True if an honest machine never has so many `faults` among the `read` parts of an
        account's drawn tasks.
        """
        return False

    def rollouts(
        self, config: Config, data: bytes, file: Callable[[str], Path]
    ) -> Sequence[Rollout]:
        """Return the answers in a file of valid episodes, group by group; () for games. `file`
        gives the run's files by name.
        """
        return ()

    def seal(self, files: Sequence[bytes]) -> EpisodeChunk:
        """Return one chunk for learners from the valid episodes of several files."""
