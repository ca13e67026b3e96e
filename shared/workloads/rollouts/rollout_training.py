"""Training on rollouts: one task on one device, from judged answers or from solved
problems.

Shapes: B answers, T tokens of problem and answer.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from shared.errors import InvalidRunFile
from shared.workloads.base import Data, Job, Weights
from shared.workloads.data.pass_order import permutation
from shared.workloads.experience import warm_start
from shared.workloads.rollouts.answer_policy import Rows, log_probabilities, model_of
from shared.workloads.rollouts.answer_records import judged
from shared.workloads.rollouts.config import Problems, RolloutsConfig, RolloutsOptions
from shared.workloads.rollouts.objective import advantages, policy_loss
from shared.workloads.rollouts.problems import solution
from shared.workloads.training.device_differences import to_device
from shared.workloads.training.step_loop import StepLoss, StepWork

MOST = 3.0  # above any gain of a token; added to the loss, because a negative loss is refused


WARM_END = 0.05  # share of `warm_lr` that is left at the end of a warm start


class Answer(NamedTuple):
    """One answer to learn from."""

    problem: int
    version: int  # version that wrote the answer
    tokens: NDArray[np.int64]
    logprobs: NDArray[np.float32]  # log-probabilities under that version
    advantage: float


def window(data: Data) -> list[Answer]:
    """Return the answers of a task's chunks."""
    answers = []
    for index in range(len(data.manifest.chunks)):
        for record in judged(data.chunk(index).read_bytes()):
            rows = zip(record.answers(), record.said(), advantages(record.rewards), strict=True)
            answers += [Answer(record.problem, record.version, *row) for row in rows]
    return answers


class _LearnWork(StepWork):
    """Learning of a model; see `StepWork`. A sample is an answer."""

    def __init__(self, job: Job, weights: Weights, data: Data, device: str) -> None:
        self._config = RolloutsConfig.from_dict(job.config)
        self._problems = Problems.of(self._config, data.asset)
        self._options = RolloutsOptions.from_dict(job.options)
        self._policy = model_of(self._config, weights, data.asset, device)
        super().__init__(
            job,
            self._policy.module,
            device=device,
            samples=job.steps * job.batch_size,
            flops=3 * self._config.token_flops * self._config.context,
        )


class RolloutLearnWork(_LearnWork):
    """Learning from judged answers, in an order drawn by the seed."""

    FIGURES = ("importance", "tapered", "answer_tokens", "behind")

    def __init__(self, job: Job, weights: Weights, data: Data, device: str) -> None:
        # The rate's warm-up begins with rollouts, since an optimiser's first steps are its largest.
        warm = warm_start(job.train, RolloutsOptions.from_dict(job.options).warm_steps)
        job = msgspec.structs.replace(job, global_step=max(0, job.global_step - warm))
        super().__init__(job, weights, data, device)
        self._found = window(data)
        if not self._found:
            raise InvalidRunFile("there is no answer to learn from in the chunks of this task")
        self._order = permutation(len(self._found), job.seed, 1)

    @override
    def measure(self, start: int, stop: int) -> StepLoss:
        count = len(self._order)
        answers = [self._found[self._order[place % count]] for place in range(start, stop)]
        encode = self._problems.text.prompt
        prompts = [encode(self._problems.get(answer.problem).prompt) for answer in answers]
        rows = Rows(prompts, [answer.tokens.tolist() for answer in answers])
        old = to_device(rows.spread([answer.logprobs for answer in answers]), self.device)
        new = log_probabilities(self._policy, rows, self.device, self._options.temperature)
        gains = to_device(torch.tensor([answer.advantage for answer in answers]), self.device)
        mask = to_device(rows.mask, self.device)
        loss, figures = policy_loss(new, old, gains, mask, longest=self._config.answer)
        behind = sum(self.job.base_version - answer.version for answer in answers) / len(answers)
        return StepLoss(loss + MOST, torch.cat([figures, figures.new_tensor([behind])]))


class SupervisedWork(_LearnWork):
    """Learning from solved problems that no actor has seen: a warm start. The rate falls from
    `warm_lr` to a share `WARM_END` of it by the end of the task.
    """

    def __init__(self, job: Job, weights: Weights, data: Data, device: str) -> None:
        rate = RolloutsOptions.from_dict(job.options).warm_lr
        train = msgspec.structs.replace(
            job.train,
            lr=rate,
            warmup_steps=job.steps // 10,
            min_lr_ratio=WARM_END,
            decay_steps=job.steps,
        )
        super().__init__(
            msgspec.structs.replace(job, train=train, global_step=0), weights, data, device
        )

    @override
    def measure(self, start: int, stop: int) -> StepLoss:
        first, size = self.job.start, self._options.warm_size
        problems = [self._problems.get(-1 - first - place, size) for place in range(start, stop)]
        text = self._problems.text
        rows = Rows(
            [text.prompt(problem.prompt) for problem in problems],
            [[*text.answer(solution(problem) or ""), text.end] for problem in problems],
        )
        logprobs = log_probabilities(self._policy, rows, self.device, 1.0)
        return StepLoss(-(logprobs.sum(1) / to_device(rows.mask.sum(1), self.device)).mean())
