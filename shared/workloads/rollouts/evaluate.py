"""Evaluation: the share of held-out problems that a version solves, and some of its answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from time import monotonic

from shared.workloads.base import Data, Weights
from shared.workloads.generation.batch import Batch, Sequence
from shared.workloads.generation.suite_score import standard_error
from shared.workloads.rollouts.answer_policy import Files, decoder_of
from shared.workloads.rollouts.config import Problems, RolloutsConfig
from shared.workloads.rollouts.problems import Problem, reward

PROBLEMS = 256  # most held-out problems of a measurement
SHOWN = 12
SLOTS = 64
NO_FILES: Mapping[str, Path] = {}  # a model of bytes needs no file


def answered(
    config: RolloutsConfig,
    weights: Weights,
    problems: list[Problem],
    stop: Callable[[], bool],
    file: Files = NO_FILES.__getitem__,
) -> list[list[int]]:
    """Return the greedy answer to each problem as tokens, its end included; `stop` cuts answers
    short. A prompt without room for an answer loses its beginning. `file` gives the run's files by
    name.
    """
    text, room = config.text(file), config.context - config.answer
    batch = Batch(decoder_of(config, weights, file, min(SLOTS, len(problems)), "cpu"))
    answers: list[list[int]] = [[] for _ in problems]
    waiting = list(enumerate(problems))[::-1]
    while (waiting or len(batch)) and not stop():
        while waiting and len(batch) < SLOTS:
            number, problem = waiting.pop()
            batch.add(
                Sequence(
                    id=str(number),
                    prompt=tuple(text.prompt(problem.prompt)[-room:]) or (text.end,),
                    max_tokens=config.answer,
                    seed=0,
                    temperature=0,
                )
            )
        for token_made in batch.step():
            token = token_made.chosen or token_made.end
            if token is not None:
                answers[int(token_made.id)].append(token.token)
    return answers


def heldout_problems(config: RolloutsConfig, data: Data | None, most: int) -> list[Problem]:
    """Return held-out problems of a run, whose dataset's held-out split is `data`."""
    listed = data.chunk(0) if data is not None and config.dataset else None
    text = config.text(data.asset if data is not None else NO_FILES.__getitem__)
    return Problems(config, listed, text, heldout=True).first(most)


def evaluate(
    config: RolloutsConfig,
    weights: Weights,
    data: Data | None,
    budget_s: float,
    stop: Callable[[], bool],
) -> dict[str, float]:
    """Return the metrics of a version: the share of held-out problems that its greedy answers
    solve, and "loss", the remaining share.
    """
    ends_at = monotonic() + budget_s
    problems = heldout_problems(config, data, PROBLEMS)
    file = data.asset if data else NO_FILES.__getitem__
    read = config.text(file).decode
    answers = answered(config, weights, problems, lambda: stop() or monotonic() > ends_at, file)
    pairs = list(zip(problems, answers, strict=True))
    rewards = [reward(problem, read(answer)) if answer else 0.0 for problem, answer in pairs]
    cut = sum(answer[-1:] != [config.end] for answer in answers)
    count = len(problems)
    solved = sum(rewards) / count
    return {
        "loss": 1 - solved,
        "solved": solved,
        "solved_error": standard_error(round(sum(rewards)), count),
        "problems": float(count),
        "cut": cut / count,
        "answer_tokens": sum(map(len, answers)) / count,
    }


def sampled(config: RolloutsConfig, weights: Weights, data: Data | None, prompt: str) -> str:
    """Return held-out problems with a version's answers and their rewards, or its answer to a
    prompt.
    """
    question = Problem.single(prompt, "exact", {"answer": ""})
    problems = [question] if prompt else heldout_problems(config, data, SHOWN)
    file = data.asset if data else NO_FILES.__getitem__
    answers = answered(config, weights, problems, lambda: False, file)
    texts = [config.text(file).decode(answer) for answer in answers]
    if prompt:
        return prompt + texts[0]
    return "\n".join(
        f"{'+' if reward(problem, text) else '-'} {problem.prompt} {text}"
        for problem, text in zip(problems, texts, strict=True)
    )
