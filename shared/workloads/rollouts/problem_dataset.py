"""Dataset of problems: records of an organiser, checked, and stored as two blobs.

A record has a prompt (`prompt`, `question` or `problem`: a text, or turns of a dialogue, with
`system` before them) and an answer or the arguments of a verifier, or several such `rewards`, each
with its `weight`. An answer that is a number is judged by the verifier `number`, any other answer
by `exact`. Of a `solution`, which may end with `####` and the final answer as in GSM8K, only the
final answer counts. With the tokenizer of a model, prompts are written by its chat template. One
blob has the problems that are learnt from, the other the held-out problems.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from shared.decoding import complaint, convert, decode
from shared.errors import InvalidRunFile
from shared.settings import check_keys
from shared.text import escaped, printable
from shared.workloads.base import ChunkRef, DatasetManifest, DatasetWanted
from shared.workloads.data.chat_template import (
    NO_TOKENIZER,
    TEMPLATE,
    ChatTemplate,
    DialogueTurn,
    answer_end,
)
from shared.workloads.data.dialogue_forms import read_turns
from shared.workloads.data.jsonl_zst import pack, unpack
from shared.workloads.data.pass_order import permutation
from shared.workloads.data.record_files import Record, records
from shared.workloads.data.skipped_files import Skipped
from shared.workloads.data.tokenizer import (
    Put,
    beginning,
    end_of_text,
    load_tokenizer,
    vocab_of,
)
from shared.workloads.rollouts.problems import (
    Problem,
    Reward,
    decoded,
    encoded,
    reward,
    solution,
)
from shared.workloads.rollouts.quantities import quantity
from shared.workloads.rollouts.verifiers import final, last_line, verifier

if TYPE_CHECKING:
    from tokenizers import Tokenizer

KIND = "problems"
BYTES_MAX = 64 << 20
PROBLEMS_MAX = 100_000
PROMPTS = ("prompt", "question", "problem")
ANSWERS = ("answer", "solution")
SINGLE = (*ANSWERS, "verifier", "arguments", "place")  # keys of a problem's only reward
REWARDS = "rewards"
FIELDS = frozenset({*PROMPTS, *SINGLE, "system", "system_prompt", REWARDS})
REWARDS_MAX = 16
_TABLES = (".csv", ".tsv")  # files whose numbers are texts
_UNREAD_SHOWN = 8

Words = Annotated[str, Meta(min_length=1, max_length=32 << 10)]


class _Line(msgspec.Struct, frozen=True, kw_only=True):
    """Record of a problem, with each field under the first of its accepted names."""

    prompt: Words | Annotated[list[Any], Meta(min_length=1, max_length=64)]
    system: Annotated[str, Meta(max_length=32 << 10)] = ""
    rewards: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=REWARDS_MAX)]


class _RewardLine(msgspec.Struct, frozen=True, kw_only=True):
    """Reward of a record, with each field under the first of its accepted names."""

    verifier: Annotated[str, Meta(max_length=64)] = ""
    arguments: dict[str, Any] = {}
    answer: Any = UNSET
    place: Annotated[str, Meta(max_length=64)] = ""
    weight: Annotated[float, Meta(gt=0, le=1000)] = 1.0


class PromptWriter:
    """Writes prompts as a model reads them: by the chat template of its tokenizer, if there is one,
    or as plain text.
    """

    def __init__(self, request: DatasetWanted) -> None:
        """Read the tokenizer and the template of a build. Raises InvalidRunFile."""
        self.blob = request.tokenizer
        self.template = decode(request.template, ChatTemplate) if request.template else None
        self.tokenizer: Tokenizer | None = None
        self._begin: list[int] = []
        if self.blob is not None:
            self.tokenizer = load_tokenizer(self.blob)
            self._begin = beginning(self.tokenizer)
            self.tokenizer.encode_special_tokens = self.template is None

    def text(self, turns: Sequence[DialogueTurn]) -> str:
        """Return the text of a prompt. Raises InvalidRunFile without a template, and for turns that
        the template refuses.
        """
        if self.template is None:
            raise InvalidRunFile(NO_TOKENIZER)
        if turns[0].role == "system" and "system" not in self.template.supported:
            raise InvalidRunFile("it has a system turn, for which the chat template has no place")
        return self.template.prompt_text(turns)

    def size(self, prompt: str) -> int:
        """Return the number of tokens of a prompt; without a tokenizer, of its bytes."""
        if self.tokenizer is None:
            return len(encoded(prompt))
        begin = [] if self.template is not None else self._begin
        return len(begin) + self.continuation_size(prompt)

    def continuation_size(self, text: str) -> int:
        """Return the number of tokens of an answer; without a tokenizer, of its bytes."""
        if self.tokenizer is None:
            return len(encoded(text))
        return len(self.tokenizer.encode(text, add_special_tokens=False).ids)

    @property
    def end(self) -> int | None:
        """Return the token that ends an answer; None if the tokenizer has no such token."""
        if self.tokenizer is None:
            return None
        written = answer_end(self.tokenizer, self.template) if self.template is not None else None
        if written is not None:
            token: int | None = self.tokenizer.token_to_id(written)
            return token
        return end_of_text(self.tokenizer)

    def assets(self, put: Put) -> dict[str, ChunkRef]:
        """Store the tokenizer and its template; return them by asset name, {} without a
        tokenizer.
        """
        blobs: dict[str, tuple[bytes, int]] = {}
        if self.blob is not None and self.tokenizer is not None:
            blobs["tokenizer"] = self.blob, vocab_of(self.tokenizer)
        if self.template is not None:
            blobs[TEMPLATE] = msgspec.json.encode(self.template), 1
        return {
            name: ChunkRef(sha256=put(blob), size=len(blob), items=items)
            for name, (blob, items) in blobs.items()
        }

    @property
    def meta(self) -> dict[str, str | int | float]:
        """Return the fields for the manifest of a dataset."""
        fields: dict[str, str | int | float] = {}
        if self.tokenizer is not None:
            fields["vocab_size"] = vocab_of(self.tokenizer)
        if self.end is not None:
            fields["end"] = self.end
        frame = self.template.frame() if self.template is not None else None
        return {**fields, **(frame.meta if frame is not None else {})}


def build(request: DatasetWanted, put: Put) -> DatasetManifest:
    """Store the problems of files, shuffled, and return their manifest. Raises InvalidRunFile."""
    writer, unread = PromptWriter(request), Counter[str]()
    by_prompt: dict[str, tuple[Problem, str]] = {}  # prompt -> problem, its place
    for path in request.sources:
        for record in _records(path):
            problem = _read(record, path, writer, unread)
            if problem.prompt in by_prompt:
                raise InvalidRunFile(
                    f"{record.place} has the prompt of {by_prompt[problem.prompt][1]}"
                )
            by_prompt[problem.prompt] = problem, record.place
    if not 2 <= len(by_prompt) <= PROBLEMS_MAX:
        raise InvalidRunFile(
            f"a dataset has 2 to {PROBLEMS_MAX:,} problems, of which one is held out, not"
            f" {len(by_prompt):,}"
        )
    problems = list(by_prompt.values())
    order = permutation(len(problems), request.seed, 1)
    heldout_count = min(len(problems) - 1, max(1, round(request.heldout_share * len(problems))))
    solutions = [solution(problem) for problem, _ in problems]
    sizes = [writer.size(problem.prompt) for problem, _ in problems]
    longest = max(range(len(problems)), key=sizes.__getitem__)
    meta: dict[str, str | int | float] = {
        "prompt_size": sizes[longest],
        "prompt_place": problems[longest][1],
        "answer_size": max(writer.continuation_size(text or "") for text in solutions),
        "without_solution": solutions.count(None),
        **writer.meta,
    }
    if unread:
        names = [printable(key, 40) for key, _ in unread.most_common(_UNREAD_SHOWN)]
        meta["found"] = f"keys that were not read: {', '.join(names)}"
    return DatasetManifest(
        name=request.name,
        licence=request.licence,
        source=request.source,
        kind=KIND,
        chunks=(_stored([problems[at][0] for at in order[heldout_count:]], put),),
        heldout=(_stored([problems[at][0] for at in order[:heldout_count]], put),),
        assets=writer.assets(put),
        meta=meta,
    )


@lru_cache(maxsize=4)
def stored(path: Path) -> tuple[Problem, ...]:
    """Return the problems of a blob, cached by its path, which has its hash. Raises BadRequest."""
    return tuple(unpack(path.read_bytes(), Problem, BYTES_MAX, PROBLEMS_MAX))


def _stored(problems: Sequence[Problem], put: Put) -> ChunkRef:
    if sum(len(msgspec.json.encode(problem)) + 1 for problem in problems) > BYTES_MAX:
        raise InvalidRunFile(
            f"a part of a dataset has at most {BYTES_MAX >> 20} MiB of problems: leave some out"
        )
    data = pack(problems)
    return ChunkRef(sha256=put(data), size=len(data), items=len(problems))


def _records(path: Path) -> Iterator[Record]:
    """Yield the records of a file. Raises InvalidRunFile for a malformed record."""
    skipped = Skipped()
    for record in records(path, FIELDS, skipped, path.name):
        if skipped.sentences:
            break
        yield record
    if skipped.sentences:
        raise InvalidRunFile(skipped.sentences[0])


def _read(record: Record, path: Path, writer: PromptWriter, unread: Counter[str]) -> Problem:
    """Return the problem of a record. Raises InvalidRunFile, with the record's place."""
    line, place = _line(record), record.place
    unread.update(key for key in record.fields if key not in FIELDS)
    try:
        prompt = _prompt(line, writer, unread)
    except InvalidRunFile as error:
        raise InvalidRunFile(f"{place}: {error.message}") from error
    if not encoded(prompt):
        raise InvalidRunFile(f"{place}: the prompt has no text")
    published = "prompt" not in record.fields or path.suffix.lower() in _TABLES
    several = record.fields.get(REWARDS) is not None
    rewards = [
        _reward(table, f"{place}, reward {number}", published=published)
        if several
        else _reward(table, place, published=published)
        for number, table in enumerate(line.rewards, 1)
    ]
    return Problem(prompt=prompt, rewards=tuple(rewards))


