"""Pretended games and answers, and a judge that takes the measured time to check them.

Of an episode only the version that made it is kept. Files have the size of real files, and the rule
for real episodes decides whether a pretended episode is stale.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
from typing_extensions import override

from coordinator.checking.case import Draws
from coordinator.compute import Compute
from coordinator.experience.harvest import Harvest, HarvestCase
from coordinator.experience.replay import Replay
from coordinator.intake.intake import Examiners, Intake
from coordinator.scheduling.claims import ClaimTerms
from coordinator.services import Coordinator
from coordinator.simulate.labour import SimulatedUpdate
from coordinator.simulate.loop import LoopClock
from coordinator.simulate.scenario import Scenario
from coordinator.upkeep.upkeep import Upkeep
from shared.decoding import decode
from shared.workloads.experience import EpisodeChunk, Inspection, Pacing

T = TypeVar("T")


class PretendedPlay(Compute):
    """Judge of pretended episodes, one file at a time; it also writes and seals the files."""

    def __init__(self, pacing: Pacing, scenario: Scenario, clock: LoopClock, folder: Path) -> None:
        super().__init__("checks")
        self.pacing, self._data, self._judge_s = pacing, scenario.data, scenario.server.judge_s
        self._clock, self._folder, self._turn = clock, folder, asyncio.Lock()
        # when each file was judged, without files of matches and of draws
        self.judged_at: list[float] = []
        self.episodes = 0  # episodes in the files counted by `judged_at`

    def in_place_of(self, on: Coordinator) -> Coordinator:
        """Return the services of `on` with this judge in place of the real one."""
        harvest = Harvest(on, self, Draws(on.key, ClaimTerms.of(on.settings).drawn))
        intake = Intake(on, Examiners(harvest=harvest, recomputes=on.recomputes, audits=on.audits))
        return replace(
            on,
            intake=intake,
            replay=Replay(on, on.run_queries, lambda run, files: self._seal(files)),
            upkeep=Upkeep(on, intake, on.uploads, on.store_marks),
        )

    def hand_in(self, starts: Sequence[int]) -> SimulatedUpdate:
        """Write and return the file of a task; `starts` are the versions that made its episodes."""
        path = self._folder / f"episodes-{secrets.token_hex(8)}"
        path.write_bytes(data := self._file(starts))
        return SimulatedUpdate(path=path, sha256=hashlib.sha256(data).hexdigest(), size=len(data))

    def behind(self, chunks: Sequence[Path], version: int) -> Counter[int]:
        """Return how many episodes of the chunks are so many versions behind `version`."""
        return Counter(
            version - start_version
            for path in chunks
            for start_version in _starts(path.read_bytes())
        )

    @override
    async def timed(self, work: Callable[..., T], *arguments: Any) -> tuple[T, float]:
        """Return the inspection of a HarvestCase's file (the arguments), and the virtual seconds
        that it took; see `Compute.timed`.
        """
        case: HarvestCase = arguments[0]
        # A draw, which is judged twice, is part of the measured mean.
        takes_s = 0.0 if case.drawn else case.asked * self._judge_s
        async with self._turn:
            await self._clock.nap(takes_s)
        self.busy_s += takes_s
        return cast(T, self._inspect(case, arguments[1])), takes_s

    def _inspect(self, case: HarvestCase, path: Path) -> Inspection:
        starts, play = _starts(path.read_bytes()), self.pacing
        if not (case.match or case.drawn):
            self.judged_at.append(self._clock.monotonic())
            self.episodes += len(starts)
        return Inspection(
            data=self._file(starts),
            episodes=len(starts),
            samples=self._samples(starts),
            evaluations=round(len(starts) * play.episode_flops / play.evaluation_flops),
            draws=len(starts) if case.match else 0,
        )

    def _seal(self, files: Sequence[bytes]) -> EpisodeChunk:
        parts = [_starts(data) for data in files]
        starts = [start for part in parts for start in part]
        return EpisodeChunk(data=self._file(starts), samples=sum(map(self._samples, parts)))

    def _samples(self, starts: Sequence[int]) -> int:
        return round(len(starts) * self._data.episode_samples)

    def _file(self, starts: Sequence[int]) -> bytes:
        return msgspec.json.encode(starts).ljust(round(len(starts) * self._data.episode_bytes))


def _starts(data: bytes) -> list[int]:
    return decode(data, list[int])
