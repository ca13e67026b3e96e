"""Share of held-out problems that a version solves, and some of its answers."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from shared.workloads.base import Weights
from shared.workloads.generation.batch import Batch, Sequence
from shared.workloads.generation.suite_score import standard_error
from shared.workloads.rollouts.byte_policy import ByteDecoder
from shared.workloads.rollouts.config import END, RolloutsConfig, decoded, encoded
from shared.workloads.rollouts.problems import Problem, reward

PROBLEMS = 256  # held-out ones that a version is measured on
SHOWN = 12
SLOTS = 64


def answered(
    config: RolloutsConfig, weights: Weights, problems: list[Problem], stop: Callable[[], bool]
) -> list[list[int]]:
    """Return the likeliest answer to each problem as tokens, the end included; answers are cut
    short when it is told to stop.
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


def evaluate(
    config: RolloutsConfig, weights: Weights, budget_s: float, stop: Callable[[], bool]
) -> dict[str, float]:
    """Return the metrics of a version: the share of held-out problems that its likeliest answer
    solves, and "loss", the remaining share.
    """
    ends_at = monotonic() + budget_s
    problems = [config.problem(number, heldout=True) for number in range(PROBLEMS)]
    answers = answered(config, weights, problems, lambda: stop() or monotonic() > ends_at)
    pairs = list(zip(problems, answers, strict=True))
    rewards = [reward(problem, decoded(answer)) if answer else 0.0 for problem, answer in pairs]
    cut = sum(answer[-1:] != [END] for answer in answers)
    solved = sum(rewards) / PROBLEMS
    return {
        "loss": 1 - solved,
        "solved": solved,
        "solved_error": standard_error(round(sum(rewards)), PROBLEMS),
        "cut": cut / PROBLEMS,
        "answer_tokens": sum(map(len, answers)) / PROBLEMS,
    }


def sampled(config: RolloutsConfig, weights: Weights, prompt: str) -> str:
    """Return held-out problems with a version's answers and their rewards, or its answer to a
    prompt.
    """
    if prompt:
        asked = Problem(prompt=prompt, verifier="exact", arguments={"answer": ""})
        return prompt + decoded(answered(config, weights, [asked], lambda: False)[0])
    problems = [config.problem(number, heldout=True) for number in range(SHOWN)]
    lines = []
    for problem, answer in zip(
        problems, answered(config, weights, problems, lambda: False), strict=True
    ):
        text = decoded(answer)
        lines.append(f"{'+' if reward(problem, text) else '-'} {problem.prompt} {text}")
    return "\n".join(lines)
