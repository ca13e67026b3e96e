"""Decoding into types: all decoding of JSON and of plain Python by msgspec uses this module.

msgspec builds the description of a type when the type is first decoded, and stores it before it is
complete. A second thread that decodes the same type at that moment reads an incomplete description,
and the process dies of a segmentation fault (measured with msgspec 0.22: with 4 threads, within the
first hundred new types; in 1 of 15 starts of a coordinator under load). Here a type is described
once, under a lock, before any decoding.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, overload

import msgspec

from shared.errors import InvalidRunFile
from shared.nearest_name import nearest
from shared.sentences import Sentence, decode_sentence, figure, plural, sentence_of

T = TypeVar("T")
# Errors of decoding bytes that are not JSON of the type, not UTF-8, or nested too deep.
MALFORMED = (msgspec.DecodeError, UnicodeError, RecursionError)

_WHERE = re.compile(r"(.*?)(?: - at `\$\.?(.*)`)?", re.DOTALL)

_KINDS = {  # msgspec's name of a type -> its name for people
    "int": Sentence("a whole number"),
    "float": Sentence("a number"),
    "bool": Sentence("true or false"),
    "str": Sentence("a text"),
    "array": Sentence("a list"),
    "object": Sentence("a table"),
    "null": Sentence("nothing"),
    **dict.fromkeys(("date", "datetime", "time"), Sentence("a date without quotation marks")),
}
_CHOICE = re.compile(r"Invalid enum value '(.*)'", re.DOTALL)
_FORM = re.compile(r"Expected `str` matching regex '(.*)'", re.DOTALL)
_FIELD = re.compile(r"Object (missing required|contains unknown) field `([^`]*)`")
_TYPE = r"`([a-z]+(?: \| [a-z]+)*)`"
_EXPECTED = re.compile(
    rf"Expected {_TYPE}(?:( of length)? (>=|<=|>|<) ([-+0-9.e]+))?(?:, got {_TYPE})?"
)
_BOUNDS: dict[str, Callable[[Sentence, Sentence], Sentence]] = {
    ">=": lambda kind, bound: Sentence("{kind} of at least {bound}", kind=kind, bound=bound),
    "<=": lambda kind, bound: Sentence("{kind} of at most {bound}", kind=kind, bound=bound),
    ">": lambda kind, bound: Sentence("{kind} above {bound}", kind=kind, bound=bound),
    "<": lambda kind, bound: Sentence("{kind} below {bound}", kind=kind, bound=bound),
}

_decoders_lock = threading.Lock()
_decoders: dict[object, msgspec.json.Decoder[Any]] = {}


@overload
def decoder(kind: type[T]) -> msgspec.json.Decoder[T]: ...
@overload
def decoder(kind: object) -> msgspec.json.Decoder[Any]: ...
def decoder(kind: object) -> msgspec.json.Decoder[Any]:
    """Return the JSON decoder of a type, which any thread may use."""
    json_decoder = _decoders.get(kind)
    if json_decoder is None:
        with _decoders_lock:
            json_decoder = _decoders[kind] = msgspec.json.Decoder(kind, dec_hook=decode_sentence)
    return json_decoder


@overload
def decode(data: bytes | str, kind: type[T]) -> T: ...
@overload
def decode(data: bytes | str, kind: Any = Any) -> Any: ...
def decode(data: bytes | str, kind: Any = Any) -> Any:
    """Return JSON as a value of this type. Raises DecodeError, UnicodeDecodeError,
    RecursionError.
    """
    return decoder(kind).decode(data)


@overload
def convert(value: object, kind: type[T], *, strict: bool = True) -> T: ...
@overload
def convert(value: object, kind: object, *, strict: bool = True) -> object: ...
def convert(value: object, kind: object, *, strict: bool = True) -> object:
    """Return plain Python (dicts, lists, numbers) as a value of this type. Raises
    msgspec.ValidationError.
    """
    decoder(kind)
    return msgspec.convert(value, kind, strict=strict, dec_hook=decode_sentence)


def complaint(error: msgspec.ValidationError, table: str, kind: object = None) -> str:
    """Return msgspec's error as a sentence for people: "Expected `int` >= 1 - at `$.quorum`"
    becomes "[plan] quorum: expected a whole number of at least 1". If `kind` is given, valid
    choices are listed.
    """
    key, problem = _key_and_problem(error, kind)
    return f"{table} {key}: {problem[:1].lower()}{problem[1:]}" if key else f"{table}: {problem}"


def decode_line(line: bytes, kind: type[T], place: str) -> T:
    """Decode a line of an organiser's file. Raises InvalidRunFile, which names the place."""
    try:
        return decoder(kind).decode(line)
    except msgspec.ValidationError as error:
        raise InvalidRunFile(complaint(error, place)) from error
    except MALFORMED as error:
        reason = "this is not text in UTF-8" if isinstance(error, UnicodeError) else error
        raise InvalidRunFile(f"{place}: {reason}") from error