def _reward(table: Mapping[str, Any], place: str, *, published: bool) -> Reward:
    """Return a reward whose verifier accepts its own answer. Raises InvalidRunFile, with `place`."""
    line = _reward_line(table, place)
    arguments, name = _arguments(line, place, published=published)
    verifier(name, arguments, place)
    part = Reward(verifier=name, arguments=arguments, place=line.place, weight=line.weight)
    alone = Problem(prompt="", rewards=(part,))
    answer = solution(alone)
    close = bool(arguments.get("tolerance"))  # a verifier with a tolerance may round
    if answer is not None and not close and reward(alone, decoded(encoded(answer))) < 1:
        raise InvalidRunFile(
            f'{place}: the verifier {name} does not accept the answer "{answer[:64]}": write it as'
            " the verifier reads it"
        )
    return part


def _reward_line(table: Mapping[str, Any], place: str) -> _RewardLine:
    """Return a reward with each field under the first of its accepted names. Raises InvalidRunFile,
    with `place`.
    """
    keys = {*SINGLE, *_RewardLine.__struct_fields__}
    check_keys(table, keys, place)
    row = {key: value for key, value in table.items() if value is not None}
    answers = [row.pop(key) for key in ANSWERS if key in row]
    if answers:
        row["answer"] = answers[0]
    try:
        return convert(row, _RewardLine)
    except msgspec.ValidationError as error:
        raise InvalidRunFile(complaint(error, place)) from error


