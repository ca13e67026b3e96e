"""A task suite is read strictly: what is wrong is named with its line, and nothing is left out."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from shared.errors import InvalidRunFile
from shared.workloads.data.task_suite import (
    ANSWER_BYTES_MAX,
    BYTES_MAX,
    CHOICES_MAX,
    EXAMPLES_MAX,
    PROMPT_BYTES_MAX,
    build_suite,
    read_suite,
)

CHOICE = {"prompt": "The sky is", "choices": [" blue", " green"], "answer": 0}
EXACT = {"prompt": "2 + 2 =", "answer": "4"}


def lines(*examples: object) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in examples)


def test_both_kinds_are_read_with_what_guessing_gets() -> None:
    four = {**CHOICE, "prompt": "Grass is", "choices": ["a", "b", "c", "d"], "answer": 3}
    suite = read_suite(b"\xef\xbb\xbf" + lines(CHOICE) + b"\n  \n" + lines(four), "s")
    assert (suite.kind, len(suite.examples), suite.chance) == ("choice", 2, 0.375)
    more = {"prompt": "3 + 1 =", "answer": [" four", "4 "], "stop": ".", "max_tokens": 4}
    suite = read_suite(lines(EXACT, more), "s")
    assert (suite.kind, suite.chance) == ("exact", 0.0)
    assert suite.examples[1].answers == {"four", "4"}


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (b"{broken\n", "s line 2: JSON is malformed"),
        (b"\xff\n", "s line 2: "),
        (b"[" * 100_000, "s line 2: "),
        (lines({**CHOICE, "answer": 2}), "s line 2: answer 2 is not one of its choices"),
        (lines({**CHOICE, "answer": -1}), "s line 2: answer -1 is not one of its choices"),
        (lines({**CHOICE, "choices": ["one"]}), "s line 2: a number as answer needs at least two"),
        (lines({**CHOICE, "choices": ["a", "a"]}), "s line 2: two of its choices are the same"),
        (lines({**CHOICE, "choices": ["a", " "]}), "s line 2: an answer is empty"),
        (lines({**CHOICE, "answer": " blue"}), "s line 2: answer must be the number of a choice"),
        (lines({**CHOICE, "answer": True}), "s line 2 answer: expected"),
        (lines({"prompt": "x", "answer": "  "}), "s line 2: an answer is empty"),
        (lines({"prompt": "x", "answer": []}), "s line 2 answer: expected"),
        (lines({"prompt": "x"}), 's line 2: "answer" is missing'),
        (lines({**CHOICE, "hint": 1}), 's line 2: nothing here is called "hint"'),
        (lines({**EXACT, "max_tokens": 257}), "s line 2 max_tokens: expected"),
        (lines(CHOICE), "s line 2 says the same as line 1"),
        (lines(EXACT), "s line 2: the lines before have choices and this one has an answer to"),
        (lines({**CHOICE, "choices": [*map(str, range(CHOICES_MAX + 1))]}), "s line 2 choices:"),
        (lines({**CHOICE, "prompt": "é" * PROMPT_BYTES_MAX}), "s line 2: its prompt has more"),
        (lines({**CHOICE, "choices": ["a", "é" * ANSWER_BYTES_MAX]}), "s line 2: an answer has"),
    ],
)
def test_a_bad_line_is_named(wrong: bytes, sentence: str) -> None:
    with pytest.raises(InvalidRunFile) as caught:
        read_suite(lines(CHOICE) + wrong, "s")
    assert caught.value.message.startswith(sentence)


def test_a_suite_has_bounds() -> None:
    many = lines(*({**EXACT, "prompt": str(n)} for n in range(EXAMPLES_MAX + 1)))
    with pytest.raises(InvalidRunFile, match=f"line {EXAMPLES_MAX + 1}: a suite has at most 2,000"):
        read_suite(many, "s")
    with pytest.raises(InvalidRunFile, match="at most 4 MiB"):
        read_suite(b" " * (BYTES_MAX + 1), "s")
    with pytest.raises(InvalidRunFile, match="holds no example"):
        read_suite(b"\n\n", "s")


def test_what_is_stored_is_the_file_itself(tmp_path: Path) -> None:
    path, stored = tmp_path / "sky.jsonl", list[bytes]()
    path.write_bytes(lines(CHOICE))

    def put(data: bytes) -> str:
        stored.append(data)
        return hashlib.sha256(data).hexdigest()

    manifest = build_suite("sky", (path,), put, licence="MIT")
    assert stored == [path.read_bytes()]
    assert (manifest.kind, manifest.chunks, manifest.licence) == ("suite", (), "MIT")
    assert manifest.heldout[0].sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    for sources in ((path, path), (tmp_path,), ()):
        with pytest.raises(InvalidRunFile, match="one file"):
            build_suite("sky", sources, put)
