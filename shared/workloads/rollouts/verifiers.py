r"""Verifiers: pure functions from an answer's text to a reward between 0 and 1.

A verifier is a struct whose fields are its arguments. A problem may name only the verifiers of this
module and of installed packages, found by the entry point group `volunteer.verifiers`. A problem
carries no code and no regular expression. An answer is hostile text, so each verifier reads at most
`ANSWER_CHARS_MAX` characters, in time proportional to them.

The final answer stands at the last place for it: in `\boxed{}`, between `<answer>` and `</answer>`,
after `####`, after "answer:" or "answer is", or at a place that the problem names. A text without
such a place is its own final answer; a text without the place that its problem names has no final
answer.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import suppress
from fractions import Fraction
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any, ClassVar, Literal
from unicodedata import normalize

import msgspec
from msgspec import Meta
from typing_extensions import override

from shared.decoding import MALFORMED, convert, decode
from shared.errors import InvalidRunFile
from shared.nearest_name import hint
from shared.settings import check_values, read_table
from shared.workloads.rollouts.quantities import Quantity, quantity

ENTRY_POINTS = "volunteer.verifiers"
ANSWER_CHARS_MAX = 128 << 10
DIGITS_MAX = 18  # digits of a number in an answer
TERMS_MAX = 128  # terms of an arithmetic expression
DEPTH_MAX = 16  # depth of brackets

_MARK = re.compile(
    r"\\boxed\s{0,4}\{|<answer>|####|\banswer\s{0,4}(?::|is\b\s{0,4}:?)", re.IGNORECASE
)
_FENCE = re.compile(r"```[a-z]{0,8}\s*\n(.*?)\n?\s*```", re.DOTALL)
_LETTER = re.compile(r"[\s(\[*\"']{0,8}([A-Z])(?=[)\].:*\"']|\s*$)")
_SPLIT = re.compile(r"[\s,;]+")
_TERM = re.compile(r"\s*(?:([0-9]+(?:\.[0-9]+)?)|([-+*/()]))")
_SIGNS = str.maketrans({"\u2212": "-", "\u00d7": "*", "\u00b7": "*", "\u00f7": "/"})

Amount = Annotated[float, Meta(ge=-1e15, le=1e15)]
Text = Annotated[str, Meta(min_length=1, max_length=4096)]
Word = Annotated[str, Meta(pattern=r"^[^\s,;\[\]]{1,64}$")]


class Verifier(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of a verifier's arguments."""

    whole: ClassVar[bool] = False  # True: `reward` gets the whole text

    def reward(self, answer: str) -> float:
        """Return the reward of a final answer, 0 ... 1. Never raises."""
        raise NotImplementedError