def _prompt(line: _Line, writer: PromptWriter, unread: Counter[str]) -> str:
    """Return the text of a prompt. Raises InvalidRunFile."""
    if isinstance(line.prompt, str):
        if writer.template is None and not line.system:
            return line.prompt
        turns = [DialogueTurn("user", line.prompt)]
    else:
        ignored: set[str] = set()
        turns = read_turns(line.prompt, ignored)
        unread.update(ignored)
    if line.system:
        turns = [DialogueTurn("system", line.system), *turns]
    if turns[-1].role == "assistant":
        raise InvalidRunFile("its prompt ends with an answer of the assistant")
    return writer.text(turns)


def _line(record: Record) -> _Line:
    """Return a record with each field under its first accepted name. Raises InvalidRunFile."""
    fields: Mapping[str, Any] = {
        key: value for key, value in record.fields.items() if value is not None
    }
    prompt_key = next((key for key in PROMPTS if key in fields), None)
    if prompt_key is None:
        keys = ", ".join(f'"{escaped(key, 40)}"' for key in sorted(fields)[:8]) or "none"
        raise InvalidRunFile(
            f"{record.place}: the problem has no prompt: its keys are {keys}, and what is looked"
            f" for is {', '.join(PROMPTS)}"
        )
    single = {key: fields[key] for key in SINGLE if key in fields}
    row = {"prompt": fields[prompt_key], REWARDS: fields.get(REWARDS, [single])}
    if single and REWARDS in fields:
        raise InvalidRunFile(
            f"{record.place}: beside rewards it has {next(iter(single))}: write that into one of"
            " them"
        )
    if system := fields.get("system") or fields.get("system_prompt"):
        row |= {"system": system}
    try:
        return convert(row, _Line)
    except msgspec.ValidationError as error:
        raise InvalidRunFile(complaint(error, record.place)) from error


def _arguments(line: _RewardLine, place: str, *, published: bool) -> tuple[dict[str, Any], str]:
    """Return the arguments of a reward, and its verifier. Raises InvalidRunFile, with `place`."""
    if isinstance(line.answer, UnsetType):
        if not (line.arguments or line.verifier):
            raise InvalidRunFile(f"{place}: the problem has no answer")
        return line.arguments, line.verifier or (
            "number" if _plain(line.arguments.get("answer")) else "exact"
        )
    answer = line.answer
    if isinstance(answer, str) and published and not line.verifier:
        answer = last_line(final(answer))
        if quantity(answer) is not None:
            return {**line.arguments, "answer": answer}, "number"
    arguments = {**line.arguments, "answer": answer}
    return arguments, line.verifier or ("number" if _plain(line.answer) else "exact")


def _plain(answer: object) -> bool:
    return isinstance(answer, int | float) and not isinstance(answer, bool)
