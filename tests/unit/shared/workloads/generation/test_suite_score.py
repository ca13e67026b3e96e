"""Scores on task suites: of a model whose probabilities are known, exact."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray
from typing_extensions import override

from shared.workloads.data.chat_template import ChatFrame
from shared.workloads.data.task_suite import Example, Suite
from shared.workloads.generation.suite_score import score

END = 0


class Bytes:
    """A decoder whose tokens are bytes: after byte b, b + 1 has the logit `sure`, all others 0."""

    slots, vocabulary = 3, 256
    end: int | None = END

    def __init__(self, sure: float = 4.0, context: int = 64) -> None:
        self.sure, self.context = sure, context
        self.longest = 0

    def encode(self, text: str, *, marks: bool = False) -> list[int]:
        return list(text.encode()) or [END]

    def spelling(self, token: int) -> bytes:
        return bytes([token])

    def continuation(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    def share(self, source: int, slot: int, count: int) -> None: ...

    def _after(self, token: int) -> NDArray[np.float32]:
        row = np.zeros(256, np.float32)
        row[(token + 1) % 256] = self.sure
        return row

    def prefill(self, slot: int, tokens: Sequence[int], start: int) -> NDArray[np.float32]:
        self.longest = max(self.longest, start + len(tokens))
        return self._after(tokens[-1])

    def prefill_many(
        self, slots: Sequence[int], prompts: Sequence[Sequence[int]]
    ) -> NDArray[np.float32]:
        return np.stack(
            [self.prefill(slot, each, 0) for slot, each in zip(slots, prompts, strict=True)]
        )

    def decode_step(
        self, slots: Sequence[int], tokens: Sequence[int], places: Sequence[int]
    ) -> NDArray[np.float32]:
        self.longest = max(self.longest, max(places) + 1)
        return np.stack([self._after(token) for token in tokens])

    def scores(self, tokens: Sequence[int], places: Sequence[int]) -> NDArray[np.float32]:
        self.longest = max(self.longest, len(tokens))
        return np.stack([self._after(tokens[place]) for place in places])


def never() -> bool:
    return False


def choice(prompt: str, choices: tuple[str, ...], answer: int) -> Example:
    return Example(prompt=prompt, choices=choices, answer=answer)


def suite(*examples: Example) -> Suite:
    return Suite(kind=examples[0].kind, examples=examples)


def test_the_likeliest_choice_counts_whatever_its_length() -> None:
    found = score(
        Bytes(),
        suite(
            choice("ab", ("cdefgh", "x"), 0),  # longer, and likelier a byte
            choice("ab", ("c", "cx"), 0),
            choice("ab", ("zz", "cd"), 0),  # wrong
            choice("", ("\x01", "b"), 0),  # an empty prompt is the end of the text before
        ),
        60.0,
        never,
    )
    assert (found.correct, found.examples, found.cut) == (3, 4, 0)
    assert found.error == pytest.approx(math.sqrt(0.75 * 0.25 / 4))


class Joined(Bytes):
    """A decoder with the token 1 for "ab", which follows the end of a text."""

    @override
    def encode(self, text: str, *, marks: bool = False) -> list[int]:
        return [1] if text == "ab" else super().encode(text)

    @override
    def scores(self, tokens: Sequence[int], places: Sequence[int]) -> NDArray[np.float32]:
        assert tokens  # no model reads an empty text
        return super().scores(tokens, places)


def test_a_prompt_and_a_choice_may_be_one_token() -> None:
    examples = Suite(kind="choice", examples=(choice("a", ("b", "z"), 0),))
    tally = score(Joined(), examples, 60, never)
    assert (tally.correct, tally.examples, tally.cut) == (1, 1, 0)


def test_written_answers_are_compared_up_to_the_stop() -> None:
    examples = [
        Example(prompt="a", answer="bcd", stop="e"),
        Example(prompt=" a", answer=("x", " bcd\n"), stop="e"),  # one of several
        Example(prompt="b", answer="bcd", stop="f"),  # wrong: cde
        Example(prompt="c", answer="de", max_tokens=2),  # ended by its length
        *(Example(prompt="z" * n + "m", answer="no", stop="p") for n in range(1, 9)),
    ]
    found = score(Bytes(), suite(*examples), 60.0, never)
    assert (found.correct, found.examples) == (11, 12)


def test_a_text_too_long_for_the_model_loses_its_beginning_and_is_counted() -> None:
    model = Bytes(context=8)
    long = suite(choice("x" * 40 + "ab", ("c", "q"), 0), choice("ab", ("c" * 20, "d" * 20), 1))
    found = score(model, long, 60.0, never)
    assert (found.examples, found.cut, model.longest) == (2, 2, 8)
    written = suite(Example(prompt="x" * 40 + "a", answer="bc", max_tokens=2))
    found = score(model, written, 60.0, never)
    assert (found.correct, found.cut) == (1, 1)
    assert model.longest <= 8


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_model_that_diverged_is_right_about_nothing(bad: float) -> None:
    examples = suite(*(choice(p, ("b", "c"), answer) for p, answer in (("a", 0), ("ab", 0))))
    found = score(Bytes(sure=bad), examples, 60.0, never)
    assert found.examples == 2
    assert found.correct == 0 or bad == -math.inf


def test_a_measurement_ends_early_with_the_same_part_each_time() -> None:
    examples = suite(*(choice("ab" + "z" * n, ("c", "d"), 0) for n in range(50)))
    found = score(Bytes(), examples, 0.0, never)
    assert found.examples == 1
    asked = iter([False] * 9 + [True] * 99)
    assert score(Bytes(), examples, 60.0, lambda: next(asked)).examples == 10


FRAME = ChatFrame("u", " b")


def test_a_model_of_dialogues_is_asked_by_its_template() -> None:
    asked = choice(" q ", (" cde", "xyz"), 0)
    assert score(Bytes(), suite(asked), 60.0, never, FRAME).share == 1.0  # "b" is followed by "c"
    assert score(Bytes(), suite(choice("q", ("rst", "cde"), 0)), 60.0, never).share == 1.0
    assert score(Bytes(), suite(choice("q", ("rst", "cde"), 0)), 60.0, never, FRAME).share == 0.0


class Marked(Bytes):
    """A decoder whose special token, written <end>, is the byte of a "g": no text."""

    @override
    def encode(self, text: str, *, marks: bool = False) -> list[int]:
        return super().encode(text.replace("<end>", "g") if marks else text)

    @override
    def decode(self, tokens: Sequence[int]) -> str:
        return super().decode([token for token in tokens if token != ord("g")])


@pytest.mark.parametrize(("decoder", "end"), [(Bytes(), "gh"), (Marked(), "<end>\n")])
def test_an_answer_of_a_dialogue_ends_where_its_template_ends_it(decoder: Bytes, end: str) -> None:
    example = Example(prompt="q", answer="cdef", stop="z", max_tokens=30)
    assert score(decoder, suite(example), 60.0, never, ChatFrame("", "b", end)).share == 1.0
    assert score(decoder, suite(example), 60.0, never).share == 0.0
