"""Rollouts of one task on one device: several answers to each problem, all written by the version
that was the newest when the problem was begun.
"""

from __future__ import annotations

from collections import deque
from time import perf_counter

import msgspec
import numpy as np
import torch
from torch import Tensor

from shared.decoding import MALFORMED, decode
from shared.errors import BadRequest, InvalidRunFile
from shared.workloads.base import Data, Job, Progress, Result, Weights
from shared.workloads.generation.batch import Batch, NextToken, Sequence
from shared.workloads.generation.sampling import SampledToken
from shared.workloads.rollouts.answer_policy import decoder_of
from shared.workloads.rollouts.answer_records import GroupRecord, encode, packed, quantised
from shared.workloads.rollouts.config import (
    Problems,
    RolloutsConfig,
    RolloutsOptions,
    answer_seed,
)
from shared.workloads.rollouts.problems import Problem, reward
from shared.workloads.training.memory_release import release_memory

ADVANCE_S = 0.25


class _Version:
    """Version of the model; its decoder is made when a problem is begun."""

    def __init__(self, weights: Weights, number: int, sha256: str) -> None:
        self.weights, self.number, self.sha256 = dict(weights), number, sha256
        self.batch: Batch | None = None


class OpenGroup:
    """Group in progress: the answers to one problem."""

    def __init__(
        self,
        problem: tuple[int, Problem],
        version: _Version,
        batch: Batch,
        size: int,
    ) -> None:
        self.number, self.problem = problem
        self.version, self.batch = version, batch
        self.open = size
        self.answers: list[list[SampledToken]] = [[] for _ in range(size)]

    def record(self) -> GroupRecord:
        tokens = [token for answer in self.answers for token in answer]
        return GroupRecord(
            problem=self.number,
            version=self.version.number,
            weights=self.version.sha256,
            lengths=tuple(map(len, self.answers)),
            tokens=packed([token.token for token in tokens]),
            logprobs=quantised([token.logprob for token in tokens]),
        )


class SavedGroups(msgspec.Struct, frozen=True, kw_only=True):
    """Finished groups of a task."""

    seed: int
    records: tuple[GroupRecord, ...]
    elapsed_s: float
    tokens: int


