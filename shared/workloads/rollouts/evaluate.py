"""Evaluation: the share of held-out problems that a version solves, and some of its answers."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from shared.workloads.base import Data, Weights
from shared.workloads.generation.batch import Batch, Sequence
from shared.workloads.generation.suite_score import standard_error
from shared.workloads.rollouts.byte_policy import ByteDecoder
from shared.workloads.rollouts.config import Problems, RolloutsConfig
from shared.workloads.rollouts.problems import END, Problem, decoded, encoded, reward

PROBLEMS = 256  # most held-out problems of a measurement
SHOWN = 12
SLOTS = 64


def answered(
    config: RolloutsConfig, weights: Weights, problems: list[Problem], stop: Callable[[], bool]
) -> list[list[int]]:
    """Return the greedy answer to each problem as tokens, its end included; `stop` cuts answers
    short.
    """
    batch = Batch(ByteDecoder(config, weights, min(SLOTS, len(problems)), "cpu"))
    found: list[list[int]] = [[] for _ in problems]
    waiting = list(enumerate(problems))[::-1]
    while (waiting or len(batch)) and not stop():
        while waiting and len(batch) < SLOTS:
            number, problem = waiting.pop()
            batch.add(
                Sequence(
                    id=str(number),
                    prompt=tuple(encoded(problem.prompt)),
                    max_tokens=config.answer,
                    seed=0,
                    temperature=0,
                )
            )
        for made in batch.step():
            token = made.chosen or made.end
            if token is not None:
                found[int(made.id)].append(token.token)
    return found


def heldout_problems(config: RolloutsConfig, data: Data | None, most: int) -> list[Problem]:
    """Return held-out problems of a run, whose dataset's held-out split is `data`."""
    file = data.chunk(0) if data is not None and config.dataset else None
    return Problems(config, file, heldout=True).first(most)


def evaluate(
    config: RolloutsConfig,
    weights: Weights,
    problems: list[Problem],
    budget_s: float,
    stop: Callable[[], bool],
) -> dict[str, float]:
    """Return the metrics of a version: the share of held-out problems that its greedy answers
    solve, and "loss", the remaining share.
    """
    ends_at = monotonic() + budget_s
    answers = answered(config, weights, problems, lambda: stop() or monotonic() > ends_at)
    pairs = list(zip(problems, answers, strict=True))
    rewards = [reward(problem, decoded(answer)) if answer else 0.0 for problem, answer in pairs]
    cut = sum(answer[-1:] != [END] for answer in answers)
    count = len(problems)
    solved = sum(rewards) / count
    return {
        "loss": 1 - solved,
        "solved": solved,
        "solved_error": standard_error(round(sum(rewards)), count),
        "cut": cut / count,
        "answer_tokens": sum(map(len, answers)) / count,
    }


def sampled(config: RolloutsConfig, weights: Weights, problems: list[Problem], prompt: str) -> str:
    """Return problems with a version's answers and their rewards, or its answer to a
    prompt.
    """
    if prompt:
        asked = Problem(prompt=prompt, verifier="exact", arguments={"answer": ""})
        return prompt + decoded(answered(config, weights, [asked], lambda: False)[0])
    lines = []
    for problem, answer in zip(
        problems, answered(config, weights, problems, lambda: False), strict=True
    ):
        text = decoded(answer)
        lines.append(f"{'+' if reward(problem, text) else '-'} {problem.prompt} {text}")
    return "\n".join(lines)