def _key_and_problem(error: msgspec.ValidationError, kind: object) -> tuple[str, str]:
    """Return the wrong key, "" if the error names no key, and the sentence about the error."""
    match = _WHERE.fullmatch(str(error))
    problem, key = (match[1], match[2] or "") if match else (str(error), "")
    valid = choices(kind, key) if kind is not None and _CHOICE.fullmatch(problem) else ()
    return key, in_words(problem, valid).replace("`", "")


def choices(kind: object, key: str) -> tuple[str, ...]:
    """Return the valid texts of the value at `key` (such as "tasks[0].kind") of a type; () if any
    text is valid.
    """
    # imported late, since it takes 13 ms and only errors need it
    from msgspec.inspect import type_info

    infos: list[object] = [type_info(kind)]
    for name in ("", *re.findall(r"\[[^\]]*\]|[^.\[\]]+", key)):
        inner = [part for info in infos for part in _inner_types(info, name)] if name else infos
        bare = [getattr(part, "type", part) for part in inner]  # types without their bounds
        infos = [member for part in bare for member in getattr(part, "types", (part,))]
    return tuple(str(value) for info in infos for value in getattr(info, "values", ()))


def _inner_types(kind: object, name: str) -> Iterator[object]:
    """Yield the type of the field `name` of a struct; for a `name` such as "[...]", the type of the
    items of a list or of the values of a table.
    """
    for field in getattr(kind, "fields", ()):
        if field.encode_name == name:
            yield field.type
    for part in ("item_type", "value_type"):
        if name.startswith("[") and hasattr(kind, part):
            yield getattr(kind, part)


def in_words(problem: str, valid: Sequence[str] = ()) -> Sentence:
    """Return msgspec's expectation in plain words; `valid` are the only valid texts, if any."""
    wrong = _CHOICE.fullmatch(problem)
    if wrong is not None:
        return _no_choice(wrong[1], valid)
    if field := _FIELD.fullmatch(problem):
        if field[1] == "missing required":
            return Sentence('"{name}" is missing', name=field[2])
        return Sentence('nothing here is called "{name}"', name=field[2])
    if form := _FORM.fullmatch(problem):
        return Sentence("expected a text of the form {pattern}", pattern=form[1])
    match = _EXPECTED.fullmatch(problem)
    if match is None:
        return sentence_of(problem.replace("Expected ", "expected ", 1))
    kinds, length, sign, bound, actual = match.groups()
    sentence = _kind(kinds)
    if length:
        sentence = _of_length(kinds, sign, int(bound))
    elif sign:
        sentence = _BOUNDS[sign](sentence, figure(bound.removesuffix(".0")))
    if not actual:
        return Sentence("expected {kind}", kind=sentence)
    fraction = actual == "float" and "int" in kinds
    other = Sentence("one with a fraction") if fraction else _kind(actual)
    return Sentence("expected {kind}, not {other}", kind=sentence, other=other)


def _kind(kinds: str) -> Sentence:
    """Return msgspec's types in plain words: `int | null` is "a whole number"."""
    sentences = [
        _KINDS.get(kind, sentence_of(kind)) for kind in kinds.split(" | ") if kind != "null"
    ]
    whole, *more = sentences or [_KINDS["null"]]
    for other in more:
        whole = Sentence("{kind} or {other}", kind=whole, other=other)
    return whole


def _of_length(kinds: str, sign: str, bound: int) -> Sentence:
    if kinds.startswith("str"):
        if sign == "<=":
            return plural(
                "a text of at most {n} character", "a text of at most {n} characters", bound
            )
        return plural(
            "a text of at least {n} character", "a text of at least {n} characters", bound
        )
    if sign == "<=":
        return plural("at most {n} entry", "at most {n} entries", bound)
    return plural("at least {n} entry", "at least {n} entries", bound)


def _no_choice(wrong: str, valid: Sequence[str]) -> Sentence:
    """Return the sentence about an invalid text, with the nearest of the `valid` texts."""
    if not valid:
        return Sentence("'{value}' is not one of its values", value=wrong)
    names = ", ".join(f'"{text}"' for text in valid)
    near = nearest(wrong, valid)
    if not near:
        return Sentence("'{value}' is not one of {known}", value=wrong, known=names)
    return Sentence(
        "'{value}' is not one of {known}, did you mean \"{near}\"?",
        value=wrong,
        known=names,
        near=near,
    )
