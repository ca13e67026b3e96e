"""Task suite: examples as JSON lines that measure a language model.

A line is multiple choice, `{"prompt", "choices": [...], "answer": 0}`, where the model's likeliest
choice counts, or `{"prompt", "answer": "4"}` (or a list of correct answers), which the model writes
itself, up to `stop` (default: a line's end) or `max_tokens` (default: 32). All lines of a suite are
of one kind. A bad line is an error: without the line, scores could not be compared.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shared.decoding import decode_line
from shared.errors import InvalidRunFile, why
from shared.files.text_file import unmarked
from shared.workloads.base import ChunkRef, DatasetManifest
from shared.workloads.data.tokenizer import Put

KIND = "suite"  # kind of a dataset that is a suite
BYTES_MAX = 4 << 20
EXAMPLES_MAX = 2000
CHOICES_MAX = 16
PROMPT_BYTES_MAX = 16 << 10
ANSWER_BYTES_MAX = 512  # bytes of an answer or a choice
TOKENS_MAX = 256

Kind = Literal["choice", "exact"]
Text = Annotated[str, Meta(min_length=1, max_length=ANSWER_BYTES_MAX)]


class Example(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of a suite. `answer` is the index of the right choice, or one or several right
    texts.
    """

    prompt: Annotated[str, Meta(max_length=PROMPT_BYTES_MAX)]
    answer: int | Text | Annotated[tuple[Text, ...], Meta(min_length=1, max_length=CHOICES_MAX)]
    choices: Annotated[tuple[Text, ...], Meta(max_length=CHOICES_MAX)] = ()
    stop: Text = "\n"
    max_tokens: Annotated[int, Meta(ge=1, le=TOKENS_MAX)] = 32

    @property
    def kind(self) -> Kind:
        return "choice" if isinstance(self.answer, int) else "exact"

    @property
    def answers(self) -> frozenset[str]:
        """Return the correct texts, without surrounding white space."""
        answers = self.answer if isinstance(self.answer, tuple) else (str(self.answer),)
        return frozenset(answer.strip() for answer in answers)


class Suite(msgspec.Struct, frozen=True, kw_only=True):
    """All examples of a suite."""

    kind: Kind
    examples: tuple[Example, ...]

    @property
    def chance(self) -> float:
        """Return the share of correct answers by guessing: 0 for written answers."""
        if self.kind == "exact":
            return 0.0
        return sum(1 / len(example.choices) for example in self.examples) / len(self.examples)


def read_suite(data: bytes, name: str) -> Suite:
    """Read a suite from the bytes of its file. Raises InvalidRunFile with `name` in its text."""
    if len(data) > BYTES_MAX:
        raise InvalidRunFile(f"{name}: a suite has at most {BYTES_MAX >> 20} MiB")
    examples: list[Example] = []
    lines: dict[Example, int] = {}
    for number, line in enumerate(unmarked(data).split(b"\n"), 1):
        if not line.strip():
            continue
        place = f"{name} line {number}"
        if len(examples) == EXAMPLES_MAX:
            raise InvalidRunFile(f"{place}: a suite has at most {EXAMPLES_MAX:,} examples")
        example = _example(line, place)
        if example in lines:
            raise InvalidRunFile(f"{place} says the same as line {lines[example]}")
        if examples and example.kind != examples[0].kind:
            raise InvalidRunFile(
                f"{place}: the lines before have {_KINDS[examples[0].kind]} and this one has "
                f"{_KINDS[example.kind]}: make two suites of them"
            )
        lines[example] = number
        examples.append(example)
    if not examples:
        raise InvalidRunFile(f"{name} holds no example")
    return Suite(kind=examples[0].kind, examples=tuple(examples))


_KINDS = {"choice": "choices", "exact": "an answer to write"}


def _example(line: bytes, place: str) -> Example:
    example = decode_line(line, Example, place)
    answer = example.answer
    choice = isinstance(answer, int)
    texts = (*example.choices, *(() if isinstance(answer, int) else example.answers))
    rules = (
        (bool(example.choices) <= choice, "answer must be the number of a choice, counted from 0"),
        (choice <= (len(example.choices) > 1), "a number as answer needs at least two choices"),
        (
            not isinstance(answer, int) or 0 <= answer < len(example.choices),
            f"answer {answer} is not one of its choices, 0 to {len(example.choices) - 1}",
        ),
        (len(set(example.choices)) == len(example.choices), "two of its choices are the same"),
        (all(text.strip() for text in texts), "an answer is empty"),
        (
            len(example.prompt.encode()) <= PROMPT_BYTES_MAX,
            f"its prompt has more than {PROMPT_BYTES_MAX >> 10} KiB",
        ),
        (
            all(len(text.encode()) <= ANSWER_BYTES_MAX for text in texts),
            f"an answer has more than {ANSWER_BYTES_MAX} bytes",
        ),
    )
    for holds, sentence in rules:
        if not holds:
            raise InvalidRunFile(f"{place}: {sentence}")
    return example


def build_suite(
    name: str, sources: tuple[Path, ...], put: Put, *, licence: str = "unknown", source: str = ""
) -> DatasetManifest:
    """Store a suite's file unchanged, held out; return its manifest. Raises InvalidRunFile."""
    if len(sources) != 1 or not sources[0].is_file():
        raise InvalidRunFile("a suite is one file of JSON lines")
    try:
        with sources[0].open("rb") as file:
            data = file.read(BYTES_MAX + 1)
    except OSError as error:
        raise InvalidRunFile(f"{sources[0]}: {why(error)}") from error
    suite = read_suite(data, str(sources[0]))
    count = len(suite.examples)
    return DatasetManifest(
        name=name,
        kind=KIND,
        licence=licence,
        source=source,
        chunks=(),
        heldout=(ChunkRef(sha256=put(data), size=len(data), items=count),),
        meta={
            "examples": count,
            "answered_by": suite.kind,
            "chance": round(suite.chance, 6),
            "sha256": hashlib.sha256(data).hexdigest(),
        },
    )
