"""Problems and their verifiers: what is right earns a reward, and hostile answers cost little."""

from __future__ import annotations

from fractions import Fraction
from importlib.metadata import EntryPoint
from pathlib import Path
from time import process_time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from shared.errors import InvalidRunFile
from shared.workloads.base import DatasetWanted
from shared.workloads.rollouts import verifiers
from shared.workloads.rollouts.problem_dataset import build
from shared.workloads.rollouts.problems import GENERATORS, Problem, drawn, longest, reward, solution
from shared.workloads.rollouts.verifiers import VERIFIERS, Verifier, evaluated, verifier

ARGUMENTS: dict[str, dict[str, Any]] = {
    "number": {"answer": 4},
    "exact": {"answer": ["four", "4"]},
    "choice": {"answer": "B"},
    "expression": {"answer": 1.5},
    "countdown": {"target": 24, "numbers": [1, 3, 4, 6]},
    "sorted": {"items": [10, 9, -2]},
    "form": {"marks": ["<think>", "</think>", "<answer>"]},
    "json": {
        "schema": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"enum": ["Ann", 1, [1]]},
                "ages": {"type": "array", "items": {"type": "integer"}},
            },
        }
    },
}


def earned(verifier: str, answer: str) -> float:
    return reward(Problem.single("p", verifier, ARGUMENTS[verifier]), answer)


def test_every_verifier_is_tested() -> None:
    assert ARGUMENTS.keys() == VERIFIERS.keys()


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
            "json",
            [
                '{"name": "Ann"}',
                ' {"name": 1, "ages": [1, 2], "more": null}',
                '{"name": [1]}',
                '{"name": 1, "more": "answer: 2"}',
                'answer: {"name": 1}',
            ],
            [
                '{"name": true}',
                '{"name": [true]}',
                '{"name": 1, "ages": [1.5]}',
                "{}",
                "[]",
                '{"name": 1',
                "",
            ],
        ),
        (
            "countdown",
            ["6/(1-3/4)", "so:\n6 / (1 - 3/4) = 24", "4*6", "6*4*1"],
            ["24", "6*4*1*1", "6*(3+1)*1", "6/(1-3/4", "9" * 40],
        ),
        (
            "form",
            ["<think>a</think>\n<answer>4</answer>", "<think></think><answer>"],
            ["</think><think><answer>", "<think></think>", "<think><think></think><answer>", ""],
        ),
        ("sorted", ["-2 9 10", "[-2, 9, 10]", "-2,9;10"], ["10 9 -2", "-2 9", "-2 9 10 10", ""]),
    ],
)
def test_right_answers_earn_and_wrong_ones_do_not(
    verifier: str, right: list[str], wrong: list[str]
) -> None:
    assert [each for each in right if earned(verifier, each) != 1.0] == []
    assert [each for each in wrong if earned(verifier, each) != 0.0] == []


def test_the_answer_stands_after_the_last_of_the_places_that_its_problem_names() -> None:
    """Who names the place for each guess is judged by the last of them."""
    problem = Problem.single("p", "number", {"answer": 4}, "Result:")
    assert reward(problem, "Result: 5\nno. Result: 4") == 1.0
    assert reward(problem, "Result: 4\nno. Result: 5") == 0.0
    assert reward(problem, "Answer: 4") == 0.0


class Vowels(Verifier, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An answer is full of vowels."""

    least: int

    @override
    def reward(self, answer: str) -> float:
        return float(sum(each in "aeiou" for each in answer) >= self.least)


def test_an_installed_package_brings_a_verifier_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    brought = EntryPoint("vowels", f"{__name__}:Vowels", verifiers.ENTRY_POINTS)
    monkeypatch.setattr(verifiers, "entry_points", lambda group: [brought])
    verifiers._installed.cache_clear()
    found = reward(Problem.single("p", "vowels", {"least": 2}), "aloe")
    verifiers._installed.cache_clear()
    assert found == 1.0


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
    "\u0664" * 1000,
    "1e999999999",
    "9" * 17 + "*9" * 60,
    "((" * 8 + "1" + "))" * 8,
    "\ud800",
    "B " * 60_000,
]


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_hostile_answers_cost_little_time(verifier: str) -> None:
    for answer in HOSTILE:
        began = process_time()
        assert earned(verifier, answer) in (0.0, 1.0)
        assert process_time() - began < 2.0


@given(st.text(max_size=200), st.sampled_from(sorted(VERIFIERS)))
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


@given(st.sampled_from(sorted(GENERATORS)), st.integers(0, 10**6), st.booleans(), st.data())
def test_no_drawn_problem_is_longer_than_the_longest(
    kind: str, number: int, held: bool, data: st.DataObject
) -> None:
    generator = GENERATORS[kind]
    size = data.draw(st.integers(generator.least, generator.most))
    problem, most = drawn(kind, 0, number, size, heldout=held), longest(kind, size)
    assert len(problem.prompt) <= len(most.prompt)
    assert len(solution(problem) or "") <= len(solution(most) or "")


def test_drawn_problems_can_be_solved() -> None:
    for number in range(50):
        sums, items = drawn("arithmetic", 1, number, 2), drawn("sorting", 1, number, 8)
        assert reward(sums, str(sums.rewards[0].arguments["answer"])) == 1.0
        assert reward(items, " ".join(map(str, sorted(items.rewards[0].arguments["items"])))) == 1.0


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("numbr", {"answer": 3}, 'it: there is no verifier "numbr": did you mean "number"'),
        ("number", {"answer": "x"}, "it: the answer 'x' is not a number"),
        ("sorted", {"answer": 3}, "it: a problem needs items for its"),
        ("json", {"schema": {"items": {"type": "strin"}}}, "it schema.items.type: "),
        (
            "json",
            {"schema": {"properties": {"a": {"type": 1}}}},
            "it schema.properties[...].type: ",
        ),
        ("json", {"schema": {"properties": {"a": {"kind": "b"}}}}, 'unknown key "kind" in ['),
        ("choice", {"answer": "Z"}, "it: the answer Z is not one of the choices ABCD"),
    ],
)
def test_wrong_arguments_are_named(name: str, arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRunFile) as caught:
        verifier(name, arguments, "it")
    assert sentence in str(caught.value)


@pytest.mark.parametrize("levels", [40, 900, 2000, 100_000])
@pytest.mark.parametrize("key", ["items", "enum"])
def test_a_schema_nests_so_deep_and_no_deeper(levels: int, key: str) -> None:
    schema: Any = {}
    for _ in range(levels):
        schema = {key: [schema] if key == "enum" else schema}
    with pytest.raises(InvalidRunFile, match=r"^line 3: schema.* nests more than 32 tables or"):
        verifier("json", {"schema": schema}, "line 3")


def test_a_problem_that_nests_too_deep_is_named_by_its_line(tmp_path: Path) -> None:
    schema = b'{"items":' * 40 + b"{}" + b"}" * 40
    line = b'{"prompt":"a list","verifier":"json","arguments":{"schema":%s}}\n' % schema
    (tmp_path / "p.jsonl").write_bytes(b'{"prompt":"1+1=","answer":2}\n' + line)
    wanted = DatasetWanted(name="p", sources=(tmp_path / "p.jsonl",), seed=0)
    with pytest.raises(InvalidRunFile, match=r"^p\.jsonl line 2: schema.* nests more than 32"):
        build(wanted, lambda data: "0" * 64)
