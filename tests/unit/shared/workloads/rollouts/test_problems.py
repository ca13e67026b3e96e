"""Problems and their verifiers: what is right earns a reward, and hostile answers cost little."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from time import process_time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import InvalidRunFile
from shared.workloads.rollouts.problems import (
    GENERATORS,
    Problem,
    build_problems,
    check_lengths,
    drawn,
    read_problem,
    read_problems,
    reward,
)
from shared.workloads.rollouts.verifiers import BUILT_IN, evaluated

ARGUMENTS: dict[str, dict[str, Any]] = {
    "number": {"answer": 4},
    "exact": {"answer": ["four", "4"]},
    "choice": {"answer": "B"},
    "expression": {"answer": 1.5},
    "countdown": {"target": 24, "numbers": [1, 3, 4, 6]},
    "sorted": {"items": [10, 9, -2]},
    "json": {
        "schema": {
            "type": "object",
            "properties": {"n": {"type": "integer"}, "of": {"items": {"enum": ["a", 1]}}},
            "required": ["n"],
        }
    },
}


def earned(verifier: str, answer: str) -> float:
    return reward(Problem(prompt="p", verifier=verifier, arguments=ARGUMENTS[verifier]), answer)


def line(**fields: object) -> bytes:
    return json.dumps(fields).encode()


def test_every_verifier_is_tested() -> None:
    assert ARGUMENTS.keys() == BUILT_IN.keys()


@pytest.mark.parametrize(
    ("verifier", "right", "wrong"),
    [
        (
            "number",
            ["4", "it is 4.", "4.00", "8/2", "x = 10-6 = 4", "3? Answer: +4"],
            ["5", "", "-4", "4,000", "1/0", "4 or 5", "\u0664", "Answer: 5"],
        ),
        ("exact", [" four\n", "4", "hm. the answer is: four"], ["Four", "four 4", ""]),
        ("choice", ["B", "(B)", "A? no, B.", "Answer: B"], ["b", "AB", "B, or A", ""]),
        ("expression", ["3/2", "(1 + 2) / (4 - 2) = 9", "-(-1.5)", "3 \u00f7 2"], ["1", "3/", "("]),
        (
            "countdown",
            ["6/(1-3/4)", "so:\n6 / (1 - 3/4) = 24", "4*6", "6*4*1"],
            ["24", "6*4*1*1", "6*(3+1)*1", "6/(1-3/4", "9" * 40],
        ),
        ("sorted", ["-2 9 10", "[-2, 9, 10]", "-2,9;10"], ["10 9 -2", "-2 9", "-2 9 10 10", ""]),
        (
            "json",
            ['{"n": 1}', '{"n": 1, "of": ["a", 1], "more": null}'],
            ['{"n": true}', '{"n": 1.5}', "{}", "[]", '{"n": 1, "of": [true]}', "{'n': 1}", "NaN"],
        ),
    ],
)
def test_right_answers_earn_and_wrong_ones_do_not(
    verifier: str, right: list[str], wrong: list[str]
) -> None:
    assert [each for each in right if earned(verifier, each) != 1.0] == []
    assert [each for each in wrong if earned(verifier, each) != 0.0] == []


HOSTILE = [
    "9" * 10_000_000,
    "9" * 120_000,
    "(" * 120_000,
    "-" * 120_000,
    "1," * 60_000,
    "1,111" * 20_000,
    "answer:" * 18_000,
    "answer" + " " * 120_000,
    "[" * 120_000,
    '{"n":' * 20_000,
    "\u0664" * 1000,
    "1e999999999",
    "9" * 17 + "*9" * 60,
    "((" * 8 + "1" + "))" * 8,
    "\ud800",
    "B " * 60_000,
]


@pytest.mark.parametrize("verifier", BUILT_IN)
def test_hostile_answers_cost_little_time(verifier: str) -> None:
    for answer in HOSTILE:
        began = process_time()
        assert earned(verifier, answer) in (0.0, 1.0)
        assert process_time() - began < 2.0


@given(st.text(max_size=200), st.sampled_from(sorted(BUILT_IN)))
def test_any_text_has_a_reward(answer: str, verifier: str) -> None:
    assert 0.0 <= earned(verifier, answer) <= 1.0


SUMS = st.recursive(
    st.integers(0, 999).map(lambda n: (str(n), Fraction(n))),
    lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(
        lambda t: (
            f"({t[0][0]} {t[1]} {t[2][0]})",
            {"+": t[0][1] + t[2][1], "-": t[0][1] - t[2][1], "*": t[0][1] * t[2][1]}[t[1]],
        )
    ),
    max_leaves=12,
)


@given(SUMS)
def test_expressions_have_the_value_of_arithmetic(case: tuple[str, Fraction]) -> None:
    found = evaluated(case[0])
    assert found is not None
    assert found[0] == case[1]


@given(st.sampled_from(sorted(GENERATORS)), st.integers(0, 2**63), st.integers(0, 10**6))
def test_drawn_problems_are_the_same_again_and_parts_are_apart(
    kind: str, seed: int, number: int
) -> None:
    one, held = (drawn(kind, seed, number, 4, heldout=held) for held in (False, True))
    assert one == drawn(kind, seed, number, 4)
    assert one.prompt != held.prompt
    assert (
        read_problem(line(prompt=one.prompt, verifier=one.verifier, arguments=one.arguments), "x")
        == one
    )


def test_drawn_problems_can_be_solved() -> None:
    for number in range(50):
        sums, items = drawn("arithmetic", 1, number, 2), drawn("sorting", 1, number, 8)
        assert reward(sums, str(sums.arguments["answer"])) == 1.0
        assert reward(items, " ".join(map(str, sorted(items.arguments["items"])))) == 1.0


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (line(prompt="a"), "f line 1: the problem has no answer"),
        (line(prompt="a", verifier="numbr", answer=3), 'is no verifier "numbr": did you mean "num'),
        (line(prompt="a", verifier="number", answer="x"), "f line 1 answer: expected a number"),
        (line(prompt="a", verifier="sorted", answer=3), "f line 1: a problem needs items for its"),
        (line(prompt="a", verifier="choice", answer="Z"), "f line 1: the answer Z is none of the"),
        (line(prompt="a", arguments={"answr": 1}), "f line 1: a problem needs answer"),
        (
            line(prompt="a", verifier="json", arguments={"schema": {"type": "strin"}}),
            "f line 1: type of a schema is one of object",
        ),
        (line(promt="a"), "f line 1: Object contains unknown field promt"),
        (b"{", "f line 1: "),
        (b"[" * 60_000, "f line 1: "),
        (b" " * 70_000 + b"1", "f line 1: a problem has at most 64 KiB"),
        (b"\n", "f holds no problem"),
    ],
)
def test_a_wrong_line_is_named(wrong: bytes, sentence: str) -> None:
    with pytest.raises(InvalidRunFile) as caught:
        read_problems(wrong, "f")
    assert sentence in str(caught.value)


def test_an_answer_names_its_verifier() -> None:
    found = read_problems(line(prompt="a", answer=3) + b"\n" + line(prompt="b", answer="3"), "f")
    assert [each.verifier for each in found] == ["number", "exact"]


def test_a_prompt_longer_than_the_context_is_named() -> None:
    problems = [Problem(prompt="x" * n, verifier="exact", arguments={}) for n in (11, 23)]
    check_lengths(problems, str.encode, 40, 10)
    with pytest.raises(InvalidRunFile, match=r"problem 2 has a prompt of 23 tokens, and the model"):
        check_lengths(problems, str.encode, 32, 10)


def test_a_file_becomes_a_dataset(tmp_path: Path) -> None:
    path, blobs = tmp_path / "p.jsonl", list[bytes]()

    def put(data: bytes) -> str:
        blobs.append(data)
        return str(len(blobs))

    path.write_bytes(b"\n".join(line(prompt=f"{n}+1=", answer=n + 1) for n in [*range(40), 3]))
    manifest = build_problems("sums", [path], put)
    assert (manifest.kind, manifest.meta["problems"], manifest.heldout[0].items) == (
        "problems",
        38,
        2,
    )
    every = [each for blob in blobs for each in read_problems(blob, "b")]
    assert sorted(each.arguments["answer"] for each in every) == [*range(1, 41)]