class RolloutWork:
    """Rollouts on one device; see `Work` and `Actor`. A step is a problem, and so is a sample.

    Unfinished groups start over after a pause, a restart or a lack of memory: a version gives the
    same answers for the same seeds.
    """

    def __init__(self, job: Job, weights: Weights, data: Data, device: str) -> None:
        if job.steps != job.stop - job.start:
            raise BadRequest(f"{job.stop - job.start} problems do not make {job.steps} steps")
        self._job, self._device = job, device
        self._config = RolloutsConfig.from_dict(job.config)
        self._options = RolloutsOptions.from_dict(job.options)
        self._problems = Problems.of(self._config, data.asset)
        self._file = data.asset
        self._slots = self._options.slots
        self._newest = _Version(weights, job.base_version, job.base_sha256)
        self._waiting = deque(range(job.start, job.stop))
        self._groups: dict[int, OpenGroup] = {}
        self._records: dict[int, GroupRecord] = {}
        self._elapsed_s = 0.0
        self._tokens = 0
        self._cut = 0  # answers that did not end
        self._solved: list[float] = []  # share of correct answers by group, as judged here
        self._shown = self._best = ""

    @property
    def done(self) -> bool:
        return len(self._records) == self._job.steps

    def advance(self) -> Progress:
        """Generate answers for a quarter of a second."""
        if self.done:
            raise RuntimeError("this task is done")
        began = perf_counter()
        while len(self._records) < self._job.steps and perf_counter() - began < ADVANCE_S:
            self._fill()
            for batch in {
                group.version.number: group.batch for group in self._groups.values()
            }.values():
                for token in batch.step():
                    self._take(token)
        self._elapsed_s += perf_counter() - began
        return Progress(
            step=len(self._records),
            steps=self._job.steps,
            samples=len(self._records),
            metrics=self._metrics(),
            preview=self._shown,
            counted="problems",
        )

    def swap(self, weights: Weights, version: int, sha256: str) -> None:
        """Use this version for problems begun from now on."""
        if version > self._newest.number:
            self._newest = _Version(weights, version, sha256)

    def result(self) -> tuple[Result, dict[str, Tensor]]:
        records = [self._records[number] for number in sorted(self._records)]
        report = Result(
            steps=len(records),
            samples=len(records),
            metrics=self._metrics(),
            experience=encode(records),
        )
        return report, {}

    def suspend(self) -> None:
        self._restart_groups()

    def resume(self) -> None: ...

    def halve(self) -> int:
        """Generate fewer answers together; return their new number."""
        if self._slots == 1:
            raise MemoryError("a single answer does not fit into memory")
        self._slots = max(1, self._slots // 2)
        self._restart_groups()
        return self._slots

    def snapshot(self) -> dict[str, Tensor]:
        saved = SavedGroups(
            seed=self._job.seed,
            records=tuple(self._records.values()),
            elapsed_s=self._elapsed_s,
            tokens=self._tokens,
        )
        text = np.frombuffer(msgspec.json.encode(saved), np.uint8).copy()
        return {"groups": torch.from_numpy(text)}

    def restore(self, snapshot: Weights) -> None:
        """Continue after the groups of a `snapshot`. Raises InvalidRunFile for the snapshot of
        another task.
        """
        try:
            saved = decode(snapshot["groups"].numpy().tobytes(), SavedGroups)
        except (KeyError, *MALFORMED) as error:
            raise InvalidRunFile("this snapshot belongs to another task") from error
        if saved.seed != self._job.seed:
            raise InvalidRunFile("this snapshot belongs to another task: start the task afresh")
        self._records = {record.problem: record for record in saved.records}
        self._elapsed_s, self._tokens = saved.elapsed_s, saved.tokens
        self._restart_groups()

    def _restart_groups(self) -> None:
        started = self._records.keys()
        self._waiting = deque(n for n in range(self._job.start, self._job.stop) if n not in started)
        self._groups.clear()
        self._newest.batch = None
        release_memory(self._device)

    def _fill(self) -> None:
        """Begin problems until all slots have answers."""
        size = self._options.group
        while self._waiting and sum(g.open for g in self._groups.values()) < self._slots:
            number = self._waiting.popleft()
            problem = self._problems.get(number)
            batch = self._batch(self._newest)
            self._groups[number] = OpenGroup((number, problem), self._newest, batch, size)
            for sample in range(size):
                batch.add(
                    Sequence(
                        id=f"{number}/{sample}",
                        prompt=tuple(self._problems.text.prompt(problem.prompt)),
                        max_tokens=self._config.answer,
                        seed=answer_seed(self._job.seed, number, sample),
                        logprobs=0,
                        divisor=self._options.temperature,
                    )
                )

    def _batch(self, version: _Version) -> Batch:
        if version.batch is None:
            weights, file = version.weights, self._file
            decoder = decoder_of(self._config, weights, file, self._slots, self._device)
            version.batch = Batch(decoder)
        return version.batch

    def _take(self, next_token: NextToken) -> None:
        """Add a token to its answer; a group whose answers have all ended becomes a record."""
        number, _, sample = next_token.id.partition("/")
        group = self._groups[int(number)]
        token = next_token.end if next_token.chosen is None else next_token.chosen
        assert token is not None  # one of the two is set
        group.answers[int(sample)].append(token)
        self._tokens += 1
        if next_token.finish:
            group.open -= 1
            if not group.open:
                self._records[group.number] = group.record()
                del self._groups[group.number]
                self._show(group)

    def _show(self, group: OpenGroup) -> None:
        """Show a group with its rewards, and the hardest problem solved so far."""
        text = self._problems.text
        texts = [text.decode([token.token for token in answer]) for answer in group.answers]
        try:
            rewards = [reward(group.problem, text) for text in texts]
        except InvalidRunFile:  # the package of the problem's verifier is on the coordinator only
            return
        share, prompt = sum(rewards) / len(rewards), group.problem.prompt
        if (
            0
            < share
            < min((share_solved for share_solved in self._solved if share_solved), default=2.0)
        ):
            right = texts[rewards.index(max(rewards))]
            self._best = f"best: {prompt} {right}  ({share:.0%} of its answers were right)"
        self._solved.append(share)
        self._cut += sum(answer[-1].token != text.end for answer in group.answers)
        lines = [
            f"{won:4.1f}  {answer_text}" for won, answer_text in zip(rewards, texts, strict=True)
        ]
        self._shown = "\n".join([prompt, *lines, self._best])

    def _metrics(self) -> dict[str, float]:
        took = max(self._elapsed_s, 1e-6)
        solved = sum(self._solved) / max(1, len(self._solved))
        answers = max(1, len(self._solved) * self._options.group)
        return {
            "solved": solved,
            "cut": self._cut / answers,
            "length": self._tokens / answers,
            "tokens": float(self._tokens),
            "tokens_per_s": self._tokens / took,
            "problems_per_hour": 3600 * len(self._records) / took,
        }
