"""Problems: a prompt, and the weighted rewards of its answers.

A seed draws a problem, or a dataset contains it (`problem_dataset`). A hash of the prompt assigns a
drawn problem to the training or the held-out part, so that the two never share a problem.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from hashlib import sha256
from typing import Any, NamedTuple

import msgspec

from shared.errors import InvalidRunFile
from shared.nearest_name import hint
from shared.workloads.rollouts.verifiers import ANSWER_CHARS_MAX, Sorted, final, verifier

END = 0  # byte that ends an answer; no text holds it
HELDOUT_OF = 8  # one of this many drawn problems is held out


class Reward(msgspec.Struct, frozen=True, kw_only=True):
    """Reward of a problem: a verifier with its arguments, and a weight."""

    verifier: str
    arguments: dict[str, Any]
    place: str = ""  # text before the final answer; "" = the usual places
    weight: float = 1.0


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt, and the rewards of an answer to it."""

    prompt: str
    rewards: tuple[Reward, ...]

    @classmethod
    def single(
        cls, prompt: str, verifier: str, arguments: dict[str, Any], place: str = ""
    ) -> Problem:
        """Return a problem with one reward."""
        reward = Reward(verifier=verifier, arguments=arguments, place=place)
        return cls(prompt=prompt, rewards=(reward,))


def reward(problem: Problem, answer: str) -> float:
    """Return the weighted mean of the rewards of an answer, 0 ... 1; 0 for an answer of more than
    `ANSWER_CHARS_MAX` characters. A verifier that breaks counts as 0. Raises InvalidRunFile.
    """
    if len(answer) > ANSWER_CHARS_MAX:
        return 0.0
    total = sum(part.weight for part in problem.rewards)
    return sum(part.weight * _reward(part, answer) for part in problem.rewards) / total


def _reward(part: Reward, answer: str) -> float:
    judge = verifier(part.verifier, part.arguments, "the problem")
    answer_text = answer if judge.whole else final(answer, part.place)
    try:
        return min(1.0, max(0.0, float(judge.reward(answer_text))))
    except Exception:  # an answer that breaks a package's verifier earns nothing
        return 0.0


def encoded(text: str) -> list[int]:
    """Return the tokens of a text: its bytes."""
    return list(text.encode().replace(bytes([END]), b""))


def decoded(tokens: Sequence[int]) -> str:
    """Return the text of tokens, up to the end of an answer."""
    return bytes([*tokens]).partition(bytes([END]))[0].decode(errors="replace")


class Text(NamedTuple):
    """Conversion of a run's texts to tokens and back; `decode` leaves the end of an answer out."""

    prompt: Callable[[str], list[int]]
    answer: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    end: int  # token that ends an answer
    vocabulary: int


BYTES = Text(encoded, encoded, decoded, END, 256)


def solution(problem: Problem) -> str | None:
    """Return a right answer, with numbers written without exponents. None if only a search finds an
    answer, or if an answer that is right by one reward is not right by the others.
    """
    answers = [answer for part in problem.rewards if (answer := _solution(part)) is not None]
    if len(problem.rewards) > 1:
        answers = [answer for answer in answers if reward(problem, answer) == 1]
    return answers[0] if answers else None


def _solution(part: Reward) -> str | None:
    if part.verifier == "sorted":
        items = Sorted(**part.arguments).right
        return (" " if any(len(item) > 1 for item in items) else "").join(items)
    answer = part.arguments.get("answer")
    if isinstance(answer, list | tuple):
        answer = answer[0]
    if isinstance(answer, float):
        answer = format(Decimal(repr(answer)), "f")
    return None if answer is None else f"{part.place} {answer}".strip()


def drawn(kind: str, seed: int, number: int, size: int, *, heldout: bool = False) -> Problem:
    """Return problem `number` that a generator draws with a seed; see `GENERATORS` for `size`.
    Raises InvalidRunFile.
    """
    draw = _generator(kind, size).draw
    dice = random.Random(sha256(b"problem %d %d" % (seed, number)).digest())
    while True:
        problem = draw(dice, size)
        if (sha256(problem.prompt.encode()).digest()[0] % HELDOUT_OF == 0) == heldout:
            return problem


def longest(kind: str, size: int) -> Problem:
    """Return a problem that is as long as any problem that a generator draws, and its solution as
    long as any solution. Raises InvalidRunFile.
    """
    return _generator(kind, size).longest(size)


def _generator(kind: str, size: int) -> _Generator:
    """Return a generator of problems of this size. Raises InvalidRunFile."""
    if kind not in GENERATORS:
        raise InvalidRunFile(f'there is no generator "{kind[:64]}": {hint(kind, GENERATORS)}')
    generator = GENERATORS[kind]
    if not generator.least <= size <= generator.most:
        raise InvalidRunFile(
            f"the size of {kind} lies between {generator.least} and {generator.most}, not {size}"
        )
    return generator


def _arithmetic(dice: random.Random, digits: int) -> Problem:
    one, other = (dice.randrange(10 ** (digits - 1), 10**digits) for _ in range(2))
    return _sum(one, dice.choice("+-"), other)


def _sum(one: int, sign: str, other: int) -> Problem:
    value = one + other if sign == "+" else one - other
    return Problem.single(f"{one}{sign}{other}=", "number", {"answer": value})


def _sorting(dice: random.Random, most: int) -> Problem:
    return _digits([dice.randrange(10) for _ in range(dice.randint(3, most))])


def _digits(items: list[int]) -> Problem:
    prompt = f"{''.join(map(str, items))}:"
    return Problem.single(prompt, "sorted", {"items": items})


def _countdown(dice: random.Random, count: int) -> Problem:
    numbers = [dice.randrange(1, _LARGEST + 1) for _ in range(count)]
    target = numbers[0]
    for operand in numbers[1:]:
        target = dice.choice((target + operand, abs(target - operand), target * operand))
    dice.shuffle(numbers)
    return _target(target, numbers)


def _target(target: int, numbers: list[int]) -> Problem:
    prompt = f"make {target} of {' '.join(map(str, numbers))}:"
    return Problem.single(prompt, "countdown", {"target": target, "numbers": numbers})


class _Generator(NamedTuple):
    """Drawing of problems of a size from `least` to `most`, and the longest problem of a size."""

    draw: Callable[[random.Random, int], Problem]
    least: int
    most: int
    longest: Callable[[int], Problem]


_LARGEST = 25  # largest number of a countdown
GENERATORS: Mapping[str, _Generator] = {
    # digits of the two numbers
    "arithmetic": _Generator(_arithmetic, 2, 9, lambda n: _sum(10**n - 1, "+", 10**n - 1)),
    # most digits, of at least three
    "sorting": _Generator(_sorting, 3, 64, lambda n: _digits([0] * n)),
    # numbers
    "countdown": _Generator(_countdown, 2, 6, lambda n: _target(_LARGEST**n, [_LARGEST] * n)),
}
