"""Dataset of problems: JSON lines of an organiser, checked, and stored as two blobs.

A line is `{"prompt", "verifier", "arguments"}`. The argument `answer` can also be a key of a line.
If a line names no `verifier`, `number` checks an answer that is a number, `exact` a text. One blob
has the problems that are learnt from, the other the held-out problems.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from shared.decoding import decoded_line
from shared.errors import InvalidRunFile, why
from shared.files.text_file import unmarked
from shared.workloads.base import ChunkRef, DatasetManifest, DatasetWanted
from shared.workloads.data.jsonl_zst import pack, unpack
from shared.workloads.data.pass_order import permutation
from shared.workloads.data.tokenizer import Put
from shared.workloads.rollouts.problems import Problem, decoded, encoded, reward, solution
from shared.workloads.rollouts.verifiers import verifier

KIND = "problems"
BYTES_MAX = 64 << 20
PROBLEMS_MAX = 100_000


class _Line(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Line of a file of problems."""

    prompt: Annotated[str, Meta(min_length=1, max_length=32 << 10)]
    verifier: Annotated[str, Meta(max_length=64)] = ""
    arguments: dict[str, Any] = {}
    answer: Any = UNSET


def build(wanted: DatasetWanted, put: Put) -> DatasetManifest:
    """Store the problems of files, shuffled, and return their manifest. Raises InvalidRunFile."""
    if not 0 < wanted.heldout_share < 1:
        raise InvalidRunFile(f"heldout_share {wanted.heldout_share} must lie between 0 and 1")
    found: dict[str, tuple[Problem, str]] = {}  # by prompt, with the place
    for path in wanted.sources:
        for place, line in _lines(path):
            problem = _read(line, place)
            if problem.prompt in found:
                raise InvalidRunFile(f"{place} has the prompt of {found[problem.prompt][1]}")
            found[problem.prompt] = problem, place
    if not 2 <= len(found) <= PROBLEMS_MAX:
        raise InvalidRunFile(
            f"a dataset has 2 to {PROBLEMS_MAX:,} problems, of which one is held out, not"
            f" {len(found):,}"
        )
    every = list(found.values())
    order = permutation(len(every), wanted.seed, 1)
    held = min(len(every) - 1, max(1, round(wanted.heldout_share * len(every))))
    known = [solution(problem) for problem, _ in every]
    longest, place = max(every, key=lambda each: len(encoded(each[0].prompt)))
    return DatasetManifest(
        name=wanted.name,
        licence=wanted.licence,
        source=wanted.source,
        kind=KIND,
        chunks=(_stored([every[at][0] for at in order[held:]], put),),
        heldout=(_stored([every[at][0] for at in order[:held]], put),),
        meta={
            "prompt_bytes": len(encoded(longest.prompt)),
            "prompt_place": place,
            "answer_bytes": max(len(encoded(each or "")) for each in known),
            "without_solution": known.count(None),
        },
    )


@lru_cache(maxsize=4)
def stored(path: Path) -> tuple[Problem, ...]:
    """Return the problems of a blob, cached by its path, which has its hash. Raises BadRequest."""
    return tuple(unpack(path.read_bytes(), Problem, BYTES_MAX, PROBLEMS_MAX))


def _stored(problems: Sequence[Problem], put: Put) -> ChunkRef:
    if sum(len(msgspec.json.encode(each)) + 1 for each in problems) > BYTES_MAX:
        raise InvalidRunFile(
            f"a part of a dataset has at most {BYTES_MAX >> 20} MiB of problems: leave some out"
        )
    data = pack(problems)
    return ChunkRef(sha256=put(data), size=len(data), items=len(problems))


def _lines(path: Path) -> list[tuple[str, bytes]]:
    """Return the lines of a file that are not empty, with their places."""
    try:
        with path.open("rb") as file:
            data = file.read(BYTES_MAX + 1)
    except OSError as error:
        raise InvalidRunFile(f"{path}: {why(error)}") from error
    if len(data) > BYTES_MAX:
        raise InvalidRunFile(f"{path}: a file of problems has at most {BYTES_MAX >> 20} MiB")
    lines = enumerate(unmarked(data).split(b"\n"), 1)
    return [(f"{path.name} line {number}", line) for number, line in lines if line.strip()]


def _read(line: bytes, place: str) -> Problem:
    found = decoded_line(line, _Line, place)
    bare = not isinstance(found.answer, UnsetType)
    if not (bare or found.arguments or found.verifier):
        raise InvalidRunFile(f"{place}: the problem has no answer")
    arguments = {**found.arguments, "answer": found.answer} if bare else found.arguments
    plain = isinstance(found.answer, int | float) and not isinstance(found.answer, bool)
    name = found.verifier or ("number" if plain else "exact")
    verifier(name, arguments, place)
    problem = Problem(prompt=found.prompt, verifier=name, arguments=arguments)
    if not encoded(problem.prompt):
        raise InvalidRunFile(f"{place}: the prompt has no text")
    known = solution(problem)
    close = bool(arguments.get("tolerance"))  # a verifier with a tolerance may round
    if known is not None and not close and reward(problem, decoded(encoded(known))) < 1:
        raise InvalidRunFile(
            f'{place}: the verifier {name} does not accept the answer "{known[:64]}": write it as'
            " the verifier reads it"
        )
    return problem