class Number(Verifier, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An answer is the expected number, exactly or within a tolerance, however it is written."""

    answer: Amount | Text
    tolerance: Annotated[float, Meta(ge=0, le=1e15)] = 0.0

    def __post_init__(self) -> None:
        if self.expected is None:
            raise InvalidRunFile(f"the answer {str(self.answer)[:64]!r} is not a number")

    @property
    def expected(self) -> Quantity | None:
        if isinstance(self.answer, str):
            return quantity(self.answer)
        return Quantity(_exactly(self.answer))

    @override
    def reward(self, answer: str) -> float:
        expected, written = self.expected, quantity(last_line(answer))
        if expected is None or written is None:
            return 0.0
        return float(written.matches(expected, Fraction(self.tolerance)))


class Exact(Verifier, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An answer is one of the right texts; white space, a full stop and marks around it aside."""

    answer: Text | Annotated[tuple[Text, ...], Meta(min_length=1, max_length=64)]

    @override
    def reward(self, answer: str) -> float:
        right = (self.answer,) if isinstance(self.answer, str) else self.answer
        return float(_bare(answer) in {_bare(text) for text in right})


class Choice(Verifier, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An answer's last line begins with the letter of the right choice; if it begins with no letter
    of a choice, the last such letter in it counts.
    """

    answer: Annotated[str, Meta(pattern="^[A-Z]$")]
    choices: Annotated[str, Meta(pattern="^[A-Z]{2,26}$")] = "ABCD"

    def __post_init__(self) -> None:
        if self.answer not in self.choices:
            raise InvalidRunFile(
                f"the answer {self.answer} is not one of the choices {self.choices}"
            )

    @override
    def reward(self, answer: str) -> float:
        line = last_line(answer)
        if first := _LETTER.match(line):
            return float(first[1] == self.answer)
        letters = re.findall(rf"(?<!\w)[{self.choices}](?!\w)", line)
        return float(letters[-1:] == [self.answer])


class Expression(Verifier, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An answer is an arithmetic expression with the right value."""

    answer: Amount

    @override
    def reward(self, answer: str) -> float:
        result = evaluated(answer)
        return float(result is not None and result[0] == _exactly(self.answer))


class Countdown(Verifier, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An answer is an arithmetic expression of the given numbers, each used at most once."""

    target: Annotated[int, Meta(ge=0, le=10**9)]
    numbers: Annotated[
        tuple[Annotated[int, Meta(ge=0, le=10**9)], ...], Meta(min_length=1, max_length=16)
    ]

    @override
    def reward(self, answer: str) -> float:
        result = evaluated(answer)
        if result is None or result[0] != self.target:
            return 0.0
        return float(Counter(result[1]) <= Counter(map(Fraction, self.numbers)))


class Sorted(Verifier, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An answer lists the items sorted, separated by white space or commas; items of one
    character need no separator.
    """

    items: Annotated[
        tuple[Annotated[int, Meta(ge=-(10**15), le=10**15)] | Word, ...],
        Meta(min_length=1, max_length=1024),
    ]
    descending: bool = False

    @property
    def right(self) -> list[str]:
        """Return the items sorted, as texts."""
        whole = all(isinstance(item, int) for item in self.items)
        order = sorted(self.items, key=None if whole else str, reverse=self.descending)
        return [str(item) for item in order]

    @override
    def reward(self, answer: str) -> float:
        right = self.right
        text = answer.strip().removeprefix("[").removesuffix("]").strip()
        close = "".join(right) == text and all(len(item) == 1 for item in right)
        return float(close or _SPLIT.split(text, maxsplit=len(right)) == right)


class Schema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Schema of a JSON value; its fields are the supported keywords of JSON Schema."""

    type: Literal["object", "array", "string", "integer", "number", "boolean", "null"] | None = None
    properties: dict[str, Schema] = {}
    required: tuple[str, ...] = ()
    items: Schema | None = None
    enum: Annotated[tuple[Any, ...], Meta(max_length=64)] | None = None

    def fits(self, value: Any) -> bool:
        """Return True for a value of this schema."""
        if self.type is not None and type(value) not in _TYPES[self.type]:
            return False
        if self.enum is not None and not any(_same(value, choice) for choice in self.enum):
            return False
        if isinstance(value, dict):
            inner = self.properties
            return all(name in value for name in self.required) and all(
                inner[name].fits(entry) for name, entry in value.items() if name in inner
            )
        if isinstance(value, list) and self.items is not None:
            return all(map(self.items.fits, value))
        return True


class Json(Verifier, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An answer is JSON of a schema, by itself, at its place, or in a fence of Markdown."""

    whole: ClassVar[bool] = True
    schema: Schema

    @override
    def reward(self, answer: str) -> float:
        fences = _FENCE.findall(answer)
        for text in dict.fromkeys((answer, final(answer), *fences[-1:])):
            with suppress(*MALFORMED):
                return float(self.schema.fits(decode(text.encode())))
        return 0.0


class Marks(Verifier, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An answer has the marks, each once and in this order."""

    whole: ClassVar[bool] = True
    marks: Annotated[tuple[Text, ...], Meta(min_length=1, max_length=16)]

    @override
    def reward(self, answer: str) -> float:
        places = [answer.find(mark) for mark in self.marks]
        once = all(answer.count(mark) == 1 for mark in self.marks)
        return float(once and places == sorted(places))


_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
VERIFIERS: Mapping[str, type[Verifier]] = {
    "number": Number,
    "exact": Exact,
    "choice": Choice,
    "expression": Expression,
    "countdown": Countdown,
    "sorted": Sorted,
    "json": Json,
    "form": Marks,
}


def verifier(name: str, arguments: Mapping[str, Any], place: str) -> Verifier:
    """Return a verifier with its arguments. Raises InvalidRunFile, with `place`, for an unknown
    name or impossible arguments.
    """
    kind = VERIFIERS.get(name) or _packaged_verifier(name, place)
    with suppress(msgspec.ValidationError, InvalidRunFile):  # explaining an error takes 1 ms
        check_values(arguments, place)
        return convert(dict(arguments), kind)
    fields = msgspec.structs.fields(kind)
    missing = [f.encode_name for f in fields if f.required and f.encode_name not in arguments]
    if missing:
        raise InvalidRunFile(f"{place}: a problem needs {missing[0]} for its verifier {name}")
    try:
        return read_table(arguments, kind, place)
    except InvalidRunFile as error:
        if place in error.message:
            raise
        raise InvalidRunFile(f"{place}: {error.message}") from error


@lru_cache(maxsize=1)
def _installed() -> Mapping[str, EntryPoint]:
    """Return the verifiers of installed packages by name."""
    return {entry_point.name: entry_point for entry_point in entry_points(group=ENTRY_POINTS)}


def _packaged_verifier(name: str, place: str) -> type[Verifier]:
    """Return a verifier of an installed package. Raises InvalidRunFile, with `place`."""
    if name not in _installed():
        names = [*VERIFIERS, *_installed()]
        raise InvalidRunFile(f'{place}: there is no verifier "{name[:64]}": {hint(name, names)}')
    try:
        verifier_class = _installed()[name].load()
    except Exception as error:
        raise InvalidRunFile(f'{place}: the verifier "{name}" does not load: {error}') from error
    if not (isinstance(verifier_class, type) and issubclass(verifier_class, Verifier)):
        raise InvalidRunFile(f'{place}: the package\'s "{name}" is no verifier')
    return verifier_class


def _same(one: Any, other: Any) -> bool:
    """Return True for values of the same JSON: 1, 1.0 and true differ, inside lists too."""
    a, b = (msgspec.json.encode(value, order="sorted") for value in (one, other))
    return a == b


def final(text: str, place: str = "") -> str:
    """Return the final answer in a text, at the last place for answers; "" if it is empty. If the
    problem names a `place`, the answer follows it, and is "" in a text without it.
    """
    if place:
        _, separator, rest = text.rpartition(place)
        return rest.strip() if separator else ""
    mark = _last(_MARK, text)
    if mark is None:
        return text.strip()
    rest = text[mark.end() :]
    if mark[0].startswith("\\"):
        return _in_braces(rest)
    if mark[0].startswith("<"):
        return rest.partition("</")[0].strip()
    if mark[0] == "####":
        return rest.strip().partition("\n")[0]
    return rest.strip()


def _in_braces(text: str) -> str:
    """Return a text up to the brace that closes it; "" if no brace does."""
    depth = 1
    for at, letter in enumerate(text):
        depth += (letter == "{") - (letter == "}")
        if not depth:
            return text[:at].strip()
    return ""


def last_line(text: str) -> str:
    """Return the last line of a text that is not empty."""
    return text.rstrip().rpartition("\n")[2]


def _bare(text: str) -> str:
    """Return a text in one form of Unicode, without marks, quotes and a full stop around it."""
    return normalize("NFC", text).strip().strip("*_`\"'").removesuffix(".").strip()


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """Return the last match in a text; None without a match."""
    return next(iter(deque(pattern.finditer(text), maxlen=1)), None)


def evaluated(text: str) -> tuple[Fraction, list[Fraction]] | None:
    """Return the value of the arithmetic expression on the last line of a text, and its numbers;
    None if it is not an expression. A result after "=" is skipped.
    """
    line = last_line(text).partition("=")[0].translate(_SIGNS).strip()
    terms: list[str] = []
    at = 0
    while at < len(line):
        match = _TERM.match(line, at)
        if match is None or len(match[1] or "") > DIGITS_MAX or len(terms) == TERMS_MAX:
            return None
        terms.append(match[1] or match[2])
        at = match.end()
    parser = _Parser(terms)
    try:
        value = parser.total(0)
    except (ValueError, ZeroDivisionError):
        return None
    return None if parser.terms else (value, parser.numbers)


class _Parser:
    """Terms of an expression, last first, and the numbers read so far."""

    def __init__(self, terms: list[str]) -> None:
        self.terms = terms[::-1]
        self.numbers: list[Fraction] = []

    def total(self, depth: int) -> Fraction:
        """Read a sum. Raises ValueError and ZeroDivisionError."""
        value = self._product(depth)
        while self.terms and self.terms[-1] in "+-":
            sign = 1 if self.terms.pop() == "+" else -1
            value += sign * self._product(depth)
        return value

    def _product(self, depth: int) -> Fraction:
        value = self._factor(depth)
        while self.terms and self.terms[-1] in "*/":
            divided = self.terms.pop() == "/"
            other = self._factor(depth)
            value = value / other if divided else value * other
        return value

    def _factor(self, depth: int) -> Fraction:
        term = self.terms.pop() if self.terms else ""
        if depth > DEPTH_MAX:
            raise ValueError("brackets nest too deeply")
        if term == "-":
            return -self._factor(depth + 1)
        if term == "(":
            value = self.total(depth + 1)
            if not self.terms or self.terms.pop() != ")":
                raise ValueError("a bracket is not closed")
            return value
        self.numbers.append(Fraction(term))  # raises ValueError for a sign
        return self.numbers[-1]


def _exactly(amount: float) -> Fraction:
    """Return an argument as it was written: 0.1 is a tenth."""
    return Fraction(repr(amount) if amount % 1 else int(amount))
