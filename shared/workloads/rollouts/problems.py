"""Problems: a prompt, and the verifier that rewards its answers.

A problem is a line of a file or is drawn by a seed. Drawn problems of the training and of the
held-out part are never the same: a hash of the prompt says which part one belongs to.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from shared.decoding import complaint, decoder
from shared.errors import InvalidRunFile, why
from shared.nearest import hint
from shared.text_file import unmarked
from shared.workloads.base import ChunkRef, DatasetManifest
from shared.workloads.data.pass_order import permutation
from shared.workloads.data.tokenizer import Put
from shared.workloads.rollouts.verifiers import ANSWER_CHARS_MAX, final, verifier

KIND = "problems"  # of a dataset of them
LINE_BYTES_MAX = 64 << 10
PROBLEMS_MAX = 1_000_000
CHUNK = 1024  # problems
HELDOUT_OF = 8  # of so many drawn problems one is held out


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One problem."""

    prompt: str
    verifier: str
    arguments: dict[str, Any]


class _Line(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Line of a file; `answer` is an argument of the verifier, which it also names: a number or a
    text that is to be written exactly.
    """

    prompt: Annotated[str, Meta(min_length=1, max_length=32 << 10)]
    verifier: Annotated[str, Meta(max_length=64)] = ""
    arguments: dict[str, Any] = {}
    answer: Any = UNSET


def reward(problem: Problem, answer: str) -> float:
    """Return the reward of a whole answer as text, 0 ... 1. Never raises; a
    longer one than `ANSWER_CHARS_MAX` is worth nothing.
    """
    if len(answer) > ANSWER_CHARS_MAX:
        return 0.0
    judge = verifier(problem.verifier, problem.arguments, "the problem")
    return min(1.0, max(0.0, float(judge.reward(final(answer)))))


def read_problem(line: bytes, place: str) -> Problem:
    """Read a line of a file of problems. Raises InvalidRunFile with its place."""
    if len(line) > LINE_BYTES_MAX:
        raise InvalidRunFile(f"{place}: a problem has at most {LINE_BYTES_MAX >> 10} KiB")
    try:
        found = decoder(_Line).decode(line)
    except msgspec.ValidationError as error:
        raise InvalidRunFile(complaint(error, place)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRunFile(f"{place}: {error}") from error
    given = isinstance(found.answer, UnsetType)
    if given and not found.arguments:
        raise InvalidRunFile(f"{place}: the problem has no answer")
    arguments = found.arguments if given else {**found.arguments, "answer": found.answer}
    plain = isinstance(found.answer, int | float) and not isinstance(found.answer, bool)
    name = found.verifier or ("number" if plain else "exact")
    verifier(name, arguments, place)
    return Problem(prompt=found.prompt, verifier=name, arguments=arguments)


def read_problems(data: bytes, name: str) -> list[Problem]:
    """Read the bytes of a file of problems. Raises InvalidRunFile with `name` and line."""
    found: list[Problem] = []
    for number, line in enumerate(unmarked(data).split(b"\n"), 1):
        if line.strip():
            found.append(read_problem(line, f"{name} line {number}"))
        if len(found) > PROBLEMS_MAX:
            raise InvalidRunFile(f"{name}: a file has at most {PROBLEMS_MAX:,} problems")
    if not found:
        raise InvalidRunFile(f"{name} holds no problem")
    return found


def check_lengths(
    problems: Sequence[Problem], encode: Callable[[str], Sequence[int]], context: int, room: int
) -> None:
    """Raise InvalidRunFile for the first prompt that leaves no `room` for an answer, in tokens."""
    for number, each in enumerate(problems, 1):
        if (tokens := len(encode(each.prompt))) + room > context:
            raise InvalidRunFile(
                f"problem {number} has a prompt of {tokens:,} tokens, and the model reads"
                f" {context:,}, of which {room:,} are for the answer"
            )


def build_problems(
    name: str,
    sources: Sequence[Path],
    put: Put,
    *,
    licence: str = "unknown",
    source: str = "",
    heldout_share: float = 0.05,
) -> DatasetManifest:
    """Store the problems of files, shuffled, in chunks of JSON lines. Raises InvalidRunFile."""
    found: dict[bytes, Problem] = {}
    for path in sources:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise InvalidRunFile(f"{path}: {why(error)}") from error
        found |= {msgspec.json.encode(each): each for each in read_problems(data, str(path))}
    lines = list(found)
    if len(lines) < 2:
        raise InvalidRunFile("a dataset needs at least two different problems: one is held out")
    order = permutation(len(lines), 0, 1)
    held = min(len(lines) - 1, max(1, round(heldout_share * len(lines))))
    return DatasetManifest(
        name=name,
        kind=KIND,
        licence=licence,
        source=source,
        chunks=_stored([lines[at] for at in order[held:]], put),
        heldout=_stored([lines[at] for at in order[:held]], put),
        meta={"problems": len(lines) - held},
    )


def _stored(lines: Sequence[bytes], put: Put) -> tuple[ChunkRef, ...]:
    parts = [lines[at : at + CHUNK] for at in range(0, len(lines), CHUNK)]
    blobs = [(b"\n".join(part), len(part)) for part in parts]
    return tuple(ChunkRef(sha256=put(data), size=len(data), items=n) for data, n in blobs)


def drawn(kind: str, seed: int, number: int, size: int, *, heldout: bool = False) -> Problem:
    """Return problem `number` that a generator draws with a seed; see `GENERATORS` for `size`.
    Raises InvalidRunFile.
    """
    if kind not in GENERATORS:
        raise InvalidRunFile(f'there is no generator "{kind[:64]}": {hint(kind, GENERATORS)}')
    draw, (least, most) = GENERATORS[kind]
    if not least <= size <= most:
        raise InvalidRunFile(f"the size of {kind} lies between {least} and {most}, not {size}")
    dice = random.Random(sha256(b"problem %d %d" % (seed, number)).digest())
    while True:
        found = draw(dice, size)
        if (sha256(found.prompt.encode()).digest()[0] % HELDOUT_OF == 0) == heldout:
            return found


def _arithmetic(dice: random.Random, digits: int) -> Problem:
    one, other = (dice.randrange(10 ** (digits - 1), 10**digits) for _ in range(2))
    sign = dice.choice("+-")
    value = one + other if sign == "+" else one - other
    return Problem(prompt=f"{one}{sign}{other}=", verifier="number", arguments={"answer": value})


def _sorting(dice: random.Random, longest: int) -> Problem:
    items = [dice.randrange(10) for _ in range(dice.randint(3, longest))]
    prompt = f"sort {''.join(map(str, items))}:"
    return Problem(prompt=prompt, verifier="sorted", arguments={"items": items})


def _countdown(dice: random.Random, count: int) -> Problem:
    numbers = [dice.randrange(1, 26) for _ in range(count)]
    target = numbers[0]
    for each in numbers[1:]:
        target = dice.choice((target + each, abs(target - each), target * each))
    dice.shuffle(numbers)
    return Problem(
        prompt=f"make {target} of {' '.join(map(str, numbers))}:",
        verifier="countdown",
        arguments={"target": target, "numbers": numbers},
    )


_Draw = Callable[[random.Random, int], Problem]
GENERATORS: Mapping[str, tuple[_Draw, tuple[int, int]]] = {
    "arithmetic": (_arithmetic, (2, 9)),  # digits of the two numbers
    "sorting": (_sorting, (3, 64)),  # most digits, of at least three
    "countdown": (_countdown, (2, 6)),  # numbers
}
