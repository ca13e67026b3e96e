"""Numbers in answers: what is right is paid however it is written, and nothing else is."""

from __future__ import annotations

from fractions import Fraction

import pytest

from shared.workloads.rollouts.problems import Problem, reward
from shared.workloads.rollouts.quantities import quantity

Expected = int | float | str

# Texts that name the expected number without answering with it, or answer with another one. `N` is
# the number, `M` the next one.
NAMED = (
    "GPT-N says hello to all of you", "I cannot do it (step N)", "N or M", "N and M", "M, N",
    "N, M", "not N", "maybe N or else", "N-M", "N+M", "N*M", "N^2", "2^N", "N!", "N/M", "N:M",
    "N.N",
    "N%N", "step N: I give up now", "N is wrong", "the answer is not N", "Answer: M, not N",
    "answer: between N and M", "N < x", "x > N", "1. N 2. M", "[N, M]", "(N, M)", "{N; M}", "N0",
    "0.N", "-N", "Ne3", "N million", "N,000", "N 000", "N^N", "1/N", "\\frac{1}{N}",
    "\\frac{N}{M}", "\\boxed{M} because of N", "#### M\nN", "<answer>M</answer> N",
    "\\boxed{N or M}", "\\boxed{x^N}", "<answer>N and M</answer>", "#### N or M", "N\nM",
    "N?\nI do not know it at all", "It could be N, I think", "Question N of 10", "version N.M",
    "N-th", "log N", "sqrt(N)", "\\sqrt{N}", "f(N)", "x_N", "N x N", "N by N = M", "N = M",
    "N == M", "N to M", "N–M", "chapter N verse M", "page N\n", "N times as many as before it",
    "Answer: option N is the best one", "The answer is at most N", "at least N", "over N apples",
)  # fmt: skip
OTHERS: list[tuple[Expected, str]] = [
    (5, ".5"), (2, "\\frac{1}{2}"), (6, "1e6"), (6, "10^6"), (0, "1 000"), (0, "1_000"),
    (1, "1.000.000"), (1, "1,5"), (1, "0.1e2"), (12, "1,2"), (12, "12:30"), (2024, "2024-01-05"),
    (50, "0.5%"), (5, "0.5%"), (3, "three"), (4, "\u0664"), (4, "\u2463"), (4, "IV"), (4, ""),
    (4, " "), (4, "="), (4, "N/A"), (0, "nothing"), (0, "-"), (0, "zero apples and 1"),
    (1, "1/0"), (0, "0/0"), (1, "1.0.0"), (10, "1 0"), (1000000, "1e7"), (0.5, "1/3"),
    (0.5, "5%"), (1.5, "1 2/1"), (15, "1 1/2"), (-3, "3"), (3, "--3"), (3, "\u22123"),
    (100, "1e-2"), (18, "$18,00"), (7, "7" * 30), (9, "9" * 100_000), (1, "1" + "0" * 600),
    (0.1, "0.10000000000000000555"), (2, "\\boxed{}"), (2, "\\boxed{2"), (2, "<answer></answer>2"),
    (2, "####"), (2, "#### two\n2"), (3, "3 4"), (4, "four"),
]  # fmt: skip
WRONG: list[tuple[Expected, str]] = [
    *(
        (n, text.replace("N", str(n)).replace("M", str(n + 1)))
        for n in (4, 17, 250)
        for text in NAMED
    ),
    *OTHERS,
]

WRITTEN = (
    "N", " N\n", "N.", "+N", "N.0", "N.00", "**N**", "$N$", "`N`", "it is N.", "x = N",
    "\\boxed{N}", "So the total is\n\\boxed{N}.", "2 + 2 = N", "working, 3 of them\n#### N",
    "<think>is it 3?</think><answer>N</answer>", "<answer> N </answer>", "The answer is N.",
    "the answer is: N", "Answer: N", "ANSWER: N apples", "Answer:\nN", "N apples", "N cm^2",
    "N square meters", "N km/h", "N\\text{ cm}", "N^\\circ", "N°", "about N", "N (as 1 + 2 is 3)",
    "\u2248 N", "\\boxed{N\\text{ apples}}", "#### N dollars", "$N", "$N.00", "N euros", "USD N",
    "first 3, then more\nN", "exactly N", "3? no.\nAnswer: N", "equals N", "\\[ \\boxed{N} \\]",
)  # fmt: skip
RIGHT: list[tuple[Expected, str]] = [
    *((n, text.replace("N", str(n))) for n in (4, 17) for text in WRITTEN),
    (0.5, "1/2"), (0.5, ".5"), (0.5, "0.50"), (0.5, "50%"), (0.5, "50 \\%"), (0.5, "\\frac{1}{2}"),
    (0.5, "\\dfrac12"), (0.5, "\u00bd"), ("1/2", "0.5"), ("50%", "0.5"), ("50%", "50"), (50, "50%"),
    (50, "50 percent"), ("\\frac{3}{4}", "75%"), (1.5, "1 1/2"), (1.5, "1\\frac{1}{2}"),
    (5, "10/2"),
    (1000, "1,000"), (1000, "1 000"), (1000, "1e3"), (1000, "10^3"), (1000, "10^{3}"),
    (6e6, "6 million"), (3e8, "3 \u00d7 10^8 m/s"), (3e8, "3 \\times 10^{8}"), (-3, "\u22123"),
    (-3, "-3"), (-5, "-$5"), ("1,234", "1234"), (0.001, "10^{-3}"), (0.001, "1e-3"),
    (12, "3 x 4 = 12 cm^2"),
]  # fmt: skip


def paid(expected: Expected, answer: str) -> float:
    problem = Problem.single("p", "number", {"answer": expected})
    return reward(problem, answer)


def test_no_wrong_answer_is_paid() -> None:
    assert len(WRONG) >= 200
    assert [pair for pair in WRONG if paid(*pair)] == []


def test_right_answers_are_paid_however_they_are_written() -> None:
    refused = [pair for pair in RIGHT if not paid(*pair)]
    assert len(refused) <= 0.02 * len(RIGHT), refused


def test_a_place_of_the_problems_own_is_the_only_one() -> None:
    problem = Problem.single("p", "number", {"answer": 4}, "Result =>")
    texts = [
        "Result => 4",
        "4",
        "Answer: 4",
        "\\boxed{4}",
        "Result => 5, so\nResult => 4",
        "Result => 5",
    ]
    assert [reward(problem, text) for text in texts] == [1, 0, 0, 0, 1, 0]


def test_a_tolerance_is_a_distance() -> None:
    near = Problem.single("p", "number", {"answer": 3.14, "tolerance": 0.01})
    assert [reward(near, text) for text in ("3.1416", "22/7", "3.2", "3")] == [1, 1, 0, 0]


@pytest.mark.parametrize(
    ("text", "value"),
    [("1/3", Fraction(1, 3)), ("-2.50", Fraction(-5, 2)), ("7e-2", Fraction(7, 100))],
)
def test_values_are_exact(text: str, value: Fraction) -> None:
    found = quantity(text)
    assert found is not None
    assert found.value == value
